"""A few steps of each schedule (tests/schedules.py); docs/reliability.md tells how many have been run by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.schedules import SCHEDULES, run_with_pauses

NUM_STEPS = 4
SEED = 3


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_meets_the_oracle_whenever_ranks_pause(ranks: Any, name: str) -> None:
    case = SCHEDULES[name]
    pauses = ranks(run_with_pauses, case.world_size, case, NUM_STEPS, SEED)
    assert all(pauses)
