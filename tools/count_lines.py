"""Counts lines of code by package: without blank lines, comments and docstrings.

python tools/count_lines.py              one line per room of ep_a2a, and the sum
python tools/count_lines.py --by-file    one line per file
python tools/count_lines.py tests        another folder
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def docstring_lines(tree: ast.AST) -> set[int]:
    """Numbers of the lines that docstrings take: of modules, classes, functions, and those below an assignment."""
    found: set[int] = set()
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_text and isinstance(statement.value.value, str):
                found.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return found


def count_code_lines(text: str) -> int:
    """Lines of `text` that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines: set[int] = set()
    for token in tokens:
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


def main() -> None:
    """Prints the counts of the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=PROJECT / "ep_a2a")
    parser.add_argument("--by-file", action="store_true", help="a line per file")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for path in sorted(options.folder.rglob("*.py")):
        place = path.relative_to(options.folder)
        room = str(place) if options.by_file or len(place.parts) == 1 else place.parts[0]
        counts[room] += count_code_lines(path.read_text(encoding="utf-8"))
    for room, number in counts.most_common():
        print(f"{number:7,}  {room}")
    print(f"{counts.total():7,}  all")


if __name__ == "__main__":
    main()
