"""Faults of real processes, on CPU; tests/simulator has deaths and stops at any operation."""

from pathlib import Path
from typing import Any

import pytest

from tests.cases import fault_cases
from tests.cases.fault_cases import LOW_LATENCY, SLACK_SECS, TIMEOUT_SECS, VICTIM, case_of, kill_and_look


@pytest.mark.parametrize("fault", ["combine", "replay"])
def test_a_rank_killed_from_outside(fault: str, tmp_path: Path) -> None:
    """The alarm of the hosts reaches kernels that wait; as on GPUs (tests/multigpu/test_faults.py)."""
    kill_and_look(fault, 3, "cpu", tmp_path)


def test_a_rank_that_stops_for_long_is_called_late_by_all(ranks: Any, tmp_path: Path) -> None:
    answers = ranks(fault_cases.stopped_for_long, 3, case_of(LOW_LATENCY), "combine", str(tmp_path))
    for rank, seen in enumerate(answers):
        assert seen["call"] == ("any" if rank == VICTIM else "combine 0")
        assert (seen["missing"], seen["late"]) == ([], [VICTIM])
        assert seen["secs"] < TIMEOUT_SECS + SLACK_SECS
