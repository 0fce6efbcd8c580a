"""The table of mutants: every edit fits the source as it is, and every named test exists."""

import ast
import subprocess
import sys

import pytest

from tools import mutants

TABLE = mutants.read_table()
NAMES = [each.name for each in TABLE]


@pytest.mark.parametrize("mutant", TABLE, ids=NAMES)
def test_an_edit_fits(mutant):
    source = (mutants.PROJECT / mutant.file).read_text()
    edited = mutant.edit(source)
    assert edited != source
    if mutant.file.endswith(".py"):
        ast.parse(edited)


def test_names_are_unique():
    assert len(set(NAMES)) == len(NAMES)


def test_every_named_test_exists():
    for path, _, name in (each.test.partition("::") for each in TABLE):
        function = name.partition("[")[0]
        assert f"\ndef {function}(" in (mutants.PROJECT / path).read_text(), f"{path} has no {function}"


@pytest.mark.full
def test_every_named_case_exists():
    tests = sorted({each.test for each in TABLE if "[" in each.test})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=mutants.PROJECT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_edit_that_does_not_fit_is_named():
    mutant = mutants.Mutant("a fault", "file.py", "x = 1", "x = 2", "tests/test_file.py::test_x")
    assert mutant.edit("x = 1\n") == "x = 2\n"
    for source in ("", "x = 1\nx = 1\n"):
        with pytest.raises(mutants.EditError, match=r"a fault: .* in file\.py"):
            mutant.edit(source)


FILE = "def one():\n    return 1\n"
TEST = "from package import one\n\n\ndef test_one():\n    assert one() == 1\n\n\ndef test_nothing():\n    pass\n"


@pytest.mark.parametrize(
    ("new", "test", "verdict"),
    [
        ("return 2", "test_package.py::test_one", mutants.KILLED),
        ("return 2", "test_package.py::test_nothing", mutants.SURVIVED),
        ("return (", "test_package.py::test_one", mutants.NO_VERDICT),
        ("return 2", "test_package.py::test_gone", mutants.NO_VERDICT),
    ],
)
def test_a_mutant_is_killed_by_its_test_alone(tmp_path, new, test, verdict):
    (tmp_path / "package.py").write_text(FILE)
    (tmp_path / "test_package.py").write_text(TEST)
    mutant = mutants.Mutant("a fault", "package.py", "return 1", new, test)
    assert mutants.try_mutant(tmp_path, mutant).verdict == verdict
    assert (tmp_path / "package.py").read_text() == FILE
