"""Round trips that draw their routing and check themselves on the device, replayed from a CUDA graph."""

from dataclasses import replace
from typing import Any

import pytest

from tests.programs.soak import SOAKED, soak

NUM_STEPS = 500


@pytest.mark.parametrize("name", SOAKED)
def test_replays_check_themselves(ranks: Any, name: str) -> None:
    found = ranks(soak, 2, replace(SOAKED[name], world_size=2), NUM_STEPS)
    assert [(each.num_round_trips, each.num_wrong, each.gained_bytes) for each in found] == [(NUM_STEPS, 0, 0)] * 2
