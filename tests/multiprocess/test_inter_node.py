"""Ops across virtual nodes of CPU processes over torch.distributed: gloo between nodes, shared memory inside.

The bodies are those of the op inside a node; only the kernels differ.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ep_a2a import errors
from ep_a2a.managers.registry import create_manager
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case, Step, make_inputs, make_op, run_case, run_step
from tests.cases.op_checks import ABSENT_TIMEOUT_SECS, raised
from tests.cases.op_matrix import CASES, UNEVEN
from tests.cases.op_special import BODIES
from tests.cases.op_steps import built_under_another_default_device, cast_before
from tests.cases.ring_cases import CAST_BEFORE, GRIDS, OF_FOUR_RANKS, REPLAYED, SPECIAL, of_two_ranks, on_two_nodes
from tests.cases.staged_cases import node_arena, over_torch_distributed, staged

if TYPE_CHECKING:
    from ep_a2a.testing import RankContext

CASE = Case(layout="rank_major", tokens=UNEVEN)
FULL = Case(layout="rank_major", tokens=((3,),), num_nodes=2)
SHAPES = GRIDS | {
    "halves": Case(num_nodes=2, tokens=UNEVEN, topk=3, num_experts=9, split="mixed", num_steps=4),
    # chunks of two tokens, of which a step of fewer tokens has fewer
    "many-tokens": Case(
        world_size=2,
        num_nodes=2,
        num_experts=5,
        max_tokens=400,
        tokens=((270, 3),),
        max_num_tokens=(None, 271),
        hidden_dim=8,
        num_steps=2,
        routing="some_dropped",
        layout="rank_major",
    ),
}


@pytest.mark.parametrize("name", OF_FOUR_RANKS)
def test_two_nodes_of_two(ranks: Any, name: str) -> None:
    ranks(staged, 4, run_case, on_two_nodes(CASES[name]))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(ranks: Any, name: str) -> None:
    ranks(staged, SHAPES[name].world_size, run_case, SHAPES[name])


def test_ops_are_built_under_another_default_device(ranks: Any) -> None:
    case = of_two_ranks(Case(num_nodes=2, layout="rank_major"))
    ranks(staged, 2, built_under_another_default_device, replace(case, options={}))


def test_scales_of_tokens_that_come_cast(ranks: Any) -> None:
    ranks(staged, CAST_BEFORE.world_size, cast_before, replace(CAST_BEFORE, options={}))


@pytest.mark.parametrize("name", SPECIAL)
def test_special(ranks: Any, name: str) -> None:
    body, case = BODIES[name]
    few = of_two_ranks(case)
    ranks(staged, few.world_size, body, few)


def test_replayed_steps(ranks: Any) -> None:
    ranks(staged, REPLAYED.world_size, BODIES["graph-rank-major"][0], REPLAYED)


def through_the_manager(context: RankContext, transport: str) -> tuple[str, int, bool]:
    """A step of an op that the manager makes for virtual nodes, beside one of all ranks on one node."""
    with create_manager("ep_a2a", context.group) as manager:
        manager.device = context.device
        kwargs = kwargs_of(CASE, context.rank)
        across = manager.get_handle({**kwargs, "gpu_per_node": 2, "internode_transport": transport})
        inside = manager.get_handle(kwargs)
        for op in (across, inside, across):
            mine = make_inputs(CASE, 0, context.rank)
            tokens, weights, _, ids, _ = op.dispatch(mine.tokens, mine.weights, None, mine.ids)
            owned = (ids >= op.config.first_expert) & (ids < op.config.first_expert + op.config.num_local_experts)
            rows = tokens.float() * (weights * owned).sum(-1, keepdim=True)
            result, _ = op.combine(rows.to(torch.bfloat16), None, mine.ids)
            expected = mine.tokens.float() * (mine.weights * (mine.ids >= 0)).sum(-1, keepdim=True)
            torch.testing.assert_close(result[: len(mine.tokens)].float(), expected, rtol=3e-2, atol=3e-2)
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


def wrong_calls(context: RankContext) -> None:
    """Each is an error on all ranks before anything is sent, and the next step works."""
    with node_arena(context, 2) as arena:
        op = make_op(context, over_torch_distributed(FULL), arena)
        mine = make_inputs(FULL, 0, context.rank)
        rows = torch.zeros(4, FULL.max_tokens, FULL.hidden_dim, dtype=torch.bfloat16)
        raised(errors.AlternationError, lambda: op.combine(rows, None, None), "dispatch")
        raised(errors.HiddenSizeError, lambda: op.dispatch(mine.tokens[:, :8].clone(), mine.weights, None, mine.ids))
        raised(errors.DtypeError, lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids.long()))
        raised(
            errors.TooManyTokensError,
            lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids, max_num_tokens=FULL.max_tokens + 1),
        )
        op.dispatch(mine.tokens, mine.weights, None, mine.ids)
        raised(errors.AlternationError, lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids), "combine")
        raised(errors.ShapeError, lambda: op.combine(rows[:1], None, None))
        raised(errors.ForeignIndicesError, lambda: op.combine(rows, None, mine.ids[:1]))
        op.combine(rows, None, mine.ids)
        run_step(FULL, op, 1, context.device)
        op.close()
        raised(errors.ClosedError, lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids))


def test_wrong_calls(ranks: Any) -> None:
    ranks(wrong_calls, 4)


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
            assert isinstance(error, errors.RankTimeoutError)
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


def begun_by_some(context: RankContext) -> None:
    """A dispatch that only one rank has begun is lost with a reset."""
    case = replace(FULL, world_size=2)
    with node_arena(context, 2) as arena:
        op = make_op(context, over_torch_distributed(case), arena)
        run_step(case, op, 0, context.device)
        if context.rank == 0:
            mine = make_inputs(case, 1, context.rank)
            op.dispatch_send(mine.tokens, mine.weights, None, mine.ids)
        op.reset()
        run_step(case, op, 2, context.device)


def test_reset_of_a_step_that_some_have_begun(ranks: Any) -> None:
    ranks(begun_by_some, 2)
