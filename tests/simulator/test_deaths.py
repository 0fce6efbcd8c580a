"""A rank that dies at any operation of its host or its kernels: the others name it, and nobody else, and soon."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from ep_a2a.errors import RankTimeoutError
from tests.simulator.cases import CASES, run_until_death
from tests.simulator.ranks import Conditions, simulate
from tests.simulator.scheduler import Fault, Killed

VICTIM = 1
NUM_DEATHS = 8
LONGEST_SECS = 30.0
"""By the simulated clock; the op's bound is 60 s, and a death is named long before."""
VARIANTS = {
    "low_latency": replace(CASES["low_latency"], world_size=3, num_experts=6, num_steps=2),
    "bulk": replace(CASES["bulk"], world_size=3, num_experts=6, num_steps=2),
    "rings": replace(CASES["rings"], num_steps=1),
}


@functools.cache
def num_operations_of(name: str) -> int:
    """Operations of the victim in a run in which nobody dies."""
    case = VARIANTS[name]
    whole = simulate(case.world_size, run_until_death, case, conditions=Conditions(num_sms=4))
    assert whole.errors == [None] * case.world_size
    return whole.machine.scheduler.num_operations[VICTIM]


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.full] * (number % 4 != 1)) for number in range(NUM_DEATHS)]
)
@pytest.mark.parametrize("name", VARIANTS)
def test_survivors_name_exactly_the_rank_that_has_died(name, number):
    case, at = VARIANTS[name], 2 + number * num_operations_of(name) // NUM_DEATHS
    run = simulate(
        case.world_size, run_until_death, case, conditions=Conditions(num_sms=4, faults=(Fault(VICTIM, at),))
    )
    assert isinstance(run.errors[VICTIM], Killed)
    for rank, error in enumerate(run.errors):
        if rank != VICTIM:
            assert isinstance(error, RankTimeoutError), (at, rank, error, run.machine.scheduler.describe())
            assert error.missing_ranks == (VICTIM,), (at, rank, error, run.machine.scheduler.describe())
    assert run.machine.scheduler.now - run.machine.scheduler.start_secs < LONGEST_SECS
