"""What the protocol holds against: both dispatches in turn, epochs that wrap, two ops that share memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ep_a2a.memory.arena import Arena
from tests.cases.op_cases import Case, make_op, run_case, run_step
from tests.simulator.cases import CASES, run_chain
from tests.simulator.ranks import Context
from tests.simulator.runs import CONDITIONS, run_on_ranks

IN_TURN = replace(
    CASES["low_latency"],
    tokens=((2, 1), (4, 3)),
    step_tokens=(2, None),
    num_steps=4,
    options={"flagged_max_tokens": 2},
)
THREE = {"world_size": 3, "num_experts": 6}
SIGN_CHANGES, EPOCHS_END = 2**31 - 3, 2**32 - 3
"""Last epoch before a step in which epochs become negative, or begin anew."""
VARIANTS = {
    "both dispatches in turn": IN_TURN,
    "in turn, compact": replace(IN_TURN, layout="compact"),
    "in turn, halves": replace(IN_TURN, split="mixed"),
    "in turn, rows that hold marks": replace(IN_TURN, unusual=True),
    "in turn, three ranks": replace(IN_TURN, **THREE, tokens=((2, 1, 0), (4, 3, 2))),
    "in turn, epochs change sign": replace(IN_TURN, first_epoch=SIGN_CHANGES),
    "in turn, epochs end": replace(IN_TURN, first_epoch=EPOCHS_END),
    "rings, epochs change sign": replace(CASES["rings"], first_epoch=SIGN_CHANGES),
    "rings, epochs end": replace(CASES["rings_of_one_chunk"], first_epoch=EPOCHS_END),
    "rings of three nodes": replace(CASES["rings_of_one_chunk"], **THREE, num_nodes=3),
}


def right(case: Case, body: Callable[..., Any], name: str) -> None:
    conditions = CONDITIONS[name]
    if body is run_chain:
        conditions = replace(conditions, dependent=True)
    run_on_ranks(body, case.world_size, case, conditions=conditions)


# of these test_steps.py has the like
LIKE_OTHERS = ("in turn, compact", "in turn, halves", "in turn, three ranks", "in turn, epochs end")


@pytest.mark.parametrize("name", ["late", pytest.param("random", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=[pytest.mark.full] * (each in LIKE_OTHERS)) for each in VARIANTS]
)
def test_steps_meet_the_oracle(variant, name):
    right(VARIANTS[variant], run_case, name)


@pytest.mark.full
@pytest.mark.parametrize("name", ["late", "random"])
@pytest.mark.parametrize("variant", [each for each in VARIANTS if "halves" not in each])
def test_chains_meet_the_oracle(variant, name):
    right(VARIANTS[variant], run_chain, name)


def two_ops_in_turn(context: Context, case: Case) -> None:
    """Steps of two ops that share their memory."""
    with Arena(context.group, context.device) as arena:
        cases = [case, replace(case, hidden_dim=2 * case.hidden_dim)]
        ops = [make_op(context, each, arena, index=0) for each in cases]
        for number in range(case.num_steps):
            run_step(cases[number % 2], ops[number % 2], number, context.device)


@pytest.mark.parametrize("name", ["low_latency", "bulk_compact"])
def test_two_ops_of_one_index_in_turn(name):
    right(replace(CASES[name], num_steps=4), two_ops_in_turn, "late")
