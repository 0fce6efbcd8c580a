"""Faults of real processes and of memory, on CPU; tests/simulator has deaths and stops at any operation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import fault_cases
from tests.cases.fault_cases import LOW_LATENCY, SLACK_SECS, TIMEOUT_SECS, VICTIM, case_of, kill_and_look
from tests.cases.op_cases import with_options


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


@pytest.mark.parametrize("transport", ["", "peer_memory", "torch.distributed"])
def test_a_rank_that_is_stopped_where_it_waits_is_called_late_by_all(
    ranks: Any, tmp_path: Path, transport: str
) -> None:
    """In kernels, or on the host, where all that others know is that it waits."""
    case = case_of(LOW_LATENCY, 4)
    if transport:
        case = with_options(replace(case, num_nodes=2), internode_transport=transport)
    answers = ranks(fault_cases.stopped_for_long, 4, case, "", str(tmp_path))
    for rank, seen in enumerate(answers):
        assert (seen["missing"], seen["late"]) == ([], [VICTIM]), (rank, answers)


@pytest.mark.parametrize(("kind", "number"), [("shared", 1), ("shared", 3), ("local", 1), ("local", 3)])
def test_no_memory_on_one_rank_is_an_error_on_all(ranks: Any, kind: str, number: int) -> None:
    for rank, seen in enumerate(ranks(fault_cases.no_memory, 3, case_of(LOW_LATENCY), kind, number)):
        assert seen["secs"] < SLACK_SECS
        if rank != VICTIM:
            assert f"rank {VICTIM} failed with HostMemoryError" in seen["text"]
