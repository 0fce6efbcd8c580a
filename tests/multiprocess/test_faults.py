"""Faults of processes, of the order of calls and of memory, on CPU processes (docs/reliability.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ep_a2a.testing import RankFailure, RankPool
from tests.cases import fault_cases
from tests.cases.fault_cases import LOCAL_SECS, SLACK_SECS, TIMEOUT_SECS, VICTIM
from tests.cases.outside_fault_cases import BULK, LOW_LATENCY, OUTSIDE_FAULTS, case_of, kill_and_look
from tests.multiprocess.test_memory import process_id
from tests.shared_files import files_of

SURVIVORS = (0, 2)


def check_error(seen: dict[str, Any], call: str, *, lives: bool = False) -> None:
    """lives: the rank that did not come runs, so that it is late and not gone."""
    assert seen["call"] == call
    assert [seen["missing"], seen["late"]] == ([[], [VICTIM]] if lives else [[VICTIM], []])
    assert seen["secs"] < TIMEOUT_SECS + SLACK_SECS


@pytest.mark.parametrize(
    ("place", "flagged_max_tokens", "call", "behind"),
    [
        ("before dispatch", LOW_LATENCY, "dispatch 0", ["counts", "flags"]),
        ("sending dispatch", LOW_LATENCY, "dispatch 0", []),
        ("waiting in dispatch", LOW_LATENCY, "combine 0", ["flags"]),
        ("waiting in dispatch", BULK, "dispatch 0", ["flags"]),
        ("before combine", BULK, "combine 0", ["flags"]),
        ("sending combine", LOW_LATENCY, "combine 0", []),
        ("waiting in combine", BULK, "dispatch 1", ["counts", "flags"]),
    ],
)
def test_a_killed_rank_is_named_and_what_is_left_closes(
    place: str, flagged_max_tokens: int, call: str, behind: list[str], tmp_path: Path
) -> None:
    """behind: the dead rank's flags that are seen at an earlier epoch; with none it was sending its rows."""
    case = case_of(flagged_max_tokens)
    with RankPool(3, timeout_secs=90, grace_secs=60) as pool:
        processes = pool.run(process_id)
        with pytest.raises(RankFailure) as caught:
            pool.run(fault_cases.killed, case, place, str(tmp_path))
    assert "exit code -9" in caught.value.tracebacks[VICTIM]
    assert sorted(caught.value.tracebacks) == [VICTIM], str(caught.value)
    for rank in SURVIVORS:
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        check_error(seen, call)
        assert seen["behind"] == behind
        assert seen["close_secs"] < LOCAL_SECS
        assert seen["files"] == []
    assert files_of(*processes) == []
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]


@pytest.mark.parametrize("fault", OUTSIDE_FAULTS)
def test_a_rank_killed_from_outside(fault: str, tmp_path: Path) -> None:
    """As on GPUs (tests/multigpu/test_faults.py)."""
    kill_and_look(OUTSIDE_FAULTS[fault], 3, "cpu", tmp_path)


@pytest.mark.parametrize(
    ("places", "flagged_max_tokens"),
    [
        (("sending dispatch", "waiting in dispatch", "before combine"), LOW_LATENCY),
        (("waiting in dispatch", "sending dispatch", "sending combine"), BULK),
        (("before dispatch", "before combine"), BULK),
    ],
)
def test_a_rank_that_stops_for_a_while_is_waited_for(
    ranks: Any, places: tuple[str, ...], flagged_max_tokens: int, tmp_path: Path
) -> None:
    ranks(fault_cases.stopped_for_a_while, 3, case_of(flagged_max_tokens), places, str(tmp_path))


@pytest.mark.parametrize(
    ("place", "flagged_max_tokens", "call"),
    [
        ("sending dispatch", LOW_LATENCY, "dispatch 0"),
        ("sending combine", BULK, "combine 0"),
        ("before combine", LOW_LATENCY, "combine 0"),
    ],
)
def test_a_rank_that_stops_for_long_is_called_late_by_all(
    ranks: Any, place: str, flagged_max_tokens: int, call: str, tmp_path: Path
) -> None:
    answers = ranks(fault_cases.stopped_for_long, 3, case_of(flagged_max_tokens), place, str(tmp_path))
    for rank, seen in enumerate(answers):
        check_error(seen, "any" if rank == VICTIM else call, lives=True)


def test_ranks_whose_own_kernels_are_done_are_told(ranks: Any) -> None:
    # the others live and had not begun the step
    assert ranks(fault_cases.told_of_a_failure, 3, case_of(LOW_LATENCY), TIMEOUT_SECS) == [[[], [0, 2]]] * 3


def test_an_exception_between_dispatch_and_combine(ranks: Any) -> None:
    for rank, seen in enumerate(ranks(fault_cases.raises_between, 3, case_of(LOW_LATENCY))):
        assert seen["close_secs"] < LOCAL_SECS
        if rank != VICTIM:
            check_error(seen, "combine 0", lives=True)


def test_a_rank_that_leaves_a_step_out(ranks: Any) -> None:
    case = case_of(LOW_LATENCY, with_weights=False, combine_weights=False)
    for rank, seen in enumerate(ranks(fault_cases.skips_a_step, 3, case)):
        if rank != VICTIM:
            check_error(seen, "step 3", lives=True)


@pytest.mark.parametrize(("kind", "number"), [("shared", 1), ("shared", 3), ("local", 1), ("local", 3)])
def test_no_memory_on_one_rank_is_an_error_on_all(ranks: Any, kind: str, number: int) -> None:
    for rank, seen in enumerate(ranks(fault_cases.no_memory, 3, case_of(LOW_LATENCY), kind, number)):
        assert seen["secs"] < SLACK_SECS
        if rank != VICTIM:
            assert f"rank {VICTIM} failed with HostMemoryError" in seen["text"]


def test_a_store_that_dies_is_an_error_at_once(tmp_path: Path) -> None:
    with RankPool(3, timeout_secs=60, grace_secs=30) as pool, pytest.raises(RankFailure) as caught:
        pool.run(fault_cases.store_dies, str(tmp_path))
    assert sorted(caught.value.tracebacks) == [VICTIM], str(caught.value)
    for rank in SURVIVORS:
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert max(seen.values()) < LOCAL_SECS
