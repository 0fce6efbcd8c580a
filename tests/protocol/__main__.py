"""Explores all models of the protocol, and prints the tables of docs/protocol.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.protocol import report
from tests.protocol.catalogue import MUTANTS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/protocol.md, too")
    parser.add_argument("--traces", action="store_true", help="print the counterexample of each mutant")
    options = parser.parse_args()
    for make in report.PARTS.values():
        sys.stdout.write(f"{make()}\n\n")
    if options.traces:
        for case in MUTANTS:
            sys.stdout.write(f"{case.name}\n{case.outcome}\n\n")
    if options.write:
        DOCUMENT.write_text(report.updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
