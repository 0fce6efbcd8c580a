"""The ATOM integration's switch in processes: launcher and entry point. On ATOM's shape (tests/engines/atom/shape)."""

import os
from importlib import metadata

import pytest

from tests.cases.atom_cases import SHAPE
from tests.integration.programs import ROOT, run_python, succeeded

PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SHAPE)])}
LAUNCHER = ("-m", "ep_a2a.integrations.atom.serve")
ENTRY_POINT = """
import importlib, sys
from ep_a2a.integrations.atom import register
register()
print("atom" in sys.modules, "torch" in sys.modules)
maker = importlib.import_module("atom.model_ops.moe").FusedMoEMethodBase._maybe_make_prepare_finalize
print(maker.__module__)
"""


def lines(*arguments: str, **variables: str) -> list[str]:
    return succeeded(run_python(*arguments, **PATH, **variables)).splitlines()


def test_the_launcher_switches_in_every_process_that_the_server_starts() -> None:
    printed = lines(*LAUNCHER, "tests.engines.atom.program", "--model", "m", EP_A2A_BACKEND="ep_a2a")
    ours = "ep_a2a.integrations.atom.patches True"
    assert printed == [f"child {ours}", f"parent {ours}", "arguments --model m"]


def test_without_the_variable_the_launcher_changes_nothing() -> None:
    theirs = "atom.model_ops.moe False"
    assert lines(*LAUNCHER, "tests.engines.atom.program") == [f"child {theirs}", f"parent {theirs}", "arguments"]


@pytest.mark.parametrize(
    ("arguments", "backend", "expected"),
    [
        (("tests.engines.atom.program",), "ep_a2aa", "Did you mean 'ep_a2a'?"),
        ((), "", "atom.entrypoints.openai_server"),
    ],
)
def test_misuse_of_the_launcher_is_named(arguments: tuple[str, ...], backend: str, expected: str) -> None:
    done = run_python(*LAUNCHER, *arguments, **PATH, EP_A2A_BACKEND=backend)
    assert done.returncode != 0
    assert expected in done.stderr


@pytest.mark.parametrize(
    ("backend", "imported", "maker"),
    [
        # torch says whether the GPUs are AMD's, which this backend refuses
        ("ep_a2a", "False True", "ep_a2a.integrations.atom.patches"),
        ("naive", "False False", "ep_a2a.integrations.atom.patches"),
        ("", "False False", "atom.model_ops.moe"),
    ],
)
def test_the_entry_point_imports_no_more_than_it_asks(backend: str, imported: str, maker: str) -> None:
    assert lines("-c", ENTRY_POINT, EP_A2A_BACKEND=backend) == [imported, maker]


def test_without_atom_the_entry_point_does_nothing() -> None:
    program = "import sys; from ep_a2a.integrations.atom import register; register(); print(len(sys.meta_path))"
    with_variable = succeeded(run_python("-c", program, EP_A2A_BACKEND="ep_a2a"))
    assert with_variable == succeeded(run_python("-c", program))


def test_the_entry_point_is_declared() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    assert 'ep_a2a_atom = "ep_a2a.integrations.atom:register"' in declared
    assert metadata.EntryPoint("", "ep_a2a.integrations.atom:register", "").load() is not None
