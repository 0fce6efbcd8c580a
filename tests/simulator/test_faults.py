"""Ranks that leave the order of calls, or do not begin a step: who is named. Ranks that are late: test_deaths.py."""

import re
from typing import Any

import pytest

from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory.arena import Arena
from tests.cases.fault_cases import LOW_LATENCY, case_of, told_of_a_failure
from tests.cases.op_cases import Case, Step, make_op, run_step
from tests.cases.op_checks import raised
from tests.simulator.explain import describe
from tests.simulator.faults import simulation_of
from tests.simulator.ranks import Conditions, Context

TIMEOUT_SECS = 4.0
TWO = Case(world_size=2, hidden_dim=32, tokens=((3, 2),), max_tokens=5)


def results_of(world_size: int, body: Any, *args: Any) -> list[Any]:
    simulation = simulation_of(world_size, Conditions(num_sms=4))
    outcome = simulation.run(body, *args)
    assert outcome.errors == [None] * world_size, f"{outcome.errors}\n{describe(simulation)}"
    return outcome.results


def test_ranks_whose_own_kernels_are_done_are_told():
    # the others live and had not begun the step
    assert results_of(3, told_of_a_failure, case_of(LOW_LATENCY), TIMEOUT_SECS) == [[[], [0, 2]]] * 3


OP_0 = r"rank 0 in dispatch 2 of the op of index 0 in arena (\d+) of the group"
CALLS = {
    "two ops": rf"{OP_0}.*, rank 1 in dispatch 2 of the op of index 1 in arena \1 of",
    "ops of two arenas": rf"{OP_0}.*, rank 1 in dispatch 2 of the op of index 0 in arena (?!\1)\d+ of",
    "a reset and a step": "rank 0 in the meeting 'resetting the op: start', rank 1 in dispatch 2 of the op",
}
"""What ranks 0 and 1 call at the same time, and what the error says of it."""


def call_in_another_order(context: Context, case: Case, calls: str) -> None:
    arenas = [Arena(context.group, context.device) for _ in range(2)]
    if calls == "ops of two arenas":
        ops = [make_op(context, case, arena, index=0) for arena in arenas]
    else:
        ops = [make_op(context, case, arenas[0], index=index) for index in range(2)]
    for op in ops:
        run_step(case, op, 0, context.device)
        op.set_timeout(TIMEOUT_SECS)
    arenas[0].rendezvous.barrier("both ops work")
    resets = calls == "a reset and a step"

    def step() -> None:
        op = ops[0 if resets else context.rank]
        Step.dispatch(case, op, 1, context.device)
        op.check()

    if context.rank or not resets:
        error = raised(RankTimeoutError, step, "in the same order on every rank")
        assert isinstance(error, RankTimeoutError)
        assert (error.missing_ranks, error.late_ranks) == ((), (0,) if resets else ())
        assert re.search(CALLS[calls], str(error)), error
    for op in ops:
        op.reset()
        run_step(case, op, 2, context.device)
    for each in (*ops, *arenas):
        each.close()


@pytest.mark.parametrize("calls", CALLS)
def test_calls_in_another_order_are_named_by_all(calls):
    results_of(2, call_in_another_order, TWO, calls)
