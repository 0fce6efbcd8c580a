"""Whose module `import mori` gives."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from types import ModuleType

import pytest

import ep_a2a.compat.mori as compat
from ep_a2a.errors import StateError
from tests.integration.programs import run_python, succeeded


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    yield
    compat.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "mori"]


@pytest.fixture
def another():
    """A process in which some other mori has been imported."""
    modules = {"mori": ModuleType("mori"), "mori.ops": ModuleType("mori.ops"), "mori.io": ModuleType("mori.io")}
    sys.modules.update(modules)
    yield modules
    compat.uninstall()
    for name in modules:
        del sys.modules[name]


def test_import_mori_is_the_compat_package():
    compat.install()
    compat.install()
    mori = importlib.import_module("mori")
    assert mori is compat
    assert importlib.import_module("mori.ops") is mori.ops
    assert importlib.import_module("mori.shmem").shmem_npes is mori.shmem.shmem_npes
    assert importlib.util.find_spec("mori") is not None  # how AITER, ATOM and vLLM ask
    for module in pkgutil.walk_packages(compat.__path__, "mori."):
        ours = module.name.replace("mori", "ep_a2a.compat.mori", 1)
        assert importlib.import_module(module.name) is importlib.import_module(ours)


@pytest.mark.parametrize("name", ["mori.io", "mori.ccl", "mori.cco", "mori.ir", "mori.ops.dispatch_combine_v2"])
def test_what_there_is_not_cannot_be_imported(name):
    compat.install()
    with pytest.raises(ImportError):
        importlib.import_module(name)


def test_what_there_is_not_is_no_attribute():
    with pytest.raises(AttributeError, match=r"'io'.*docs/mori\.md"):
        _ = compat.io
    assert {"ops", "shmem", "install"} <= set(dir(compat))


def test_another_mori_is_not_replaced_by_accident(another):
    with pytest.raises(StateError, match="replace=True"):
        compat.install()
    assert sys.modules["mori"] is another["mori"]


def test_another_mori_is_replaced_on_request_and_given_back(another):
    compat.install(replace=True)
    assert importlib.import_module("mori") is compat
    assert "mori.io" not in sys.modules
    compat.uninstall()
    assert {name: sys.modules[name] for name in another} == another
    compat.uninstall()
    assert sys.modules["mori"] is another["mori"]


def test_the_name_alone_is_light():
    printed = succeeded(
        run_python(
            "-c",
            "import sys, ep_a2a.compat.mori as mori\n"
            "print('torch' in sys.modules)\n"
            "mori.install()\n"
            "import mori\n"
            "print('triton' in sys.modules)\n",
        )
    )
    assert printed.split() == ["False", "False"]
