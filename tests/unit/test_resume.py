"""A pass in an earlier run counts for the same code alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import resume


def test_only_a_whole_pass_of_the_same_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(resume.VARIABLE, str(tmp_path / "new"))
    for name, *outcomes in (("a", "passed", "passed"), ("b", "passed", "failed"), ("c", "skipped", "passed")):
        for when, outcome in zip(("call", "teardown"), outcomes):
            report: Any = SimpleNamespace(nodeid=name, when=when, outcome=outcome)
            resume.note(report)
    assert resume.passed() == {"a"}
    monkeypatch.setattr(resume, "code", lambda: "another")
    assert resume.passed() == set()


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
