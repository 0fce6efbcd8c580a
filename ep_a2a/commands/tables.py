"""Makes the tables that commands print, and writes bytes with the unit that keeps them short."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

UNITS = ("KiB", "MiB", "GiB", "TiB")
MAX_CHARACTERS = 10_000
"""Of a line of a table: more than any has."""


def new_table(title: str, columns: Iterable[str], right: Iterable[str] = ()) -> Table:
    """Returns a table without rows; texts that are too wide are folded.

    Args:
        title: above the table, on the left. columns: their headings. right: headings of right-aligned columns.
    """
    table, aligned = Table(title=title, title_justify="left"), set(right)
    for column in columns:
        table.add_column(column, justify="right" if column in aligned else "left", overflow="fold")
    return table


def print_wide(console: Console, table: Table) -> None:
    """Prints a table of figures, of which no cell is folded: lines that are too long for the terminal go on below."""
    for column in table.columns:
        column.no_wrap = True
    table.width = console.measure(table, options=console.options.update(width=MAX_CHARACTERS)).maximum
    console.print(table, crop=False, soft_wrap=True)


def bytes_text(num_bytes: int) -> str:
    """Returns a number of bytes as text, for example "1.5 MiB"."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value, units = num_bytes / 1024, list(UNITS)
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}"
