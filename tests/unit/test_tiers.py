"""Rules of tests that a parser can check: `make test` runs tests that exist, and tests wait for signs, not for time."""

import ast
import re
from pathlib import Path

import pytest

from tests.tiers import QUICK, is_quick

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("entry", QUICK)
def test_what_is_named_exists(entry):
    path, _, function = entry.partition("::")
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not function or function in names


def test_folders_files_and_functions():
    assert is_quick("unit/test_anything.py", "test_new")
    assert is_quick("multiprocess/test_covering.py", "test_new")
    assert is_quick("multiprocess/test_backend_parity.py", "test_parity")
    assert not is_quick("multiprocess/test_backend_parity.py", "test_new")
    assert not is_quick("integration/test_docs.py", "test_new")


# --- pauses ---

PAUSES = {
    # the pause of all waits for a sign
    "waiting.py": 1,
    # passes on the pauses of the package or of its kernels, which it counts
    "late.py": 1,
    # simulated clocks
    "cases/op_special.py": 1,
    "simulator/test_masks.py": 1,
    "unit/test_agreement.py": 4,
    # a shell wakes a rank that has stopped itself
    "programs/losses.py": 1,
    # an example of a shell's pause, below
    "unit/test_tiers.py": 1,
}
"""Calls and words of shells that pause, by file."""
NO_PAUSES = ("scheduler.sleep", "llm.sleep")
"""Ends of names: of the simulator, and of a mode of vLLM."""
SHELL = re.compile(r"\bsleep ([\d.]|\s*$)")


def num_pauses(text: str) -> int:
    nodes = list(ast.walk(ast.parse(text)))
    called = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    words = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    pausing = [name for name in called if name.endswith("sleep") and not name.endswith(NO_PAUSES)]
    return len(pausing) + sum(len(SHELL.findall(each)) for each in words)


def test_no_test_pauses_but_where_it_is_agreed():
    files = {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    found = {path: num_pauses(text) for path, text in files.items()}
    assert {path: number for path, number in found.items() if number} == PAUSES


def test_pauses_that_are_found():
    assert num_pauses("time.sleep(1); sleep(2); torch.cuda._sleep(9)") == 3
    assert num_pauses("run(f'sleep {secs}; kill'); run('sleep 0.1')") == 2
    assert num_pauses("self.llm.sleep(level=1); sleeps = 3; clock.sleep = None") == 0
