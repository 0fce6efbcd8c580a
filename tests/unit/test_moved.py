"""Import paths of version 0.1 still lead to the same modules, and say where these are now."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

import ep_a2a
from ep_a2a.moved import MOVED, new_path
from ep_a2a.ops.front import ValidatedOp

ENGINES = "ep_a2a.integrations."  # some modules there import the engine, which may be absent


@pytest.mark.parametrize("old", [old for old in MOVED if not old.startswith(ENGINES)])
def test_an_old_path_is_the_new_module(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {MOVED[old]}"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(MOVED[old])


def test_an_old_path_of_an_integration_is_found() -> None:
    olds = [old for old in MOVED if old.startswith(ENGINES)]
    assert olds
    for old in olds:
        found, expected = importlib.util.find_spec(old), importlib.util.find_spec(MOVED[old])
        assert found is not None, old
        assert expected is not None, old
        assert found.origin == expected.origin


def test_a_module_below_an_old_package_is_loaded_once() -> None:
    old = "ep_a2a.compat.ep_low_latency.layer"
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match="has moved"):
        found = importlib.import_module(old)
    assert found is importlib.import_module("ep_a2a.compat.triton_distributed.layer")


@pytest.mark.parametrize("name", ["Table", "load_tables", "lookup", "write_table"])
def test_a_name_of_the_former_module_tuning_warns_and_works(name: str) -> None:
    import ep_a2a.tuning
    from ep_a2a.tuning import tables

    with pytest.warns(DeprecationWarning, match=f"ep_a2a.tuning.{name} has moved to ep_a2a.tuning.tables"):
        assert getattr(ep_a2a.tuning, name) is getattr(tables, name)


def test_every_forwarded_name_of_tuning_exists() -> None:
    import ep_a2a.tuning
    from ep_a2a.tuning import tables

    assert ep_a2a.tuning.MOVED_TO_TABLES
    assert [name for name in ep_a2a.tuning.MOVED_TO_TABLES.split() if not hasattr(tables, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(ep_a2a.tuning, "nothing")  # noqa: B009


def test_an_old_path_hides_no_module_of_today() -> None:
    root = Path(ep_a2a.__file__).parents[1]
    modules = {".".join(path.relative_to(root).with_suffix("").parts) for path in root.glob("ep_a2a/**/*.py")}
    packages = {module.removesuffix(".__init__") for module in modules if module.endswith(".__init__")}
    assert sorted((modules | packages) & MOVED.keys()) == []


def test_other_names_are_left_alone() -> None:
    assert new_path("ep_a2a.config") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ep_a2a.profiling_of_nothing")


def test_a_program_runs_by_its_old_path() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "ep_a2a.bench.layer", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_the_former_name_of_warmup_split_warns_and_works() -> None:
    calls: list[str] = []
    op = types.SimpleNamespace(warmup_split=lambda: calls.append("warmup_split"))
    with pytest.warns(DeprecationWarning, match="warmup_split"):
        ValidatedOp.compile_halves(op)  # type: ignore[arg-type]
    assert calls == ["warmup_split"]
