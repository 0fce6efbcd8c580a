"""Ranks that are killed or stopped, on two GPUs: the bodies of tests/multiprocess/test_faults.py."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ep_a2a.testing import RankContext
from tests.cases import fault_cases
from tests.cases.fault_cases import KILLS, LOW_LATENCY, SLACK_SECS, TIMEOUT_SECS, VICTIM, case_of, kill_and_look
from tests.cases.op_cases import Case, built_op, make_inputs, run_step
from tests.replay import CapturedStep

WORLD_SIZE = 2


@pytest.mark.parametrize("fault", KILLS)
def test_a_killed_rank_is_named_and_what_is_left_closes(fault: str, tmp_path: Path) -> None:
    kill_and_look(fault, WORLD_SIZE, "cuda", tmp_path)


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_rank_that_stops_for_long_is_called_late_by_all(ranks: Any, call: str, tmp_path: Path) -> None:
    case = case_of(LOW_LATENCY, WORLD_SIZE)
    answers = ranks(fault_cases.stopped_for_long, WORLD_SIZE, case, call, str(tmp_path))
    for rank, seen in enumerate(answers):
        assert (seen["missing"], seen["late"]) == ([], [VICTIM])
        assert seen["call"] == ("any" if rank == VICTIM else f"{call} 0")
        assert seen["secs"] < TIMEOUT_SECS + SLACK_SECS


def test_ranks_whose_own_kernels_are_done_are_told(ranks: Any) -> None:
    case = case_of(LOW_LATENCY, WORLD_SIZE)
    told = ranks(fault_cases.told_of_a_failure, WORLD_SIZE, case, TIMEOUT_SECS)
    assert told == [[[], [0]]] * WORLD_SIZE


def alarm_in_a_capture(context: RankContext, case: Case) -> None:
    """Another thread sounds the alarm while this one captures a graph: the capture ends, and the word is there."""
    with built_op(context, case) as op:
        run_step(case, op, 0, context.device)
        x, _, _, ids = make_inputs(case, 0, context.rank).on(context.device)

        def body(call: Callable[[Callable[[], None]], None]) -> None:
            rows, *_ = op.dispatch(x, None, None, ids)
            alarm = threading.Thread(target=op.arena.lose, args=((VICTIM,), {VICTIM}))
            alarm.start()
            alarm.join()
            op.combine(rows.clone(), None, ids)

        CapturedStep(op, body)
        failure = op.memory.poison.read()
        assert failure.accused == VICTIM
        op.reset()
        run_step(case, op, 1, context.device)


def test_an_alarm_does_not_break_a_capture(ranks: Any) -> None:
    case = case_of(LOW_LATENCY, WORLD_SIZE, with_weights=False, combine_weights=False)
    ranks(alarm_in_a_capture, WORLD_SIZE, case)
