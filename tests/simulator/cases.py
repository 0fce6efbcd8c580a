"""What ranks do in the simulator: the op's cases against the oracle, and steps that overlap."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ep_a2a import clock
from ep_a2a.compat.combine_time_weights import CombineTimeWeightsOp
from ep_a2a.errors import CapacityError, ConfigMismatchError, EpA2AError, RankTimeoutError
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.policy import MOST_ADDING_ARRIVED_CASTS
from tests.cases import op_cases
from tests.cases.op_checks import raised
from tests.cases.ring_cases import SMALL_RINGS, rings
from tests.simulator.ranks import Context

SMALL = op_cases.Case(
    world_size=2,
    hidden_dim=16,
    topk=2,
    num_experts=4,
    max_tokens=4,
    layout="rank_major",
    tokens=((3, 2), (1, 4), (0, 3)),
    num_steps=3,
)
SOON_SECS = 0.5
"""Of the simulated clock: less than all time-outs."""
LATE_RANK = 1
SIGN_CHANGES, EPOCHS_END = 2**31 - 3, 2**32 - 3
"""Last epoch before a step in which epochs become negative, or begin anew."""
BULK = {"flagged_max_tokens": 0}
THREE_RANKS = op_cases.Case(
    world_size=3,
    hidden_dim=16,
    topk=3,
    num_experts=7,
    max_tokens=6,
    routing="out_of_range",
    layout="rank_major",
    tokens=((6, 2, 0), (1, 5, 6), (0, 0, 3), (4, 4, 4)),
    num_steps=4,
)
# steps of at most 3 tokens are flagged, the others not: the path changes from step to step
SWITCHING = replace(
    THREE_RANKS,
    step_tokens=(None, 3, 6, 2),
    tokens=((6, 2, 0), (1, 3, 2), (0, 5, 3), (2, 0, 2)),
    options={"flagged_max_tokens": 3},
)
BOUNDED = replace(SMALL, max_tokens=9, tokens=((3, 2), (9, 6)), num_steps=2, options=BULK | {"max_sms": 4})
MARKS = BULK | {"max_sms": MOST_ADDING_ARRIVED_CASTS + 1}
TWO_NODES = replace(SMALL, world_size=4, num_nodes=2, num_experts=8, options=SMALL_RINGS)
STAGED = SMALL_RINGS | op_cases.BY_HOSTS | {"timeout_secs": 2.0}
CASES = {
    "low_latency": SMALL,
    "low_latency_marks": replace(SMALL, unusual=True),
    "low_latency_compact": replace(SMALL, layout="compact", split="mixed"),
    "low_latency_sparse": replace(SMALL, max_tokens=65, num_steps=2),
    # scales travel beside a row
    "low_latency_cast": replace(SMALL, hidden_dim=256, quant_type="fp8_per_1x128", unusual=True, num_steps=2),
    # rows of several blocks in dispatch and in combine, the last of them a part of one
    "low_latency_long_rows": replace(
        SMALL,
        hidden_dim=4096 + 1032,
        dtype=torch.float32,
        unusual=True,
        layout="compact",
        tokens=((2, 1),),
        num_steps=1,
    ),
    # few programs, which read the next rows while they add
    "low_latency_few_programs": replace(
        THREE_RANKS, hidden_dim=8192 + 24, max_tokens=12, tokens=((12, 2, 0),), num_steps=1, options={"max_sms": 3}
    ),
    "low_latency_strides": replace(SMALL, step_tokens=(4, 3), tokens=((3, 2), (1, 3)), num_steps=4),
    "low_latency_packed": replace(THREE_RANKS, step_tokens=("own",)),
    "bulk": replace(SMALL, options=BULK),
    "bulk_packed": replace(SMALL, step_tokens=("own", 4), options=BULK),
    "bulk_compact": replace(SMALL, layout="compact", options=BULK, split="mixed"),
    "bulk_look_back": replace(
        SMALL, max_tokens=1100, tokens=((9, 6),), num_steps=2, scale_dim=3, num_biases=2, options=BULK
    ),
    "bounded": BOUNDED,
    "bounded_fp8_results": replace(BOUNDED, hidden_dim=256, quant_type="fp8_blockwise"),
    "bounded_marks": replace(BOUNDED, options=MARKS),
    "bounded_fp8_direct": replace(BOUNDED, quant_type="fp8_direct_cast"),
    "bounded_fp8_marks": replace(BOUNDED, hidden_dim=256, quant_type="fp8_blockwise", options=MARKS),
    # more rows of a token than a turn reads ahead
    "bounded_marks_six": replace(
        BOUNDED, world_size=6, topk=5, num_experts=12, tokens=((3, 2, 0, 1, 3, 4), (4, 0, 1, 3, 2, 2)), options=MARKS
    ),
    "bounded_compact_cast": replace(BOUNDED, layout="compact", hidden_dim=256, quant_type="fp8_per_1x128"),
    "bounded_look_back": replace(BOUNDED, max_tokens=1100, tokens=((35, 20),), num_steps=1, scale_dim=3),
    "small_room": replace(SMALL, layout="compact", routing="all_to_one", options={"max_total_recv_tokens": 2}),
    "small_room_bulk": replace(SMALL, layout="compact", options=BULK | {"max_total_recv_tokens": 2}),
    "expert_major": replace(SMALL, layout="expert_major", options={"expert_alignment": 4}),
    "fp8_results": replace(SMALL, hidden_dim=128, quant_type="fp8_blockwise"),
    "fp8_results_long_rows": replace(SMALL, hidden_dim=1152, quant_type="fp8_blockwise", num_steps=1),
    "fp8_results_direct": replace(SMALL, hidden_dim=128, quant_type="fp8_direct_cast"),
    # a scale for a whole row: rows leave one by one in large steps, too
    "fp8": replace(SMALL, max_tokens=1100, hidden_dim=128, quant_type="fp8_per_token", options=BULK),
    "three_ranks": THREE_RANKS,
    "three_ranks_bulk_compact": replace(THREE_RANKS, layout="compact", options=BULK),
    "three_ranks_expert_major": replace(THREE_RANKS, layout="expert_major"),
    "switching": SWITCHING,
    "switching_halves": replace(SWITCHING, split="mixed"),
    "switching_marks": replace(SWITCHING, unusual=True),
    "switching_at_the_sign": replace(SWITCHING, first_epoch=SIGN_CHANGES),
    "switching_at_the_last_epoch": replace(SWITCHING, first_epoch=EPOCHS_END),
    "rings": TWO_NODES,
    "rings_compact_halves": replace(TWO_NODES, layout="compact", routing="out_of_range", split="mixed"),
    "rings_of_one_chunk": replace(TWO_NODES, num_steps=2, options=rings(1, 1, 1)),
    "rings_at_the_sign": replace(TWO_NODES, first_epoch=SIGN_CHANGES),
    "rings_at_the_last_epoch": replace(TWO_NODES, options=rings(1, 1, 1), first_epoch=EPOCHS_END),
    "rings_of_three_nodes": replace(
        TWO_NODES, world_size=3, num_nodes=3, num_experts=6, num_steps=2, options=rings(1, 1, 1)
    ),
    "rings_of_a_step": replace(TWO_NODES, kernel="InterNodeV1LL", options={}),
    "rings_by_puts": replace(TWO_NODES, num_steps=2, options=rings(1, 1, 1) | op_cases.BY_PUTS),
    "staged": replace(TWO_NODES, num_steps=2, options=STAGED),
    "staged_expert_major": replace(TWO_NODES, layout="expert_major", num_steps=2, options=STAGED),
    "small_room_staged": replace(
        TWO_NODES, layout="compact", num_steps=2, options=STAGED | {"max_total_recv_tokens": 2}
    ),
}


def run_chain(context: Context, case: op_cases.Case) -> None:
    """Steps whose launches follow each other without the host, each combine against the oracle."""
    with op_cases.built_op(context, case) as op:
        op_cases.set_first_epoch(op, case, op.arena)
        checks: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(case.num_steps):
            step = op_cases.Step.dispatch(case, op, number, context.device)
            rows, _, expected, _ = step.before_combine()
            out = torch.zeros_like(expected)
            op.combine(rows, None, step.ids, out=out, **step.biases())
            checks.append((out, expected))
        context.synchronize()
        op.check()
        for number, (got, expected) in enumerate(checks):
            op_cases.same_sums(got, expected, f"combine of step {number}")


def run_late_weights(context: Context, case: op_cases.Case) -> None:
    """Steps whose combine, not their dispatch, is given the router's weights."""
    with op_cases.arena_of(context, case) as arena:
        op = CombineTimeWeightsOp(case.config(context.rank), arena=arena)
        dispatch = op.dispatch
        op.dispatch = lambda x, _, *given, **wishes: dispatch(x, None, *given, **wishes)  # type: ignore[method-assign]
        for number in range(case.num_steps):
            step = op_cases.Step.dispatch(case, op, number, context.device)
            rows, _, expected, _ = step.before_combine()
            got = op.combine(rows, op_cases.make_inputs(case, number, context.rank).weights, step.ids)[0]
            op_cases.same_sums(got[: len(expected)], expected, f"combine of step {number}")
        op.check()


def fails(
    context: Context, case: op_cases.Case, kind: type[EpA2AError], steps: Callable[..., None]
) -> tuple[Any, float]:
    """The error that ends steps on every rank, and when it came; the op can be reset."""
    with op_cases.built_op(context, case) as op:
        error = raised(kind, lambda: steps(context, case, op))
        told_at = clock.now()
        op.reset()
    return error, told_at


def unchecked_steps(context: Context, case: op_cases.Case, op: EpDispatchCombineOp) -> None:
    """Steps that are checked for failures but not for values."""
    for number in range(case.num_steps):
        step = op_cases.Step.dispatch(case, op, number, context.device)
        op.check()
        rows = torch.zeros(*step.got[0].shape[:-1], case.hidden_dim, dtype=op.config.combined_dtype)
        op.combine(rows, None, step.ids)
        op.check()


def steps_ahead(context: Context, case: op_cases.Case, op: EpDispatchCombineOp) -> None:
    """Steps whose hosts go on before they hear that one has failed."""
    inputs = [op_cases.make_inputs(case, number, context.rank).on(context.device) for number in range(case.num_steps)]
    rows = op.get_registered_combine_input_buffer(op.config.combined_dtype)
    for given in inputs:
        received = op.dispatch(*given)[0]
        op.combine(rows[: len(received)], None, given[3])
    context.synchronize()
    op.check()


def disagreeing_step(context: Context, case: op_cases.Case, op: EpDispatchCombineOp) -> None:
    """A step for which each rank gives another step_tokens."""
    op.dispatch(*op_cases.make_inputs(case, 0, context.rank).on(context.device), step_tokens=3 + context.rank)
    context.synchronize()
    op.check()


def run_without_room(context: Context, case: op_cases.Case) -> None:
    """A step that brings a rank more rows than it may receive, of which all ranks hear soon."""
    start = clock.now()
    _, told_at = fails(context, case, CapacityError, unchecked_steps)
    assert told_at - start < SOON_SECS


def run_behind_failure(context: Context, case: op_cases.Case) -> None:
    fails(context, case, CapacityError, steps_ahead)


def run_disagreeing(context: Context, case: op_cases.Case) -> None:
    """The error says who gave what."""
    error, _ = fails(context, case, ConfigMismatchError, disagreeing_step)
    assert re.search(r"rank 0: step_tokens 3 .*rank 1: step_tokens 4 ", str(error)), error


def run_until_late(context: Context, case: op_cases.Case) -> None:
    """Steps until a rank stands still for longer than the others wait, of which all ranks hear."""
    error, _ = fails(context, case, RankTimeoutError, unchecked_steps)
    assert error.missing_ranks in ((LATE_RANK,), ())


BODIES: dict[str, Any] = {
    "steps": op_cases.run_case,
    "chain": run_chain,
    "late_weights": run_late_weights,
    "without_room": run_without_room,
    "behind_failure": run_behind_failure,
    "until_late": run_until_late,
    "disagreeing": run_disagreeing,
}
"""What each rank does, by name."""


def bodies_of(name: str) -> list[str]:
    """The bodies that fit a case."""
    if name == "small_room_staged":
        # a host that hears of the failure first would keep others waiting for its exchange
        return ["behind_failure"]
    if name.startswith("small_room"):
        return ["without_room", "behind_failure"]
    if name.startswith("staged"):
        return ["late_weights" if CASES[name].layout == "expert_major" else "steps"]
    more = ["late_weights"] * (CASES[name].layout == "expert_major") + ["disagreeing"] * (name == "low_latency")
    return ["steps", "chain", *more]
