"""A few of the round trips that tests/programs/soak.py makes on GPUs by the million."""

from typing import Any

import pytest

from tests.cases.op_cases import Case
from tests.programs.soak import Pace, Soaked, soak

NUM_STEPS = 5


@pytest.mark.parametrize("flagged_max_tokens", [0, 128])
def test_round_trips_that_check_themselves(ranks: Any, flagged_max_tokens: int) -> None:
    case = Case(
        world_size=3,
        hidden_dim=16,
        topk=3,
        num_experts=9,
        max_tokens=5,
        layout="rank_major",
        with_weights=False,
        options={"flagged_max_tokens": flagged_max_tokens},
    )
    assert ranks(soak, case.world_size, case, NUM_STEPS) == [Soaked(NUM_STEPS, 0, 0)] * 3


def test_ranks_may_be_late_and_the_memory_stays_flat(ranks: Any) -> None:
    case = Case(
        world_size=3, hidden_dim=16, topk=3, num_experts=9, max_tokens=5, layout="rank_major", with_weights=False
    )
    found = ranks(soak, case.world_size, case, 12, Pace(eager=True, steps_between_looks=1, late_ranks=True))
    assert [(each.num_round_trips, each.num_wrong, each.gained_descriptors) for each in found] == [(12, 0, 0)] * 3
    assert sum(each.num_late for each in found) == 11
