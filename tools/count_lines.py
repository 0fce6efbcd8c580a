"""Counts lines of code of what `ruff format` makes of each file: without blank lines, comments and docstrings.

python tools/count_lines.py              one line per room of ep_a2a, and the sum
python tools/count_lines.py --by-file    one line per file
python tools/count_lines.py tests        another folder

Comments that switch the formatter off count in ep_a2a/kernels only, unless --strip-kernels is given.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
KERNELS = PROJECT / "ep_a2a" / "kernels"
FORMATTER_OFF = re.compile(r"[ \t]*# fmt: *(?:skip|off|on)\b")
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


def ruff() -> str:
    """The formatter beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("ruff")
    found = str(beside) if beside.exists() else shutil.which("ruff")
    if found is None:
        sys.exit("ruff is not installed; run: make lint")
    return found


def formatted(folder: Path, strip_kernels: bool) -> dict[Path, str]:
    """The text of each Python file of `folder` as `ruff format` writes it, by its path relative to `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        copies = Path(temporary)
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if strip_kernels or not path.resolve().is_relative_to(KERNELS):
                text = FORMATTER_OFF.sub("", text)
            copy = copies / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")
        command = [ruff(), "format", "--quiet", "--config", str(PROJECT / "pyproject.toml"), str(copies)]
        subprocess.run(command, check=True)
        return {copy.relative_to(copies): copy.read_text(encoding="utf-8") for copy in sorted(copies.rglob("*.py"))}


def main() -> None:
    """Print the counts of the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=PROJECT / "ep_a2a")
    parser.add_argument("--by-file", action="store_true", help="a line per file")
    parser.add_argument("--strip-kernels", action="store_true", help="format ep_a2a/kernels throughout, too")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for place, text in formatted(options.folder, options.strip_kernels).items():
        room = str(place) if options.by_file or len(place.parts) == 1 else place.parts[0]
        counts[room] += count_code_lines(text)
    for room, number in counts.most_common():
        print(f"{number:7,}  {room}")
    print(f"{counts.total():7,}  all")


if __name__ == "__main__":
    main()
