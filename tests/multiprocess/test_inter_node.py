"""Ops across virtual nodes on CPU processes: gloo between nodes, shared memory inside, against the oracle."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ep_a2a import errors
from ep_a2a.managers.registry import create_manager
from ep_a2a.ops.op import EpDispatchCombineOp
from tests.cases.inter_node_cases import Nodes, run_inter_node, run_inter_node_step
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case, make_inputs
from tests.cases.op_checks import BRIEF_TIMEOUT_SECS, SHORT_TIMEOUT_SECS, raised
from tests.cases.op_matrix import CASES, UNEVEN

if TYPE_CHECKING:
    from ep_a2a.testing import RankContext

CASE = Case(layout="rank_major", tokens=UNEVEN)
FULL = replace(CASE, tokens=((3,),))
OF_FOUR_RANKS = (
    "rank_major-uniform", "rank_major-zipf", "rank_major-all_to_one", "rank_major-all_dropped", "rank_major-repeated",
    "rank_major-some_dropped", "compact-uniform", "compact-out_of_range", "no-weights", "combine-without-weights",
    "max-num-tokens-rank-major",
    "pad-id-compact", "nobody-has-tokens", "fp32", "fp8-byte-scales", "fp16-combine", "fp8_per_token-ue8m0",
    "cast-fp16-odd-hidden", "fp8_blockwise-four-ranks", "unusual-four-ranks",
)  # fmt: skip
"""Cases of the op tests that a hop between nodes may change; that the op inside a node is right, those show."""


GRIDS = {
    f"{num_nodes}x{per_node}-{layout}": (
        Case(
            world_size=num_nodes * per_node, num_experts=2 * num_nodes * per_node + 1, topk=3, hidden_dim=40,
            tokens=UNEVEN, num_steps=2, layout=layout, routing="out_of_range",
        ),
        num_nodes,
    )
    for num_nodes, per_node in ((2, 3), (3, 2), (4, 1), (2, 4), (1, 3))
    for layout in ("compact", "rank_major")
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name) for name in OF_FOUR_RANKS])
def test_two_nodes_of_two(ranks: Any, case: Case) -> None:
    ranks(run_inter_node, 4, case, 2)


@pytest.mark.parametrize(("case", "num_nodes"), [pytest.param(*pair, id=name) for name, pair in GRIDS.items()])
def test_grids(ranks: Any, case: Case, num_nodes: int) -> None:
    ranks(run_inter_node, case.world_size, case, num_nodes)


def test_uneven_experts_whose_nodes_own_different_numbers(ranks: Any) -> None:
    """13 experts on 2 x 2 ranks: 4, 3, 3, 3."""
    case = Case(num_experts=13, topk=5, tokens=UNEVEN, num_steps=3, layout="rank_major", seed=9)
    ranks(run_inter_node, 4, case, 2)


def test_more_tokens_than_a_program_looks_at_at_once(ranks: Any) -> None:
    case = Case(
        world_size=2, num_experts=5, max_tokens=280, tokens=((270, 3),), hidden_dim=8, num_steps=1,
        routing="some_dropped", layout="rank_major",
    )  # fmt: skip
    ranks(run_inter_node, 2, case, 2)


def through_the_manager(context: RankContext, rail: str) -> tuple[str, int, bool]:
    """A step of an op that the manager makes for virtual nodes, beside one of all ranks on one node."""
    with create_manager("ep_a2a", context.group) as manager:
        manager.device = context.device
        kwargs = kwargs_of(CASE, context.rank)
        across = manager.get_handle({**kwargs, "gpu_per_node": 2, "rail": rail})
        inside = manager.get_handle(kwargs)
        for op in (across, inside, across):
            mine = make_inputs(CASE, 0, context.rank)
            tokens, weights, _, ids, _ = op.dispatch(mine.tokens, mine.weights, None, mine.ids)
            owned = (ids >= op.config.first_expert) & (ids < op.config.first_expert + op.config.num_local_experts)
            rows = tokens.float() * (weights * owned).sum(-1, keepdim=True)
            result, _ = op.combine(rows.to(torch.bfloat16), None, mine.ids)
            expected = mine.tokens.float() * (mine.weights * (mine.ids >= 0)).sum(-1, keepdim=True)
            torch.testing.assert_close(result[: len(mine.tokens)].float(), expected, rtol=3e-2, atol=3e-2)
        same = manager.get_handle({**kwargs, "gpu_per_node": 2, "rail": rail}) is across
        by_rings = isinstance(across, EpDispatchCombineOp)
        assert by_rings == (rail == "auto")
        explained = manager.explain(2, kwargs["max_num_tokens_per_dp_rank"])["kernel"]
        assert explained == across.config.kernel_type.name
        return explained, manager.num_buffer_bytes, same


@pytest.mark.parametrize("rail", ["auto", "torch.distributed"])
def test_the_manager_picks_it_for_several_nodes(ranks: Any, rail: str) -> None:
    for kernel, num_buffer_bytes, same in ranks(through_the_manager, 4, rail):
        assert kernel == "InterNodeV1LL"
        assert num_buffer_bytes > 0
        assert same


def wrong_calls(context: RankContext) -> None:
    """Each is an error on all ranks before anything is sent, and the next step works."""
    nodes = Nodes.of(context, 2)
    with nodes.arena:
        op = nodes.op(FULL, context.rank)
        mine = make_inputs(FULL, 0, context.rank)
        rows = torch.zeros(4 * FULL.max_tokens, FULL.hidden_dim, dtype=torch.bfloat16)
        raised(errors.AlternationError, lambda: op.combine(rows, None, None), "dispatch")
        raised(errors.HiddenSizeError, lambda: op.dispatch(mine.tokens[:, :8].clone(), mine.weights, None, mine.ids))
        raised(errors.DtypeError, lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids.long()))
        raised(errors.TooManyTokensError, lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids,
                                                              max_num_tokens=FULL.max_tokens + 1))  # fmt: skip
        op.dispatch(mine.tokens, mine.weights, None, mine.ids)
        raised(errors.AlternationError, lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids), "combine")
        raised(errors.ShapeError, lambda: op.combine(rows[:1], None, None))
        raised(errors.ForeignIndicesError, lambda: op.combine(rows, None, mine.ids[:1]))
        op.combine(rows, None, mine.ids)
        run_inter_node_step(FULL, nodes, op, 1, context.device)
        op.close()
        raised(errors.ClosedError, lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids))
    nodes.rail.close()


def test_wrong_calls(ranks: Any) -> None:
    ranks(wrong_calls, 4)


def a_rank_that_does_not_come(context: RankContext) -> tuple[bool, float]:
    """Whether the error is a timeout, and after how many seconds it came."""
    nodes = Nodes.of(context, 2)
    with nodes.arena:
        op = nodes.op(FULL, context.rank)
        run_inter_node_step(FULL, nodes, op, 0, context.device)
        op.set_timeout(SHORT_TIMEOUT_SECS)
        mine = make_inputs(FULL, 1, context.rank)
        start = time.monotonic()
        timed_out = context.rank == 3
        if not timed_out:
            # its rail peer waits between nodes; the others wait for a rank of their node, which kernels record
            def dispatch() -> None:
                op.dispatch(mine.tokens, mine.weights, None, mine.ids)
                op.check()

            timed_out = raised(errors.RankTimeoutError, dispatch, "rank") is not None
        secs = time.monotonic() - start
        nodes.rendezvous.barrier("all have given up")
        op.close()
    nodes.rail.close()
    return timed_out, secs


def test_a_rank_that_does_not_come_is_an_error_on_all_others(ranks: Any) -> None:
    for timed_out, secs in ranks(a_rank_that_does_not_come, 4):
        assert timed_out
        assert secs < 6 * SHORT_TIMEOUT_SECS


LATE = replace(FULL, world_size=2, options={"timeout_secs": BRIEF_TIMEOUT_SECS, "first_timeout_secs": 60.0})


def late_in_the_first_step(context: RankContext) -> None:
    """A rank comes late to each hop between nodes: nobody minds in the op's first step, the other one in the second."""
    nodes = Nodes.of(context, 2)
    with nodes.arena:
        op = nodes.op(LATE, context.rank)
        mine = make_inputs(LATE, 0, context.rank)
        nodes.rendezvous.barrier("before one is late")
        is_late = context.rank == 1
        for call in (
            lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids),
            lambda: op.combine(torch.zeros(2 * LATE.max_tokens, LATE.hidden_dim, dtype=torch.bfloat16), None, None),
        ):
            if is_late:
                time.sleep(1.5 * BRIEF_TIMEOUT_SECS)
            call()
        run_inter_node_step(LATE, nodes, op, 1, context.device)
        if not is_late:
            start = time.monotonic()
            error = raised(
                errors.RankTimeoutError,
                lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids),
                f"within {BRIEF_TIMEOUT_SECS:g} s",
            )
            assert isinstance(error, errors.RankTimeoutError)
            assert error.missing_ranks == (1,)
            assert time.monotonic() - start < 6 * BRIEF_TIMEOUT_SECS
        nodes.rendezvous.barrier("the other has given up")
        op.close()
    nodes.rail.close()


def test_a_first_step_has_the_longer_bound_between_nodes_too(ranks: Any) -> None:
    ranks(late_in_the_first_step, 2)
