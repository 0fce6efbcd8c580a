"""Calls of DeepEP and pplx-kernels in the managers, against the signatures that were read in their sources."""

from pathlib import Path

import pytest

from ep_a2a.managers.external import deepep
from tests.peer_contract.calls import PINNED, attributes_of
from tests.peer_contract.compare import problems

AT_COMMITS = ("deepep", "pplx")


@pytest.mark.parametrize("module", AT_COMMITS)
def test_every_call_fits_the_signature_that_was_read(module: str) -> None:
    assert list(problems(module)) == []


def test_every_pinned_signature_is_called() -> None:
    for module in AT_COMMITS:
        names = {each["name"] for each in PINNED[module]["function"]}
        assert names == {name for each in PINNED[module]["calls"].values() for name in each}


def test_members_of_handles_are_where_they_are_read() -> None:
    handles = PINNED["deepep"]["handles"]
    one_node, several_nodes = handles["one_node"], handles["several_nodes"]
    assert one_node[deepep.PREFIX_MATRIX] == "rank_prefix_matrix"
    assert one_node[deepep.SOURCE_TOKENS] == "recv_src_idx"
    assert several_nodes[deepep.GLOBAL_PREFIX] == "recv_gbl_rank_prefix_sum"
    assert handles["low_latency"][deepep.RANGES] == "packed_recv_layout_range"
    assert attributes_of("deepep") == {"self._handle": set(handles["elastic"])}


def test_names_that_a_release_lacks_are_told(tmp_path: Path) -> None:
    said = list(problems("flashinfer", tmp_path))
    file = "flashinfer/moe_ep/backends/split/comm/nvlink_one_sided/communication.py"
    assert f"NVLinkOneSidedAlltoAll.dispatch: is not in {file}" in said
    assert "flashinfer.moe_ep.BootstrapConfig: is not there" in said
    assert "MoEEpDispatchResult.topk_ids: is not in flashinfer/moe_ep/core/comm/communication.py" in said
    folder, dispatch = tmp_path / "another", "NVLinkOneSidedAlltoAll.dispatch"
    path = folder / file
    path.parent.mkdir(parents=True)
    path.write_text("class NVLinkOneSidedAlltoAll:\n    def dispatch(self, hidden_states, ids, topk_weights): ...\n")
    taken, wanted = ("hidden_states, ids, topk_weights", "hidden_states, topk_ids, topk_weights")
    assert [each for each in problems("flashinfer", folder) if each.startswith(dispatch)] == [
        f"{dispatch}: takes {taken} by position, not {wanted}",
        f"{dispatch}: got an unexpected keyword argument 'hidden_states_scale'",
    ]
