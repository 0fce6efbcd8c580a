"""A few of the round trips that tests/programs/soak.py makes on GPUs by the million."""

from dataclasses import replace
from typing import Any

import pytest

from tests.programs.soak import SMALL, soak

NUM_STEPS = 12


@pytest.mark.parametrize("flagged_max_tokens", [0, 128])
def test_round_trips_that_check_themselves(ranks: Any, flagged_max_tokens: int) -> None:
    case = replace(SMALL, world_size=3, num_experts=9, options={"flagged_max_tokens": flagged_max_tokens})
    found = ranks(soak, case.world_size, case, NUM_STEPS, 2)
    assert [(each.num_round_trips, each.num_wrong, each.gained_descriptors) for each in found] == [
        (NUM_STEPS, 0, 0)
    ] * 3
