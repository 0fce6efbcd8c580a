"""Ranks are killed, or stop, and the others go on without them: on_rank_loss="mask", on CPU."""

import signal
from typing import Any

import pytest

from ep_a2a.testing import RankFailure, RankPool
from tests.cases import mask_cases
from tests.cases.mask_cases import POINTS, Lost

BULK, COUNTERS = (("flagged_max_tokens", 0),), (("flagged_max_tokens", 0), ("max_sms", 8))


@pytest.mark.parametrize(
    ("world_size", "lost"),
    [
        *((3, Lost((2,), point)) for point in POINTS),
        *((3, Lost((0,), point, changes=BULK)) for point in POINTS),
        (5, Lost((1, 3), POINTS[1])),
        (5, Lost((2,), POINTS[3], changes=BULK)),
        (3, Lost((1,), POINTS[2], changes=COUNTERS)),
        (2, Lost((1,), POINTS[3], changes=COUNTERS)),
        (3, Lost((1,), POINTS[1], changes=(("layout", "expert_major"),))),
    ],
    ids=str,
)
def test_survivors_of_a_death_go_on(world_size: int, lost: Lost) -> None:
    with RankPool(world_size, timeout_secs=120, grace_secs=60) as pool, pytest.raises(RankFailure) as caught:
        pool.run(mask_cases.go_on, lost)
    assert sorted(caught.value.tracebacks) == list(lost.victims), str(caught.value)
    assert not caught.value.unfinished


@pytest.mark.parametrize("changes", [(), BULK], ids=["few", "bulk"])
def test_no_rows_of_a_masked_rank_are_counted(changes: Any) -> None:
    with RankPool(3, timeout_secs=120, grace_secs=60) as pool, pytest.raises(RankFailure) as caught:
        pool.run(mask_cases.hear_early, dict(changes))
    assert sorted(caught.value.tracebacks) == [1], str(caught.value)


def test_survivors_wait_for_each_other_when_they_close() -> None:
    with RankPool(3, timeout_secs=120, grace_secs=60) as pool, pytest.raises(RankFailure) as caught:
        pool.run(mask_cases.close_early)
    assert sorted(caught.value.tracebacks) == [2], str(caught.value)


@pytest.mark.parametrize("changes", [(), BULK], ids=["few", "bulk"])
def test_captured_steps_go_on(changes: Any) -> None:
    with RankPool(3, timeout_secs=120, grace_secs=60) as pool, pytest.raises(RankFailure) as caught:
        pool.run(mask_cases.replay_on, 1, POINTS[0], dict(changes))
    assert sorted(caught.value.tracebacks) == [1], str(caught.value)


@pytest.mark.parametrize("point", POINTS[:3])
def test_a_rank_that_stops_is_masked_and_comes_back_by_reset(point: str) -> None:
    with RankPool(3, timeout_secs=120, grace_secs=60) as pool:
        answers = pool.run(mask_cases.go_on, Lost((1,), point, signal.SIGSTOP))
    assert [answer is None for answer in answers] == [False, True, False]


def test_a_rank_that_has_not_looked_for_long_looks_before_it_launches() -> None:
    with RankPool(3, timeout_secs=120, grace_secs=60) as pool:
        pool.run(mask_cases.wake)


def test_refusals(ranks: Any) -> None:
    ranks(mask_cases.refusals, 2)
