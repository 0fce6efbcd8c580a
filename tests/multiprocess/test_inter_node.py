"""Ops across virtual nodes of CPU processes over torch.distributed: gloo between nodes, shared memory inside.

The simulator compares their steps with the oracle: tests/simulator/test_rings.py.
"""

import time
from dataclasses import replace
from typing import Any

import pytest

from ep_a2a import errors
from ep_a2a.managers.registry import create_manager
from ep_a2a.testing import RankContext
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case, Step, make_inputs, make_op, run_step
from tests.cases.op_checks import ABSENT_TIMEOUT_SECS, raised
from tests.cases.op_matrix import UNEVEN
from tests.cases.op_steps import built_under_another_default_device
from tests.cases.ring_cases import of_two_ranks
from tests.cases.staged_cases import node_arena, over_torch_distributed, staged

CASE = Case(layout="rank_major", tokens=UNEVEN)
FULL = Case(layout="rank_major", tokens=((3,),), num_nodes=2)


def test_ops_are_built_under_another_default_device(ranks: Any) -> None:
    case = of_two_ranks(Case(num_nodes=2, layout="rank_major"))
    ranks(staged, 2, built_under_another_default_device, replace(case, options={}))


def through_the_manager(context: RankContext, transport: str) -> tuple[str, int, bool]:
    """A step of an op that the manager makes for virtual nodes, beside one of all ranks on one node."""
    with create_manager("ep_a2a", context.group) as manager:
        manager.device = context.device
        kwargs = kwargs_of(CASE, context.rank)
        across = manager.get_handle({**kwargs, "gpu_per_node": 2, "internode_transport": transport})
        inside = manager.get_handle(kwargs)
        for number, op in enumerate((across, inside, across)):
            run_step(replace(CASE, num_nodes=1 if op is inside else 2), op, number, context.device)
        same = manager.get_handle({**kwargs, "gpu_per_node": 2, "internode_transport": transport}) is across
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


def ask_for_virtual_nodes(context: RankContext) -> None:
    with create_manager("ep_a2a", context.group) as manager:
        manager.device = context.device
        with pytest.raises(errors.UnsupportedError, match=r"equally many.*gpu_per_node=3.*allgather_reducescatter"):
            manager.get_handle(kwargs_of(CASE, context.rank, gpu_per_node=3))
        with pytest.raises(errors.ConfigError):
            manager.get_handle(kwargs_of(CASE, context.rank, gpu_per_node=0))
        assert manager._arena is None
        assert len(manager.handle_cache) == 0
        # a node may be larger than the group
        for gpu_per_node in (4, 8):
            op = manager.get_handle(kwargs_of(CASE, context.rank, gpu_per_node=gpu_per_node))
            run_step(CASE, op, 0, context.device)


def test_uneven_nodes_are_refused_with_a_way_out(ranks: Any) -> None:
    ranks(ask_for_virtual_nodes, 4)


ABSENT = 3


def a_rank_that_does_not_come(context: RankContext, phase: str, num_nodes: int) -> float:
    """The last rank skips a call: all others name it; reset makes the op usable. Seconds until the error."""
    case = replace(FULL, num_nodes=num_nodes)
    secs = 0.0
    with node_arena(context, num_nodes) as arena:
        op = make_op(context, over_torch_distributed(case), arena)
        run_step(case, op, 0, context.device)
        op.set_timeout(ABSENT_TIMEOUT_SECS)
        step = Step.dispatch(case, op, 1, context.device) if phase == "combine" else None
        arena.rendezvous.barrier("before one is missing")
        if context.rank != ABSENT:
            start = time.monotonic()

            def call() -> None:
                if step is None:
                    mine = make_inputs(case, 1, context.rank)
                    op.dispatch(mine.tokens, mine.weights, None, mine.ids)
                else:
                    op.combine(step.before_combine()[0], None, step.ids)
                op.check()

            error = raised(errors.RankTimeoutError, call, f"rank {ABSENT}")
            secs = time.monotonic() - start
            assert (error.missing_ranks, error.late_ranks) == ((), (ABSENT,)), error
            # the record says so, too, until the reset
            raised(errors.RankTimeoutError, op.check, f"rank {ABSENT}")
        arena.rendezvous.barrier("all have given up")
        op.reset()
        for number in range(2, 4):
            run_step(case, op, number, context.device)
        op.check()
    return secs


@pytest.mark.parametrize("num_nodes", [2, 4])
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_rank_that_does_not_come_is_named_by_all_others(ranks: Any, phase: str, num_nodes: int) -> None:
    # ranks that share no node with it learn of it in combine through others, or wait twice as long
    bounds = 1 if phase == "dispatch" else 2
    for secs in ranks(a_rank_that_does_not_come, 4, phase, num_nodes):
        assert secs < (bounds + 1) * ABSENT_TIMEOUT_SECS
