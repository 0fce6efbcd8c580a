"""Calls of MORI and FlashInfer in the managers, against the sources in their wheels, which are not imported."""

import inspect
from functools import cache
from pathlib import Path

import pytest

from ep_a2a.managers.external.flashinfer import LIBRARY as FLASHINFER
from ep_a2a.managers.external.mori import LIBRARY as MORI
from ep_a2a.ops.op import EpDispatchCombineOp
from tests.peer_contract import compare
from tests.peer_contract.calls import PINNED
from tests.signatures.reader import load, read_mori
from tests.wheels import DOWNLOAD_TIMEOUT_SECS, Unavailable

pytestmark = pytest.mark.timeout(DOWNLOAD_TIMEOUT_SECS)

RELEASES = [(library, version) for library in ("mori", "flashinfer") for version in PINNED[library]["versions"]]


@cache
def _found(library: str, version: str) -> Path | Unavailable:
    try:
        return compare.wheel_of(library, version).folder()
    except Unavailable as problem:
        return problem


def sources(library: str, version: str) -> Path:
    """The Python files of a release."""
    found = _found(library, version)
    if isinstance(found, Unavailable):
        pytest.skip(str(found))
    return found


@pytest.mark.parametrize(("library", "version"), RELEASES)
def test_every_call_fits(library: str, version: str) -> None:
    assert list(compare.problems(library, sources(library, version))) == []


@pytest.mark.parametrize(("library", "version"), RELEASES)
def test_what_a_library_must_have_to_count_as_usable_is_there(library: str, version: str) -> None:
    for need in {"mori": MORI, "flashinfer": FLASHINFER}[library].needs:
        module, _, name = need.partition(":")
        assert compare.has(sources(library, version), f"{library}.{module}", name), need


def test_moris_wheel_is_as_pinned() -> None:
    """Public names and enumerations, as tests/signatures/mori.json has them."""
    pinned = load("mori")
    assert PINNED["mori"]["versions"] == [pinned["version"]]
    assert read_mori(sources("mori", pinned["version"])) == {name: pinned[name] for name in ("modules", "enums")}


def test_moris_op_has_the_arguments_of_ours_in_its_order() -> None:
    file, *_ = PINNED["mori"]["functions"]["EpDispatchCombineOp"]
    for method in ("dispatch", "combine"):
        path = sources("mori", *PINNED["mori"]["versions"]) / file
        theirs = compare.function_of(path, f"EpDispatchCombineOp.{method}").positional
        ours = tuple(inspect.signature(getattr(EpDispatchCombineOp, method)).parameters)
        assert ours[1 : len(theirs) + 1] == theirs
