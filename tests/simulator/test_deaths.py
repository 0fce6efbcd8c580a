"""Ranks that die or stand still at any operation: the others name exactly those, within seconds, and go on."""

import pytest

from ep_a2a.memory.agreement import PATIENCE_SECS
from tests.simulator import faults
from tests.simulator.ranks import Conditions
from tests.simulator.scheduler import Fault
from tests.simulator.seeds import FIRST_SEED, seeds

NUM_SEEDS, NUM_QUICK_SEEDS = 12, 2
VICTIM, FAR_VICTIM = 1, 2
MEETING_SECS = 300.0
SLACK_SECS = 1.0


def with_fault(path: str, operation: int, secs: float | None = None, **conditions: float) -> faults.Run:
    return faults.Run(path, Conditions(num_sms=4, faults=(Fault(VICTIM, operation, secs),), **conditions))


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.full] * (seed >= FIRST_SEED + NUM_QUICK_SEEDS))
        for seed in seeds(NUM_SEEDS)
    ],
)
def test_survivors_name_exactly_those_that_are_gone(seed):
    assert faults.problems_of(faults.draw(seed)) == []


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.full), 4])
def test_a_death_before_the_first_step_is_named_at_once_wherever_it_comes(each):
    _, first = faults.whole_lives("bulk")[VICTIM]
    for operation in range(faults.JOINED, first["steps"], each):
        _, lives, errors = faults.simulated(with_fault("bulk", operation))
        assert errors == [None] * 3
        for rank in (0, 2):
            assert lives[rank].named == ((VICTIM,), ()), (operation, lives[rank].error)
            assert lives[rank].told_at < 1000.0 + faults.ON_HOST_SECS + SLACK_SECS, operation


@pytest.mark.parametrize("operation", range(1, faults.JOINED))
def test_a_death_before_others_know_of_the_rank_is_named_when_the_meeting_ends(operation):
    _, lives, _ = faults.simulated(with_fault("bulk", operation))
    for rank in (0, 2):
        assert lives[rank].named == ((VICTIM,), ())
        assert lives[rank].told_at < 1000.0 + MEETING_SECS + SLACK_SECS


def test_a_rank_that_stands_still_in_a_step_reads_what_the_others_read():
    _, first = faults.whole_lives("bulk")[VICTIM]
    # early in its second step, whose waits have the common bound; late in it others have all that they wait for
    run = with_fault("bulk", (3 * first["steps"] + 5 * first["reset"]) // 8, faults.LONG_STOP_SECS)
    simulation, lives, errors = faults.simulated(run)
    assert errors == [None] * 3
    assert [life.named for life in lives] == [((), (VICTIM,))] * 3
    assert all(life.went_on for life in lives)
    # at the bound, plus the time in which others may give up, too
    last = simulation.scheduler.struck[VICTIM] + faults.BOUND_SECS + PATIENCE_SECS + faults.POLLING_SECS
    assert lives[0].told_at < last < simulation.scheduler.struck[VICTIM] + faults.LONG_STOP_SECS


def test_a_rank_of_another_node_that_holds_up_a_chunk_is_named():
    """Rings of one chunk: then the others have no room for chunks of their own node either."""
    _, first = faults.whole_lives("rings_by_puts")[FAR_VICTIM]
    in_combine = Fault(FAR_VICTIM, first["reset"] - 300, faults.LONG_STOP_SECS)
    assert faults.problems_of(faults.Run("rings_by_puts", Conditions(num_sms=4, faults=(in_combine,)))) == []


@pytest.mark.parametrize(("operation", "missing"), [(1, ()), (faults.JOINED, ()), (40, (VICTIM,))])
def test_a_store_that_ends_with_its_process_is_an_error_of_all(operation, missing):
    """A rank that has not joined before the store ended knows nobody."""
    _, lives, errors = faults.simulated(with_fault("bulk", operation, store_holder=VICTIM))
    assert errors == [None] * 3
    for rank in (0, 2):
        assert "the store of the process group to answer" in str(lives[rank].error)
        assert lives[rank].named == (missing, ())
        assert lives[rank].told_at < 1000.0 + faults.ON_HOST_SECS + SLACK_SECS
        assert lives[rank].closed_at


@pytest.mark.parametrize(("phase", "secs"), [("reset", None), ("close", None), ("close", faults.LONG_STOP_SECS)])
def test_a_fault_in_the_last_meetings(phase, secs):
    num_operations, first = faults.whole_lives("bulk")[VICTIM]
    # the first operations of reset are its meeting, a step follows
    for operation in range(first[phase], min(first[phase] + 100, num_operations), 20):
        assert faults.problems_of(with_fault("bulk", operation, secs)) == [], operation
