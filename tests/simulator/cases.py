"""What ranks do in the simulator: the op's cases against the oracle, and steps that overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.compat.combine_time_weights import CombineTimeWeightsOp
from ep_a2a.memory.arena import Arena
from tests.cases.op_cases import (
    Case,
    Step,
    make_inputs,
    make_op,
    reference_of,
    run_case,
    same_sums,
    set_first_epoch,
)
from tests.cases.ring_cases import SMALL_RINGS, rings

if TYPE_CHECKING:
    from tests.simulator.ranks import Context

SMALL = Case(
    world_size=2,
    hidden_dim=16,
    topk=2,
    num_experts=4,
    max_tokens=4,
    layout="rank_major",
    tokens=((3, 2), (1, 4), (0, 3)),
    num_steps=3,
)
BULK = {"flagged_max_tokens": 0}
CASES = {
    "low_latency": SMALL,
    "low_latency_marks": replace(SMALL, unusual=True),
    "low_latency_compact": replace(SMALL, layout="compact", split="mixed"),
    "bulk": replace(SMALL, options=BULK),
    "bulk_compact": replace(SMALL, layout="compact", options=BULK, split="mixed"),
    "bulk_look_back": replace(SMALL, max_tokens=1100, tokens=((9, 6),), num_steps=2, options=BULK),
    "expert_major": replace(SMALL, layout="expert_major"),
    "fp8_results": replace(SMALL, hidden_dim=128, quant_type="fp8_blockwise"),
    "fp8_results_direct": replace(SMALL, hidden_dim=128, quant_type="fp8_direct_cast"),
    "fp8": replace(SMALL, hidden_dim=128, quant_type="fp8_per_1x128", options=BULK),
    "rings": replace(SMALL, world_size=4, num_nodes=2, num_experts=8, options=SMALL_RINGS),
    "rings_of_one_chunk": replace(SMALL, world_size=4, num_nodes=2, num_experts=8, num_steps=2, options=rings(1, 1, 1)),
    "rings_of_a_step": replace(SMALL, world_size=4, num_nodes=2, num_experts=8, kernel="InterNodeV1LL"),
}


def run_chain(context: Context, case: Case) -> None:
    """Steps whose launches follow each other without the host, each combine against the oracle."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        set_first_epoch(op, case, arena)
        checks: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(case.num_steps):
            step = Step.dispatch(case, op, number, context.device)
            rows, _, expected, _ = step.before_combine()
            out = torch.zeros_like(expected)
            op.combine(rows, None, step.ids, out=out)
            checks.append((out, expected))
        context.synchronize()
        op.check()
        for number, (got, expected) in enumerate(checks):
            same_sums(got, expected, f"combine of step {number}")


def run_until_death(context: Context, case: Case) -> None:
    """Steps that are checked for failures but not for values, since another rank may die at any point."""
    op = make_op(context, case, Arena(context.group, context.device))
    for number in range(case.num_steps):
        step = Step.dispatch(case, op, number, context.device)
        op.check()
        rows = torch.zeros(*step.got[0].shape[:-1], case.hidden_dim, dtype=op.config.combined_dtype)
        op.combine(rows, None, step.ids)
        op.check()
    op.reset()


def run_late_weights(context: Context, case: Case) -> None:
    """Steps whose combine, not their dispatch, is given the router's weights."""
    with Arena(context.group, context.device) as arena:
        op = CombineTimeWeightsOp(case.config(context.rank), arena=arena)
        for number in range(case.num_steps):
            everyone = [make_inputs(case, number, rank) for rank in range(case.world_size)]
            mine, counts = everyone[context.rank], [each.tokens.shape[0] for each in everyone]
            got = op.dispatch(mine.tokens, None, mine.scales, mine.ids)
            reference = reference_of(case, number, everyone)
            step = Step(case, op, number, context.device, mine.ids, counts, reference, got)
            rows, _, expected, _ = step.before_combine()
            same_sums(
                op.combine(rows, mine.weights, mine.ids)[0][: len(expected)], expected, f"combine of step {number}"
            )
        op.check()


BODIES: dict[str, Any] = {"steps": run_case, "chain": run_chain, "late_weights": run_late_weights}
"""What each rank does, by name."""


def bodies_of(case: str) -> list[str]:
    """The bodies that fit a case."""
    return ["steps", "chain"] + ["late_weights"] * (CASES[case].layout == "expert_major")
