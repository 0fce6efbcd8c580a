"""Import paths of version 0.1 still lead to the same modules, and say where these are now."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest

from ep_a2a.moved import MOVED, new_path
from ep_a2a.ops.front import ValidatedOp


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_new_module(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {MOVED[old]}"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(MOVED[old])


def test_a_module_below_an_old_package_is_loaded_once() -> None:
    old = "ep_a2a.compat.ep_low_latency.layer"
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match="has moved"):
        found = importlib.import_module(old)
    assert found is importlib.import_module("ep_a2a.compat.triton_distributed.layer")


def test_other_names_are_left_alone() -> None:
    assert new_path("ep_a2a.config") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ep_a2a.profiling_of_nothing")


def test_a_program_runs_by_its_old_path() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "ep_a2a.bench.layer", "--help"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_the_former_name_of_warmup_split_warns_and_works() -> None:
    calls: list[str] = []
    op = types.SimpleNamespace(warmup_split=lambda: calls.append("warmup_split"))
    with pytest.warns(DeprecationWarning, match="warmup_split"):
        ValidatedOp.compile_halves(op)  # type: ignore[arg-type]
    assert calls == ["warmup_split"]
