"""tools/count_lines.py counts code alone."""

from __future__ import annotations

from pathlib import Path

from tools.count_lines import count_code_lines, formatted

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


def test_packed_lines_are_counted_as_the_formatter_writes_them(tmp_path) -> None:
    (tmp_path / "packed.py").write_text("NUMBERS = [\n    1, 2,\n]  # fmt: skip\nMORE = [1, 2]\n")
    assert count_code_lines(formatted(tmp_path, strip_kernels=False)[Path("packed.py")]) == 5
