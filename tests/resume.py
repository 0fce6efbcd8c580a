"""Leaves out tests that have passed in an earlier run: EP_A2A_TEST_RESULTS names the folder where that is noted.

A pass counts as long as all files of ep_a2a/ and tests/ are as they were then.
"""

import functools
import hashlib
import json
import os
from pathlib import Path

import pytest

VARIABLE = "EP_A2A_TEST_RESULTS"
FILE = "tests.jsonl"
PROJECT = Path(__file__).resolve().parents[1]
CODE_FOLDERS = ("ep_a2a", "tests")


def results_file() -> Path | None:
    """The file of a line per test that was run; None where nothing is to be noted."""
    folder = os.environ.get(VARIABLE)
    return Path(folder) / FILE if folder else None


@functools.cache
def code(project: Path = PROJECT) -> str:
    """A short hash of all that can change a test's outcome; a checkout's commit is not there on every machine."""
    found = hashlib.sha256()
    for folder in CODE_FOLDERS:
        for path in sorted((project / folder).rglob("*.py")):
            found.update(path.relative_to(project).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def passed(path: Path) -> set[str]:
    """The tests whose last run on this code has passed."""
    outcomes: dict[str, str] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record.get("code") == code():
                outcomes[record["test"]] = record["outcome"]
    return {test for test, outcome in outcomes.items() if outcome == "passed"}


def leave_out_passed(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what has passed."""
    path = results_file()
    done = passed(path) if path else set()
    left_out = [item for item in items if item.nodeid in done]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in done]


def note(report: pytest.TestReport) -> None:
    """Appends a test's outcome, with its seconds and, unless it has passed, why."""
    path = results_file()
    # pytest-xdist's controller repeats what its workers have noted, with the worker as `node`
    if path is None or hasattr(report, "node") or (report.when != "call" and report.outcome == "passed"):
        return
    record = {"test": report.nodeid, "outcome": report.outcome, "secs": round(report.duration, 2), "code": code()}
    if report.outcome != "passed":
        record["reason"] = report.longreprtext[-2000:]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
