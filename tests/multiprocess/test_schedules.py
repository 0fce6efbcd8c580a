"""A few steps of each schedule (tests/programs/schedules.py); docs/results/faults.md tells how many were run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.schedules import SCHEDULES, run_with_pauses

NUM_STEPS = 4
SEED = 3


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_meets_the_oracle_whenever_ranks_pause(ranks: Any, name: str) -> None:
    case = SCHEDULES[name]
    pauses = ranks(run_with_pauses, case.world_size, case, NUM_STEPS, SEED)
    assert all(pauses)
