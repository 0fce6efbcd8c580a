"""Shows the demo's report on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ep_a2a.commands.demo.worker import NUM_STEPS, PHASES

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


Rows = list[tuple[str, "str | Text"]]
"""Label and value of each line."""


def show_report(console: Console, report: dict[str, Any]) -> None:
    """Prints the report that `make_report` returns."""
    console.print(Group(_grid(_setup(report)), "", _traffic(report), "", _grid(_results(report))))


def _grid(rows: Rows) -> Table:
    grid = Table.grid(padding=(0, 2))
    for label, value in rows:
        # Text, not markup: some values contain square brackets.
        grid.add_row(Text(label, style="bold"), value if isinstance(value, Text) else Text(value))
    return grid


def _setup(it: dict[str, Any]) -> Rows:
    num_tokens, available, num_ranks = sum(it["tokens_per_rank"]), it["tokens_available"], it["ranks"]
    used = f"the first {num_tokens}" if num_tokens <= available else f"read again up to {num_tokens}"
    ranks = f"{num_ranks}, one process each"
    if num_ranks < it["ranks_asked_for"]:
        ranks = f"{num_ranks}, one per GPU; {it['ranks_asked_for']} were asked for, there are {num_ranks} GPUs"
    cast = "bfloat16" if it["quant_type"] == "none" else f"bfloat16, cast inside dispatch: {it['quant_type']}"
    device = it["device_name"] or "CPU: the kernels run in Triton's interpreter, over shared memory"
    if it["device"] == "cpu" and it["wire_bytes_gathered"] is not None:
        device = "CPU"
    return [
        ("text", f"{it['text']}: {available} words and marks, {used}"),
        ("tokens", f"{' + '.join(map(str, it['tokens_per_rank']))} by rank, uneven on purpose; {cast}"),
        ("layer", f"hidden size {it['hidden_dim']}, {it['experts']} SwiGLU experts of intermediate size "
                  f"{it['intermediate_dim']}, softmax top-{it['topk']} router"),
        ("ranks", ranks),
        ("device", device),
        ("topology", it["topology"]),
        ("backend", f"{it['backend']}: {it['backend_reason']}"),
        ("kernel", f"{it['kernel']}: {it['kernel_reason']}"),
    ]  # fmt: skip


def _traffic(it: dict[str, Any]) -> RenderableType:
    table = Table(title="Rows and bytes sent in dispatch, each token once per rank", title_justify="left")
    table.add_column("from rank")
    for destination in range(it["ranks"]):
        table.add_column(f"to {destination}", justify="right")
    table.add_column("to others", justify="right", style="bold")

    def sent(count: int) -> str:
        return f"{count}\n{_bytes(count * it['row_bytes_dispatch'])}"

    for source, row in enumerate(it["rows"]):
        cells: list[str | Text] = [sent(count) for count in row]
        cells[source] = Text(f"{row[source]}\nlocal", style="dim")
        table.add_row(str(source), *cells, sent(sum(row) - row[source]))
    table.add_section()
    table.add_row("received", *(str(sum(column)) for column in zip(*it["rows"])), "")
    return table


def _results(it: dict[str, Any]) -> Rows:
    times = ", ".join(f"{name} {_duration(it['seconds'][name])}" for name in PHASES)
    times += f" (slowest rank, median of {NUM_STEPS - 1} steps)"
    if it["device"] == "cpu":
        times += ". On CPU they say nothing about GPUs."
    return [*_wire(it), ("times", times), *_check(it)]


def _wire(it: dict[str, Any]) -> Rows:
    needed, copies, gathered = (
        it["wire_bytes"], it["wire_bytes_without_deduplication"], it["wire_bytes_gathered"]
    )  # fmt: skip
    saved = f", {1 - needed['total'] / copies['total']:.0%} saved" if copies["total"] else ""
    rows: Rows = [
        ("on the wire" if gathered is None else "routing needs", _describe(needed)),
        ("", f"without deduplication, one copy per expert: {_describe(copies)}{saved}"),
    ]
    if gathered is not None:
        rows.append(
            ("on the wire", f"at least {_describe(gathered)}: {it['backend']} brings every token to every rank")
        )
    return rows


def _describe(wire: dict[str, int]) -> str:
    total, dispatch, combine = (_bytes(wire[name]) for name in ("total", "dispatch", "combine"))
    return f"{total} between ranks: dispatch {dispatch}, combine {combine}"


def _check(it: dict[str, Any]) -> Rows:
    found = it["comparison"]
    rows: Rows = [
        ("largest error", f"{found['max_error']:.2e}, tolerance there {found['tolerance']:.2e}; outputs up to "
                          f"{found['max_output']:.2e}; worst element at {found['worst_share']:.0%} of its tolerance"),
        ("tolerance", "strict, by element: each rank's sum is rounded to bfloat16 once, so is the sum over ranks, "
                      "and between them each node's where there are several"),
    ]  # fmt: skip
    if it["quant_type"] != "none":
        change = f"{found['max_change_by_cast']:.2e}"
        rows.append(("fp8 cast", f"the dense MoE sees the same cast tokens; the cast moves it by {change}"))
    if not found["rows_as_routed"]:
        rows.append(("rows", Text("ranks did not receive the rows that the routing says", style="bold red")))
    verdict = Text("matches the dense MoE", style="bold green")
    if not found["matches"]:
        verdict = Text("DOES NOT MATCH the dense MoE", style="bold red")
    return [*rows, ("result", verdict)]


def _bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    value, units = count / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
