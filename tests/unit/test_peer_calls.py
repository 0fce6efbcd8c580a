"""Calls of DeepEP and pplx-kernels in the managers, against the signatures that were read in their sources."""

import itertools
from typing import Any

import pytest

from ep_a2a.managers.external import deepep
from tests.peer_contract.calls import PINNED, attributes_of, calls_of
from tests.peer_contract.python_source import Signature, parsed

CALLS: dict[str, dict[str, list[str]]] = {module: PINNED["calls"][module] for module in ("deepep", "pplx")}


def pinned(name: str) -> Signature:
    entries: list[dict[str, Any]] = [*PINNED["deep_ep"]["function"], *PINNED["pplx_kernels"]["function"]]
    entry = next(each for each in entries if each["name"] == name)
    return Signature(parsed(", ".join(each.replace("=", "=0") for each in entry["parameters"])), entry.get("returned"))


@pytest.mark.parametrize("module", CALLS)
def test_every_call_fits_the_signature_that_was_read(module: str) -> None:
    calls = calls_of(module)
    assert set(calls) == set(CALLS[module])
    for spelled, made in calls.items():
        for call, name in itertools.product(made, CALLS[module][spelled]):
            signature = pinned(name)
            assert signature.problem(call.num_positional, call.keywords) == "", (spelled, call)
            assert call.num_taken in (None, signature.num_returned), (spelled, call)


def test_every_pinned_signature_is_called() -> None:
    names = {each["name"] for part in ("deep_ep", "pplx_kernels") for each in PINNED[part]["function"]}
    assert names == {name for calls in CALLS.values() for each in calls.values() for name in each}


def test_members_of_handles_are_where_they_are_read() -> None:
    handles = PINNED["deep_ep"]["handles"]
    one_node, several_nodes = handles["one_node"], handles["several_nodes"]
    assert one_node[deepep.PREFIX_MATRIX] == "rank_prefix_matrix"
    assert one_node[deepep.SOURCE_TOKENS] == "recv_src_idx"
    assert several_nodes[deepep.GLOBAL_PREFIX] == "recv_gbl_rank_prefix_sum"
    assert handles["low_latency"][deepep.RANGES] == "packed_recv_layout_range"
    assert attributes_of("deepep") == {"self._handle": set(handles["elastic"])}


def test_a_call_that_does_not_fit_is_found() -> None:
    signature = Signature(parsed("a, b=0, *, c=0"))
    assert signature.problem(1, ("c",)) == ""
    assert all(signature.problem(*call) for call in ((0, ("b",)), (1, ("a",)), (3, ()), (1, ("d",))))
