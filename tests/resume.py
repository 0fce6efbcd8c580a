"""Leaves out tests that have passed in an earlier run: EP_A2A_TEST_RESULTS names the folder where that is noted.

A pass counts as long as all files of ep_a2a/ and tests/ are as they were then: the notes' file is named after them.
"""

import functools
import hashlib
import os
from pathlib import Path

import pytest

VARIABLE = "EP_A2A_TEST_RESULTS"
PROJECT = Path(__file__).resolve().parents[1]
CODE_FOLDERS = ("ep_a2a", "tests")
not_passed: set[str] = set()
"""Tests of this run of which a part has not passed."""


@functools.cache
def code(project: Path = PROJECT) -> str:
    """A short hash of all that can change a test's outcome; a checkout's commit is not there on every machine."""
    found = hashlib.sha256()
    for folder in CODE_FOLDERS:
        for path in sorted((project / folder).rglob("*.py")):
            found.update(path.relative_to(project).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def results_file() -> Path | None:
    """The file of a line per test that has passed; None where nothing is to be noted."""
    folder = os.environ.get(VARIABLE)
    return Path(folder, code()).with_suffix(".passed") if folder else None


def passed() -> set[str]:
    """The tests that have passed with this code."""
    path = results_file()
    return set(path.read_text().splitlines()) if path and path.exists() else set()


def leave_out_passed(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what has passed."""
    done = passed()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


def note(report: pytest.TestReport) -> None:
    """Appends a test that has passed, its setup and teardown, too."""
    path = results_file()
    # pytest-xdist's controller repeats what its workers have noted, with the worker as `node`
    if path is None or hasattr(report, "node"):
        return
    if report.outcome != "passed":
        not_passed.add(report.nodeid)
    elif report.when == "teardown" and report.nodeid not in not_passed:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")
