"""Shows the demo's report: on a terminal the verdict, the traffic between ranks, then details."""

from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

Report = dict[str, Any]
SHADES = "░▒▓█"
"""From the fewest rows of a cell to the most."""
CELL_WIDTH, OTHER_COLUMNS_WIDTH = 8, 30
"""Characters of a column of the traffic, and of what stands beside those columns."""
TOLERANCE = (
    "strict, by element: each rank's sum is rounded to bfloat16 once, so is the sum over ranks, and between them each "
    "node's where there are several"
)


def show_report(console: Console, report: Report, *, verbose: bool = False) -> None:
    """Prints the report that `make_report` returns: its verdict and traffic; with `verbose` everything else."""
    notes = [Text(report["note"], style="yellow")] if report["note"] else []
    console.print(Group(_verdict(report), *notes, "", _traffic(report, console), _saving(report)))
    if verbose:
        grid = Table.grid(padding=(0, 2))
        for label, value in _details(report):
            # Text, not markup: some values contain square brackets.
            grid.add_row(Text(label, style="bold"), Text(value))
        console.print("", grid, sep="\n")


def _verdict(it: Report) -> Text:
    """Says in one sentence what was checked, and whether it is right."""
    where = "CPU processes" if it["device"] == "cpu" else "ranks that share GPUs" if it["note"] else "GPUs"
    num_tokens = sum(it["tokens_per_rank"])
    sent = f"{num_tokens} tokens went through an expert-parallel MoE layer on {it['ranks']} {where}"
    if it["matches"]:
        return Text(f"Right: {sent}, and every output matches the dense layer.", style="bold green")
    wrong = "the output DOES NOT MATCH the dense layer"
    if not it["comparison"]["rows_as_routed"]:
        wrong += ", and ranks did not receive the rows that the router chose"
    return Text(f"Wrong: {sent}, and {wrong}.", style="bold red")


def _traffic(it: Report, console: Console) -> Table:
    """Returns the rows from each rank to each rank; without the single destinations where they do not fit."""
    num_ranks, rows = it["ranks"], it["rows"]
    fits = OTHER_COLUMNS_WIDTH + CELL_WIDTH * num_ranks <= console.width
    most = max(max(row) for row in rows)

    def cell(count: int) -> Text:
        """A number, and behind it a block that is the darker the nearer the number is to the largest."""
        if console.options.ascii_only or not fits:
            return Text(str(count))
        shade = SHADES[min(len(SHADES) - 1, len(SHADES) * count // max(most, 1))] if count else " "
        return Text(f"{count} {shade}")

    table = Table(title="Rows that each rank sends in dispatch", title_justify="left", box=box.SIMPLE_HEAD)
    headings = [f"to {destination}" for destination in range(num_ranks)] if fits else ["kept"]
    for heading in ("from rank", *headings, "to others", "received"):
        table.add_column(heading, justify="right")
    received = [sum(column) for column in zip(*rows)]
    for source, row in enumerate(rows):
        remote = sum(row) - row[source]
        cells = [cell(count) for count in (row if fits else [row[source]])]
        cells[source if fits else 0].stylize("dim")
        table.add_row(str(source), *cells, str(remote), str(received[source]))
    return table


def _saving(it: Report) -> Text:
    needed, copies = (
        sum(map(sum, rows)) - sum(row[rank] for rank, row in enumerate(rows))
        for rows in (it["rows"], it["rows_without_deduplication"])
    )
    text = "A token travels once to each rank that owns one of its experts"
    text += f": {1 - needed / copies:.0%} fewer rows than with a copy for each expert." if copies else "."
    if it["gathers"]:
        text += f" The backend {it['backend']} brings every token to every rank."
    return Text(text)


def _details(it: Report) -> list[tuple[str, str]]:
    """Returns label and value of each line behind the verdict and the traffic."""
    cast = "" if it["quant_type"] == "none" else f", tokens cast inside dispatch: {it['quant_type']}"
    sizes = f"hidden size {it['hidden_dim']}, {it['experts']} SwiGLU experts of intermediate size"
    found = it["comparison"]
    errors = f"{found['max_error']:.2e}, tolerance there {found['tolerance']:.2e}; outputs up to"
    worst = f"worst element at {found['worst_share']:.0%} of its tolerance"
    return [
        ("tokens", f"{' + '.join(map(str, it['tokens_per_rank']))} by rank, uneven on purpose"),
        ("layer", f"{sizes} {it['intermediate_dim']}, softmax top-{it['topk']} router{cast}"),
        ("topology", it["topology"]),
        ("backend", f"{it['backend']}: {it['backend_reason']}"),
        ("kernel", f"{it['kernel']}: {it['kernel_reason']}"),
        ("largest error", f"{errors} {found['max_output']:.2e}; {worst}"),
        ("tolerance", TOLERANCE),
    ]
