"""Ranks that die at any operation of a step: the others go on without them, and every token is right."""

from typing import Any

import pytest

from ep_a2a.compat.combine_time_weights import CombineTimeWeightsOp
from ep_a2a.memory.arena import Arena
from tests.cases.mask_cases import op_of, take_step
from tests.simulator.explain import describe
from tests.simulator.faults import simulation_of
from tests.simulator.ranks import Conditions, Context
from tests.simulator.scheduler import Fault, Killed

NUM_STEPS = 3
PATHS: dict[str, dict[str, Any]] = {
    "low_latency": {},
    "bulk": {"flagged_max_tokens": 0},
    "counters": {"flagged_max_tokens": 0, "max_sms": 4},
    "expert_major": {"layout": "expert_major"},
    "late_weights": {"layout": "expert_major", "kind": CombineTimeWeightsOp},
}
VICTIM = 1


def go_on(context: Context, changes: dict[str, Any], firsts: list[int]) -> tuple[int, ...]:
    """Takes steps, and returns who is left."""
    with Arena(context.group, context.device) as arena:
        op = op_of(context, arena, **changes)
        firsts[context.rank] = context.machine.scheduler.num_operations[context.rank]
        for number in range(NUM_STEPS):
            take_step(op, number)
        return op.active_ranks()


def simulated(world_size: int, path: str, *faults: Fault, **conditions: Any) -> tuple[Any, list[int]]:
    """Returns the simulation, and by rank the operations before its first step; all survivors are right."""
    firsts = [0] * world_size
    simulation = simulation_of(world_size, Conditions(num_sms=4, faults=faults, **conditions))
    found = simulation.run(go_on, PATHS[path], firsts)
    dead = {fault.rank for fault in faults}
    errors = {rank: error for rank, error in enumerate(found.errors) if error and not isinstance(error, Killed)}
    assert not errors, f"{errors}\n{faults}\n{describe(simulation)}"
    for rank in {*range(world_size)} - dead:
        assert {*found.results[rank]} >= {*range(world_size)} - dead, faults
    return simulation, firsts


@pytest.mark.parametrize(
    ("world_size", "each"),
    [(2, 400), *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((3, 200), (4, 400)))],
)
@pytest.mark.parametrize("path", PATHS)
def test_survivors_of_a_death_at_any_operation_are_right(path: str, world_size: int, each: int) -> None:
    simulation, firsts = simulated(world_size, path)
    for operation in range(firsts[VICTIM], simulation.scheduler.num_operations[VICTIM], each):
        simulated(world_size, path, Fault(VICTIM, operation))
