"""Makes the tables that commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable


def new_table(title: str, columns: Iterable[str], right: Iterable[str] = ()) -> Table:
    """Returns a table without rows; texts that are too wide are folded.

    Args:
        title: above the table, on the left. columns: their headings. right: headings of right-aligned columns.
    """
    table, aligned = Table(title=title, title_justify="left"), set(right)
    for column in columns:
        table.add_column(column, justify="right" if column in aligned else "left", overflow="fold")
    return table
