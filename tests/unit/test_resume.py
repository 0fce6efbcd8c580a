"""What has passed in an earlier run is left out, if a folder for that is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests import resume

if TYPE_CHECKING:
    import pytest

PROJECT = Path(__file__).resolve().parents[2]
TESTS = """
def test_right():
    pass

def test_wrong():
    assert {verdict}
"""


def run(folder: Path, verdict: bool) -> str:
    (folder / "test_it.py").write_text(TESTS.format(verdict=verdict))
    (folder / "conftest.py").write_text(
        "from tests.resume import leave_out_passed, note as pytest_runtest_logreport\n"
        "def pytest_collection_modifyitems(config, items):\n    leave_out_passed(config, items)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT).stdout


def test_the_next_run_has_what_did_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(resume.VARIABLE, str(tmp_path / "results"))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    assert "1 failed, 1 passed" in run(tmp_path, False)
    assert resume.passed(tmp_path / "results" / resume.FILE) == {"test_it.py::test_right"}
    assert "1 passed, 1 deselected" in run(tmp_path, True)
    assert "2 deselected" in run(tmp_path, True)


def test_a_pass_of_other_code_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / resume.FILE
    lines = [{"test": "a", "outcome": "passed", "code": resume.code()}, {"test": "b", "outcome": "passed", "code": "0"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"test": "c", "outcome": "passed"}]))
    assert resume.passed(path) == {"a"}


def test_the_code_is_that_of_the_package_and_the_tests(tmp_path: Path) -> None:
    for folder in resume.CODE_FOLDERS:
        (tmp_path / folder / "inner").mkdir(parents=True)
    hashes = [resume.code.__wrapped__(tmp_path)]
    for name in ("ep_a2a/inner/a.py", "tests/inner/a.py", "ep_a2a/b.py"):
        (tmp_path / name).write_text("x = 1")
        hashes.append(resume.code.__wrapped__(tmp_path))
    (tmp_path / "README.md").write_text("not code")
    assert len(set(hashes)) == len(hashes)
    assert resume.code.__wrapped__(tmp_path) == hashes[-1]
