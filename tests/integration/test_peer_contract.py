"""Calls of MORI and FlashInfer in the managers, against the sources in their wheels, which are not imported."""

import ast
from functools import cache
from pathlib import Path

import pytest

from ep_a2a.managers.external.flashinfer import ONE_SIDED, TWO_SIDED
from ep_a2a.managers.external.mori import LIBRARY as MORI
from ep_a2a.ops.op import EpDispatchCombineOp
from tests.peer_contract.calls import PINNED, attributes_of, calls_of
from tests.peer_contract.python_source import signature_of
from tests.signatures.reader import MISSING, describe, load, read_mori
from tests.wheels import DOWNLOAD_TIMEOUT_SECS, Release, Unavailable

pytestmark = pytest.mark.timeout(DOWNLOAD_TIMEOUT_SECS)

RELEASES = {
    "mori": Release("amd-mori", "1.2.4", ("mori/",), (".py", ".hpp")),
    "flashinfer": Release("flashinfer-python", "0.7.2.post1", ("flashinfer/comm/",)),
}
MORI_OPS = "mori/ops/dispatch_combine.py"
ONE, TWO = "flashinfer/comm/trtllm_moe_alltoall.py", "flashinfer/comm/trtllm_alltoall.py"

CALLS: dict[str, dict[str, list[str]]] = {module: PINNED["calls"][module] for module in RELEASES}


@cache
def _found(name: str) -> Path | Unavailable:
    try:
        return RELEASES[name].folder()
    except Unavailable as problem:
        return problem


def sources(name: str) -> Path:
    """The Python files of a release."""
    found = _found(name)
    if isinstance(found, Unavailable):
        pytest.skip(str(found))
    return found


def test_moris_wheel_is_as_pinned() -> None:
    """Public names and enumerations, as tests/signatures/mori.json has them."""
    pinned = load("mori")
    folder = sources("mori")
    assert RELEASES["mori"].version == pinned["version"]
    assert read_mori(folder) == {name: pinned[name] for name in ("modules", "enums")}


@pytest.mark.parametrize("module", CALLS)
def test_every_call_fits(module: str) -> None:
    folder = sources(module)
    calls = calls_of(module)
    assert set(calls) == set(CALLS[module])
    for spelled, made in calls.items():
        file, name, *positional = CALLS[module][spelled]
        if not file:
            continue
        signature = signature_of(folder / file, name)
        for call in made:
            assert signature.positional[: call.num_positional] == tuple(positional), spelled
            assert signature.problem(call.num_positional, call.keywords) == "", spelled
            if signature.num_returned is not None:
                assert call.num_taken in (None, signature.num_returned), spelled


def test_moris_op_has_the_arguments_of_ours_in_its_order() -> None:
    for method in ("dispatch", "combine"):
        theirs = signature_of(sources("mori") / MORI_OPS, f"EpDispatchCombineOp.{method}").positional
        ours = getattr(EpDispatchCombineOp, method)
        assert ours.__code__.co_varnames[1 : len(theirs) + 1] == theirs


def test_what_is_read_of_flashinfers_objects_is_there() -> None:
    folder = sources("flashinfer")
    read = {"workspace", "metainfo", "ep_rank", "_WORKSPACE", "_WORKSPACE_CACHE"}
    info = {"recv_rank_count_cumsum"}
    assert attributes_of("flashinfer") == {"native": read, "self._handle": info}
    for file, symbols in (
        (ONE, [f"MoeAlltoAll.{name}" for name in read]),
        (TWO, ["MoEAlltoallInfo.recv_rank_count_cumsum"]),
    ):
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        assert MISSING not in [describe(tree, symbol) for symbol in symbols]


@pytest.mark.parametrize("library", [MORI, ONE_SIDED, TWO_SIDED], ids=lambda each: f"{each.module}-{each.needs[-1]}")
def test_what_a_library_must_have_to_count_as_usable_is_there(library) -> None:
    folder = sources(library.module)
    for need in library.needs:
        module, _, name = need.partition(":")
        base = folder / library.module / module.replace(".", "/")
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        text = file.read_text()
        # mori.shmem takes all names of its module api
        assert name in text or ("from .api import *" in text and name in (base / "api.py").read_text())
