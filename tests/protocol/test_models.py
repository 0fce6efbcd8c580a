"""The protocols, explored: nothing goes wrong in any order, and every mutant is caught."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.protocol import report
from tests.protocol.catalogue import HARMLESS, MUTANTS, RIGHT

PROJECT = Path(__file__).resolve().parents[2]
DOCUMENT = (PROJECT / "docs" / "protocol.md").read_text(encoding="utf-8")
MAX_TRACE_LINES = 50


@pytest.mark.parametrize("case", [*RIGHT, *HARMLESS], ids=lambda case: case.name)
def test_nothing_goes_wrong(case):
    assert case.outcome.violation is None, str(case.outcome)


@pytest.mark.parametrize("case", MUTANTS, ids=lambda case: case.name)
def test_the_mutant_is_caught(case):
    assert case.outcome.violation is not None
    assert case.outcome.violation.startswith(case.caught_as), str(case.outcome)
    assert len(case.outcome.trace) <= MAX_TRACE_LINES
    assert all(re.match(r"rank \d: ", line) for line in case.outcome.trace)


def test_names_are_unique():
    names = [case.name for case in (*RIGHT, *HARMLESS, *MUTANTS)]
    assert len(names) == len(set(names))


# explores all models again where several workers run
@pytest.mark.full
def test_the_document_has_what_was_found():
    """`python -m tests.protocol` prints what belongs there, `--write` puts it there."""
    assert report.updated(DOCUMENT) == DOCUMENT


@pytest.mark.parametrize(("function", "module"), sorted(set(re.findall(r"`(\w+)` \(`(\w+\.py)`\)", DOCUMENT))))
def test_the_document_names_functions_that_exist(function, module):
    found = [path.read_text(encoding="utf-8") for path in (PROJECT / "ep_a2a").rglob(module)]
    assert any(re.search(rf"^(def |class )?{function}\b", text, re.MULTILINE) for text in found)
