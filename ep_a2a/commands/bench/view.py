"""Shows the report of a sweep on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from ep_a2a.commands.wide_tables import fitting_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    Record = dict[str, Any]


def show(console: Console, header: Record, records: Sequence[Record]) -> None:
    """Prints the table, the common fields, and why contenders are missing; on CPU the verdict first."""
    if is_functional_check(records):
        console.print(_verdict(records), header["note"], sep="\n", highlight=False)
    console.print(constant_fields(records), markup=False, highlight=False)
    headings, rows = make_table(records)
    names = headings.index(CONTENDER) + 1
    right = set(headings) - {CONTENDER}
    console.print(*fitting_tables("", headings, rows, num_names=names, width=console.width, right=right))
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
