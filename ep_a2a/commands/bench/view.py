"""Shows the report of a sweep on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ep_a2a.commands.bench.report import (
    CONTENDER,
    constant_fields,
    explanation,
    is_functional_check,
    make_table,
    reasons,
)
from ep_a2a.commands.bench.rows import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    Record = dict[str, Any]

COLUMN_MARGIN = 3
"""Characters of a column beside its text: two spaces and a line."""


def show(console: Console, header: Record, records: Sequence[Record]) -> None:
    """Prints the table, the common fields, and why contenders are missing; on CPU the verdict first."""
    if is_functional_check(records):
        console.print(_verdict(records), header["note"], sep="\n", highlight=False)
    console.print(constant_fields(records), markup=False, highlight=False)
    headings, rows = make_table(records)
    for columns in columns_that_fit(headings, rows, console.width):
        table = Table()
        for column in columns:
            table.add_column(headings[column], justify="left" if headings[column] == CONTENDER else "right")
        for row in rows:
            table.add_row(*(row[column] for column in columns))
        console.print(table)
    for text in [*reasons(records), explanation(records)]:
        console.print(text, markup=False, highlight=False)


def _verdict(records: Sequence[Record]) -> Text:
    """Says in one sentence how many results are right."""
    checked = [record for record in records if record["status"] != Status.UNAVAILABLE]
    right = sum(record["status"] == Status.OK for record in checked)
    where = f"on {records[0]['world_size']} CPU processes" if _is_one_world(records) else "on CPU"
    if right == len(checked):
        return Text(f"Right: {right} of {right} results of dispatch and combine {where}.", style="bold green")
    wrong = f"Wrong: {len(checked) - right} of {len(checked)} results of dispatch and combine {where}; see below."
    return Text(wrong, style="bold red")


def _is_one_world(records: Sequence[Record]) -> bool:
    return len({record["world_size"] for record in records}) == 1


def columns_that_fit(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Returns the columns of each table, by number: several tables where one would be wider than the terminal.

    Each begins with the columns up to CONTENDER, which name its rows, and has one more at least.
    """
    widths = [COLUMN_MARGIN + max(map(len, texts)) for texts in zip(headings, *rows)]
    first = list(range(headings.index(CONTENDER) + 1))
    tables = [list(first)]
    for column in range(len(first), len(headings)):
        has_room = 1 + sum(widths[each] for each in (*tables[-1], column)) <= width
        if not has_room and len(tables[-1]) > len(first):
            tables.append(list(first))
        tables[-1].append(column)
    return tables
