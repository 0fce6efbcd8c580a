"""A pass in an earlier run counts for the same code alone."""

import json
from pathlib import Path

from tests import resume


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
