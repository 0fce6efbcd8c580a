"""Explores everything, and prints what belongs into docs/protocol.md; --write puts it there, --traces prints traces."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.protocol import report
from tests.protocol.catalogue import MUTANTS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"


def main() -> None:
    for make in report.PARTS.values():
        sys.stdout.write(f"{make()}\n\n")
    if "--traces" in sys.argv:
        for case in MUTANTS:
            sys.stdout.write(f"{case.name}\n{case.outcome}\n\n")
    if "--write" in sys.argv:
        DOCUMENT.write_text(report.updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
