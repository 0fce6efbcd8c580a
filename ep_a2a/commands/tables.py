"""Makes the tables that commands print, and writes bytes with the unit that keeps them short."""

from collections.abc import Collection, Iterable, Sequence

from rich.console import JustifyMethod
from rich.table import Table

UNITS = ("KiB", "MiB", "GiB", "TiB")
COLUMN_MARGIN = 3
"""Characters of a column beside its text: two spaces and a line."""


def new_table(title: str, columns: Iterable[str], right: Iterable[str] = ()) -> Table:
    """Returns a table without rows; texts that are too wide are folded.

    Args:
        title: above the table, on the left. columns: their headings. right: headings of right-aligned columns.
    """
    table, aligned = Table(title=title, title_justify="left"), set(right)
    for column in columns:
        table.add_column(column, justify="right" if column in aligned else "left", overflow="fold")
    return table


def fitting_tables(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    num_names: int,
    width: int,
    right: Collection[str] = (),
) -> list[Table]:
    """Returns tables no wider than a terminal, where the columns that name the rows leave room for another one.

    A heading has a line for each word, and no cell is folded.

    Args:
        title: above the first table.
        headings, rows: of one table that may be too wide.
        num_names: first columns, which name a row; every table begins with them.
        width: characters of the terminal.
        right: headings of right-aligned columns.
    """
    tables: list[Table] = []
    for columns in columns_that_fit(headings, rows, num_names, width):
        table = Table(title=None if tables else title, title_justify="left")
        for column in columns:
            justify: JustifyMethod = "right" if headings[column] in right else "left"
            table.add_column(headings[column].replace(" ", "\n"), justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*(row[column] for column in columns))
        tables.append(table)
    return tables


def columns_that_fit(
    headings: Sequence[str], rows: Sequence[Sequence[str]], num_names: int, width: int
) -> list[list[int]]:
    """Returns the columns of each table, by number. Each has the first `num_names`, and one more at least."""
    texts = [[*heading.split(), *cells] for heading, *cells in zip(headings, *rows)]
    chars = [COLUMN_MARGIN + max(map(len, each), default=0) for each in texts]
    names = list(range(num_names))
    tables = [list(names)]
    for column in range(num_names, len(headings)):
        has_room = 1 + sum(chars[each] for each in (*tables[-1], column)) <= width
        if not has_room and len(tables[-1]) > num_names:
            tables.append(list(names))
        tables[-1].append(column)
    return tables


def bytes_text(num_bytes: int) -> str:
    """Returns a number of bytes as text, for example "1.5 MiB"."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value, units = num_bytes / 1024, list(UNITS)
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}"
