"""Ranks that are killed or stopped, on two GPUs: the bodies of tests/multiprocess/test_faults.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.cases import fault_cases
from tests.cases.fault_cases import SLACK_SECS, TIMEOUT_SECS, VICTIM
from tests.cases.outside_fault_cases import DIRECT, FLAGGED, OUTSIDE_FAULTS, case_of, kill_and_look

if TYPE_CHECKING:
    from pathlib import Path

WORLD_SIZE = 2


@pytest.mark.parametrize("fault", OUTSIDE_FAULTS)
def test_a_killed_rank_is_named_and_what_is_left_closes(fault: str, tmp_path: Path) -> None:
    kill_and_look(OUTSIDE_FAULTS[fault], WORLD_SIZE, "cuda", tmp_path)


@pytest.mark.parametrize("flagged_max_tokens", [FLAGGED, DIRECT])
def test_a_rank_that_stops_for_a_while_is_waited_for(ranks: Any, flagged_max_tokens: int, tmp_path: Path) -> None:
    """Between its calls: a kernel that runs goes on while its process is stopped."""
    case = case_of(flagged_max_tokens, WORLD_SIZE)
    places = ("before dispatch", "before combine")
    ranks(fault_cases.stopped_for_a_while, WORLD_SIZE, case, places, str(tmp_path), device="cuda")


@pytest.mark.parametrize(("place", "call"), [("before dispatch", "dispatch 0"), ("before combine", "combine 0")])
def test_a_rank_that_stops_for_long_is_named_by_all(ranks: Any, place: str, call: str, tmp_path: Path) -> None:
    case = case_of(FLAGGED, WORLD_SIZE)
    answers = ranks(fault_cases.stopped_for_long, WORLD_SIZE, case, place, str(tmp_path), device="cuda")
    for rank, seen in enumerate(answers):
        assert seen["missing"] == [VICTIM]
        assert seen["call"] == ("any" if rank == VICTIM else call)
        assert seen["secs"] < TIMEOUT_SECS + SLACK_SECS


def test_ranks_whose_own_kernels_are_done_are_told(ranks: Any) -> None:
    case = case_of(FLAGGED, WORLD_SIZE)
    told = ranks(fault_cases.told_of_a_failure, WORLD_SIZE, case, TIMEOUT_SECS, device="cuda")
    assert told == [[[], [0]]] * WORLD_SIZE
