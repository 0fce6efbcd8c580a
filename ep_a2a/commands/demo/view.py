"""Shows the demo's report on a terminal: the verdict, the traffic between ranks, then details."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ep_a2a.commands.demo.worker import NUM_STEPS, PHASES
from ep_a2a.commands.units import bytes_text, duration_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


Rows = list[tuple[str, str]]
"""Label and value of each line."""
SHADES = "░▒▓█"
"""From the fewest rows of a cell to the most."""
CELL_WIDTH, OTHER_COLUMNS_WIDTH = 8, 40
"""Characters of a column of the traffic, and of what stands beside those columns."""


def show_report(console: Console, report: dict[str, Any], *, verbose: bool = False) -> None:
    """Prints the report that `make_report` returns: its verdict and traffic; with `verbose` everything else."""
    parts: list[RenderableType] = [_verdict(report), *_notes(report), "", _traffic(report, console), _saving(report)]
    if verbose:
        parts += ["", _grid([*_setup(report), *_wire(report), *_times(report), *_errors(report)])]
    console.print(Group(*parts))


def _verdict(it: dict[str, Any]) -> Text:
    """Says in one sentence what was checked, and whether it is right."""
    num_tokens, num_ranks = sum(it["tokens_per_rank"]), it["ranks"]
    where = "CPU processes" if it["device"] == "cpu" else "ranks that share GPUs" if it["note"] else "GPUs"
    sent = f"{num_tokens} tokens went through an expert-parallel MoE layer on {num_ranks} {where}"
    if it["matches"]:
        return Text(f"Right: {sent}, and every output matches the dense layer.", style="bold green")
    wrong = "the output DOES NOT MATCH the dense layer"
    if not it["comparison"]["rows_as_routed"]:
        wrong += ", and ranks did not receive the rows that the router chose"
    return Text(f"Wrong: {sent}, and {wrong}.", style="bold red")


def _notes(it: dict[str, Any]) -> list[Text]:
    """Says what the reader must know beside the verdict."""
    return [Text(it["note"], style="yellow")] if it["note"] else []


def _grid(rows: Rows) -> Table:
    grid = Table.grid(padding=(0, 2))
    for label, value in rows:
        # Text, not markup: some values contain square brackets.
        grid.add_row(Text(label, style="bold"), Text(value))
    return grid


def _traffic(it: dict[str, Any], console: Console) -> Table:
    """Returns the rows from each rank to each rank; without the single destinations where they do not fit."""
    num_ranks, rows = it["ranks"], it["rows"]
    fits = OTHER_COLUMNS_WIDTH + CELL_WIDTH * num_ranks <= console.width
    shades = "" if console.options.ascii_only else SHADES
    most = max(max(row) for row in rows)
    table = Table(title="Rows that each rank sends in dispatch", title_justify="left", box=box.SIMPLE_HEAD)
    headings = [f"to {destination}" for destination in range(num_ranks)] if fits else ["kept"]
    for heading in ("from rank", *headings, "to others", "bytes", "received"):
        table.add_column(heading, justify="right")
    received = [sum(column) for column in zip(*rows)]
    for source, row in enumerate(rows):
        remote = sum(row) - row[source]
        cells = [_shaded(count, most, shades) for count in row] if fits else [Text(str(row[source]))]
        cells[source if fits else 0].stylize("dim")
        num_bytes = remote * it["row_bytes_dispatch"]
        table.add_row(str(source), *cells, str(remote), bytes_text(num_bytes), str(received[source]))
    return table


def _shaded(count: int, most: int, shades: str) -> Text:
    """Returns a number, and behind it a block that is the darker the nearer the number is to `most`."""
    if not shades:
        return Text(str(count))
    shade = shades[min(len(shades) - 1, len(shades) * count // max(most, 1))] if count else " "
    return Text(f"{count} {shade}")


def _saving(it: dict[str, Any]) -> Text:
    needed, copies, gathered = it["wire_bytes"], it["wire_bytes_without_deduplication"], it["wire_bytes_gathered"]
    text = "A token travels once to each rank that owns one of its experts"
    if not copies["total"]:
        return Text(f"{text}.")
    saved = 1 - needed["total"] / copies["total"]
    text += f": {bytes_text(needed['total'])} between ranks, {saved:.0%} less than with a copy for each expert."
    if gathered is not None:
        text += f" The backend {it['backend']} brings every token to every rank: {bytes_text(gathered['total'])}."
    return Text(text)


def _setup(it: dict[str, Any]) -> Rows:
    num_tokens, available = sum(it["tokens_per_rank"]), it["tokens_available"]
    used = f"the first {num_tokens}" if num_tokens <= available else f"read again up to {num_tokens}"
    cast = "bfloat16" if it["quant_type"] == "none" else f"bfloat16, cast inside dispatch: {it['quant_type']}"
    device = it["device_name"] or "CPU: the kernels run in Triton's interpreter, over shared memory"
    if it["device"] == "cpu" and it["wire_bytes_gathered"] is not None:
        device = "CPU"
    return [
        ("text", f"{it['text']}: {available} words and marks, {used}"),
        ("tokens", f"{' + '.join(map(str, it['tokens_per_rank']))} by rank, uneven on purpose; {cast}"),
        (
            "layer",
            f"hidden size {it['hidden_dim']}, {it['experts']} SwiGLU experts of intermediate size "
            f"{it['intermediate_dim']}, softmax top-{it['topk']} router",
        ),
        ("ranks", f"{it['ranks']}, one process each"),
        ("device", device),
        ("topology", it["topology"]),
        ("backend", f"{it['backend']}: {it['backend_reason']}"),
        ("kernel", f"{it['kernel']}: {it['kernel_reason']}"),
    ]


def _wire(it: dict[str, Any]) -> Rows:
    gathered = it["wire_bytes_gathered"]
    rows = [
        ("on the wire" if gathered is None else "routing needs", _describe(it["wire_bytes"])),
        ("", f"without deduplication, one copy per expert: {_describe(it['wire_bytes_without_deduplication'])}"),
    ]
    if gathered is not None:
        rows.append(("on the wire", f"at least {_describe(gathered)}"))
    return rows


def _describe(wire: dict[str, int]) -> str:
    total, dispatch, combine = (bytes_text(wire[name]) for name in ("total", "dispatch", "combine"))
    return f"{total} between ranks: dispatch {dispatch}, combine {combine}"


def _times(it: dict[str, Any]) -> Rows:
    """Returns the times of a step on GPUs; the interpreter's say nothing about GPUs and are left out."""
    if it["device"] == "cpu":
        return []
    times = ", ".join(f"{name} {duration_text(it['seconds'][name])}" for name in PHASES)
    return [("times", f"{times} (slowest rank, median of {NUM_STEPS - 1} steps)")]


def _errors(it: dict[str, Any]) -> Rows:
    found = it["comparison"]
    rows = [
        (
            "largest error",
            f"{found['max_error']:.2e}, tolerance there {found['tolerance']:.2e}; outputs up to "
            f"{found['max_output']:.2e}; worst element at {found['worst_share']:.0%} of its tolerance",
        ),
        (
            "tolerance",
            "strict, by element: each rank's sum is rounded to bfloat16 once, so is the sum over ranks, "
            "and between them each node's where there are several",
        ),
    ]
    if it["quant_type"] != "none":
        change = f"{found['max_change_by_cast']:.2e}"
        rows.append(("fp8 cast", f"the dense layer sees the same cast tokens; the cast moves it by {change}"))
    return rows
