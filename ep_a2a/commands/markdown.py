"""Writes tables in markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table; a bar in a cell becomes a slash, since bars divide cells."""
    table = (headings, ("---",) * len(headings), *rows)
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table]
