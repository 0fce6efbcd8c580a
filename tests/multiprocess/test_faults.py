"""Faults of processes, of the order of calls and of memory, on CPU processes (docs/reliability.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ep_a2a.testing import RankFailure, RankPool
from tests import fault_cases
from tests.fault_cases import LOCAL_SECS, SLACK_SECS, TIMEOUT_SECS, VICTIM
from tests.multiprocess.test_memory import files_of, process_id
from tests.op_cases import Case

SURVIVORS = (0, 2)
FLAGGED, DIRECT = 128, 0
paths = pytest.mark.parametrize("flagged_max_tokens", [FLAGGED, DIRECT], ids=["flagged", "direct"])


def case_of(flagged_max_tokens: int, **changes: Any) -> Case:
    options = {"flagged_max_tokens": flagged_max_tokens}
    return Case(world_size=3, num_experts=6, tokens=((5, 4, 6),), max_tokens=8, options=options, **changes)


def check_error(seen: dict[str, Any], call: str) -> None:
    assert seen["call"] == call
    assert seen["missing"] == [VICTIM]
    assert seen["secs"] < TIMEOUT_SECS + SLACK_SECS


@pytest.mark.parametrize(
    ("place", "flagged_max_tokens", "call"),
    [
        ("before dispatch", FLAGGED, "dispatch 0"),
        ("sending dispatch", FLAGGED, "dispatch 0"),
        ("sending dispatch", DIRECT, "dispatch 0"),
        ("waiting in dispatch", FLAGGED, "combine 0"),
        ("waiting in dispatch", DIRECT, "dispatch 0"),
        ("before combine", DIRECT, "combine 0"),
        ("sending combine", FLAGGED, "combine 0"),
        ("waiting in combine", DIRECT, "dispatch 1"),
    ],
)
def test_a_killed_rank_is_named_and_what_is_left_closes(
    place: str, flagged_max_tokens: int, call: str, tmp_path: Path
) -> None:
    case = case_of(flagged_max_tokens)
    with RankPool(3, timeout_secs=90, grace_secs=60) as pool:
        processes = pool.run(process_id)
        with pytest.raises(RankFailure) as caught:
            pool.run(fault_cases.killed, case, place, str(tmp_path), place == "before combine")
    assert "exit code -9" in caught.value.tracebacks[VICTIM]
    assert sorted(caught.value.tracebacks) == [VICTIM], str(caught.value)
    for rank in SURVIVORS:
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        print(place, flagged_max_tokens, rank, seen)
        check_error(seen, call)
        assert seen["close_secs"] < LOCAL_SECS
        assert seen["files"] == []
    assert files_of(*processes) == []
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]


@paths
def test_a_rank_that_stops_for_a_while_is_waited_for(ranks: Any, flagged_max_tokens: int) -> None:
    places = ("sending dispatch", "waiting in dispatch", "before combine", "sending combine")
    ranks(fault_cases.stopped_for_a_while, 3, case_of(flagged_max_tokens), places)


@pytest.mark.parametrize(
    ("place", "flagged_max_tokens", "call"),
    [("sending dispatch", FLAGGED, "dispatch 0"), ("sending combine", DIRECT, "combine 0")],
)
def test_a_rank_that_stops_for_long_is_named_by_all(ranks: Any, place: str, flagged_max_tokens: int, call: str) -> None:
    answers = ranks(fault_cases.stopped_for_long, 3, case_of(flagged_max_tokens), place)
    for rank, seen in enumerate(answers):
        print(place, rank, seen)
        check_error(seen, "any" if rank == VICTIM else call)


def test_an_exception_between_dispatch_and_combine(ranks: Any) -> None:
    for rank, seen in enumerate(ranks(fault_cases.raises_between, 3, case_of(FLAGGED))):
        print(rank, seen)
        assert seen["close_secs"] < LOCAL_SECS
        if rank != VICTIM:
            check_error(seen, "combine 0")


@paths
def test_a_rank_that_leaves_a_step_out(ranks: Any, flagged_max_tokens: int) -> None:
    case = case_of(flagged_max_tokens, with_weights=False, combine_weights=False)
    for rank, seen in enumerate(ranks(fault_cases.skips_a_step, 3, case)):
        print(rank, seen)
        if rank != VICTIM:
            check_error(seen, "step 3")


@pytest.mark.parametrize(("kind", "number"), [("shared", 1), ("shared", 2), ("shared", 3), ("local", 1), ("local", 3)])
def test_no_memory_on_one_rank_is_an_error_on_all(ranks: Any, kind: str, number: int) -> None:
    for rank, seen in enumerate(ranks(fault_cases.no_memory, 3, case_of(FLAGGED), kind, number)):
        print(rank, seen)
        assert seen["secs"] < SLACK_SECS
        if rank != VICTIM:
            assert f"rank {VICTIM} failed with HostMemoryError" in seen["text"]
