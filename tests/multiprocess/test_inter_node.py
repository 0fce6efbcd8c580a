"""Ops across virtual nodes of CPU processes over torch.distributed: gloo between nodes, shared memory inside.

The simulator compares their steps with the oracle: tests/simulator/test_rings.py.
"""

from dataclasses import replace
from typing import Any

import pytest

from ep_a2a.testing import RankContext
from tests.cases.manager_cases import create, kwargs_of
from tests.cases.op_cases import BY_HOSTS, Case, run_step
from tests.cases.op_matrix import UNEVEN
from tests.cases.op_steps import built_under_another_default_device
from tests.cases.ring_cases import of_two_ranks

CASE = Case(layout="rank_major", tokens=UNEVEN)


def test_ops_are_built_under_another_default_device(ranks: Any) -> None:
    case = of_two_ranks(Case(num_nodes=2, layout="rank_major"))
    ranks(built_under_another_default_device, 2, replace(case, options=BY_HOSTS))


def through_the_manager(context: RankContext, transport: str) -> tuple[str, int, bool]:
    """A step of an op that the manager makes for virtual nodes, beside one of all ranks on one node."""
    with create("ep_a2a", context) as manager:
        kwargs = kwargs_of(CASE, context.rank)
        across = manager.get_handle({**kwargs, "gpu_per_node": 2, "internode_transport": transport})
        inside = manager.get_handle(kwargs)
        for number, op in enumerate((across, inside, across)):
            run_step(replace(CASE, num_nodes=1 if op is inside else 2), op, number, context.device)
        same = manager.get_handle({**kwargs, "gpu_per_node": 2, "internode_transport": transport}) is across
        # a node may be larger than the group
        run_step(CASE, manager.get_handle({**kwargs, "gpu_per_node": 8}), 3, context.device)
        assert across.config.internode_transport == ("peer_memory" if transport == "auto" else transport)
        explained = manager.explain(2, kwargs["max_num_tokens_per_dp_rank"])["kernel"]
        assert explained == across.config.kernel_type.name
        return explained, manager.num_buffer_bytes, same


@pytest.mark.parametrize("transport", ["auto", "torch.distributed"])
def test_the_manager_picks_it_for_several_nodes(ranks: Any, transport: str) -> None:
    for kernel, num_buffer_bytes, same in ranks(through_the_manager, 4, transport):
        assert kernel == "InterNodeV1LL"
        assert num_buffer_bytes > 0
        assert same
