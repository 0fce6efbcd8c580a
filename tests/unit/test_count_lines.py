"""tools/count_lines.py counts code alone."""

from __future__ import annotations

from tools.count_lines import count_code_lines

TEXT = '''"""A module."""

# a comment
LIMIT = 3  # counts
"""Of something."""


def double(
    number: int,
) -> int:
    """Twice the number."""
    text = """two
lines"""
    return 2 * number
'''


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    assert count_code_lines(TEXT) == 1 + 3 + 2 + 1
