"""Shows the demo's report on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ep_a2a.commands.demo.launcher import NUM_STEPS

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ep_a2a.commands.demo.report import DemoReport, WireBytes


def show_report(console: Console, report: DemoReport) -> None:
    """Prints the report."""
    console.print(Group(_setup(report), "", _traffic(report), "", _results(report)))


def _grid(rows: list[tuple[str, str | Text]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for label, value in rows:
        # Text, not markup: some values contain square brackets.
        grid.add_row(Text(label, style="bold"), value if isinstance(value, Text) else Text(value))
    return grid


def _setup(report: DemoReport) -> RenderableType:
    shares = " + ".join(map(str, report.tokens_per_rank))
    num_tokens = sum(report.tokens_per_rank)
    used = f"the first {num_tokens}" if num_tokens <= report.tokens_available else f"read again up to {num_tokens}"
    ranks = f"{report.ranks}, one process each"
    if report.ranks < report.ranks_asked_for:
        ranks = f"{report.ranks}, one per GPU; {report.ranks_asked_for} were asked for, there are {report.ranks} GPUs"
    cast = "bfloat16" if report.quant_type == "none" else f"bfloat16, cast inside dispatch: {report.quant_type}"
    device = report.device_name or "CPU: the kernels run in Triton's interpreter, over shared memory"
    if report.device == "cpu" and report.wire_bytes_gathered is not None:
        device = "CPU"
    return _grid(
        [
            ("text", f"{report.text}: {report.tokens_available} words and marks, {used}"),
            ("tokens", f"{shares} by rank, uneven on purpose; {cast}"),
            ("layer", f"hidden size {report.hidden_dim}, {report.experts} SwiGLU experts of intermediate size "
                      f"{report.intermediate_dim}, softmax top-{report.topk} router"),
            ("ranks", ranks),
            ("device", device),
            ("topology", report.topology),
            ("backend", f"{report.backend}: {report.backend_reason}"),
            ("kernel", f"{report.kernel}: {report.kernel_reason}"),
        ]
    )  # fmt: skip


def _traffic(report: DemoReport) -> RenderableType:
    table = Table(title="Rows and bytes sent in dispatch, each token once per rank", title_justify="left")
    table.add_column("from rank")
    for destination in range(report.ranks):
        table.add_column(f"to {destination}", justify="right")
    table.add_column("to others", justify="right", style="bold")
    for source, row in enumerate(report.rows):
        cells = [_cell(count, report, local=source == destination) for destination, count in enumerate(row)]
        table.add_row(str(source), *cells, _cell(sum(row) - row[source], report, local=False))
    table.add_section()
    received = [sum(column) for column in zip(*report.rows)]
    table.add_row("received", *map(str, received), "")
    return table


def _cell(count: int, report: DemoReport, *, local: bool) -> Text:
    if local:
        return Text(f"{count}\nlocal", style="dim")
    return Text(f"{count}\n{_bytes(count * report.row_bytes_dispatch)}")


def _results(report: DemoReport) -> RenderableType:
    seconds = report.seconds
    times = (
        f"dispatch {_duration(seconds.dispatch)}, experts {_duration(seconds.experts)}, "
        f"combine {_duration(seconds.combine)} (slowest rank, median of {NUM_STEPS - 1} steps)"
    )
    if report.device == "cpu":
        times += ". On CPU they say nothing about GPUs."
    return _grid([*_wire(report), ("times", times), *_check(report)])


def _wire(report: DemoReport) -> list[tuple[str, str | Text]]:
    needed, copies, gathered = report.wire_bytes, report.wire_bytes_without_deduplication, report.wire_bytes_gathered
    saved = f", {1 - needed.total / copies.total:.0%} saved" if copies.total else ""
    rows: list[tuple[str, str | Text]] = [
        ("on the wire", _describe(needed)),
        ("", f"without deduplication, one copy per expert: {_describe(copies)}{saved}"),
    ]
    if gathered is not None:
        rows[0] = ("routing needs", _describe(needed))
        rows.append(
            ("on the wire", f"at least {_describe(gathered)}: {report.backend} brings every token to every rank")
        )
    return rows


def _describe(wire: WireBytes) -> str:
    return f"{_bytes(wire.total)} between ranks: dispatch {_bytes(wire.dispatch)}, combine {_bytes(wire.combine)}"


def _check(report: DemoReport) -> list[tuple[str, str | Text]]:
    found = report.comparison
    verdict = Text("matches the dense MoE", style="bold green")
    if not found.matches:
        verdict = Text("DOES NOT MATCH the dense MoE", style="bold red")
    rows: list[tuple[str, str | Text]] = [
        ("largest error", f"{found.max_error:.2e}, tolerance there {found.tolerance:.2e}; outputs up to "
                          f"{found.max_output:.2e}; worst element at {found.worst_share:.0%} of its tolerance"),
        ("tolerance", "strict, by element: each rank's sum is rounded to bfloat16 once, so is the sum over ranks, "
                      "and between them each node's where there are several"),
    ]  # fmt: skip
    if report.quant_type != "none":
        rows.append(
            (
                "fp8 cast",
                f"the dense MoE sees the same cast tokens; the cast moves it by {found.max_change_by_cast:.2e}",
            )
        )
    if not found.rows_as_routed:
        rows.append(("rows", Text("ranks did not receive the rows that the routing says", style="bold red")))
    return [*rows, ("result", verdict)]


def _bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    value, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
