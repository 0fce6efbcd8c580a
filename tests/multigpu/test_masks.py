"""Captured steps go on without a rank that dies, on GPUs, without MPS: the body of tests/multiprocess/test_masks.py."""

from typing import Any

import pytest

from ep_a2a.testing import RankFailure, RankPool
from tests.cases import mask_cases
from tests.cases.mask_cases import POINTS

COUNTERS = {"flagged_max_tokens": 0, "max_sms": 8}


@pytest.mark.parametrize("point", [POINTS[0], "with it"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"flagged_max_tokens": 0}, COUNTERS, {"layout": "expert_major"}],
    ids=["few", "bulk", "counters", "expert_major"],
)
def test_captured_steps_go_on(point: str, changes: dict[str, Any]) -> None:
    pool = RankPool(4, device="cuda", timeout_secs=120, grace_secs=60, mps=False)
    with pool, pytest.raises(RankFailure) as caught:
        pool.run(mask_cases.replay_on, 1, point, changes)
    assert sorted(caught.value.tracebacks) == [1], str(caught.value)
