"""Tables that stay within a terminal, and numbers with their units."""

import io

import pytest
from rich.console import Console

from ep_a2a.commands.tables import bytes_text, columns_that_fit, fitting_tables

HEADINGS, ROWS = ["T", "contender", "aa", "bb", "cc"], [["1", "x" * 9, "1", "2", "3"]]


def printed(width: int, headings: list[str], rows: list[list[str]], num_names: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(*fitting_tables("title", headings, rows, num_names=num_names, width=width, right={headings[-1]}))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_a_table_that_is_too_wide_is_cut_behind_the_names() -> None:
    assert columns_that_fit(HEADINGS, ROWS, 2, 80) == [[0, 1, 2, 3, 4]]
    assert columns_that_fit(HEADINGS, ROWS, 2, 27) == [[0, 1, 2, 3], [0, 1, 4]]
    # wider than the terminal even with one column
    assert columns_that_fit(HEADINGS, ROWS, 2, 3) == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]


def test_nothing_is_cut_and_words_stay_whole() -> None:
    headings, rows = ["GPUs", "copies to other nodes", "dispatch µs"], [["16", "3.262", "140.4"], ["32", "5.4", "9"]]
    for width in (24, 30, 40, 80):
        lines = printed(width, headings, rows, 1)
        assert max(map(len, lines)) <= width
        words = " ".join(lines).split()
        for text in (*headings, *(cell for row in rows for cell in row)):
            assert set(text.split()) <= set(words)
        assert words.count("title") == 1
    assert len(printed(80, headings, rows, 1)) < len(printed(24, headings, rows, 1))


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")]
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text
