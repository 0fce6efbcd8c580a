"""The verdict on a failed step: who is gone, who is late, and that nobody who waits is named; see ops/agreement.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ep_a2a.memory import host_shm, liveness
from ep_a2a.memory.liveness import UNKNOWN_PROCESS, Fate, GivenUp, Liveness, Presence
from ep_a2a.ops import agreement as agreement_module
from ep_a2a.ops.agreement import Agreement, Verdict, judge

RUNS, PAUSED, STOPPED, ENDED, UNSEEN = Presence.RUNS, Presence.PAUSED, Presence.STOPPED, Presence.ENDED, Presence.UNSEEN
BOUND_SECS = 0.6
PATIENCE_SECS = 10.0


def waited(*lacked: int) -> GivenUp:
    return GivenUp(lacked, began=True)


CAME_LATE = GivenUp((), began=False)
CASES = {
    "the lucky survivor lacks the other one, too": ((RUNS, RUNS, ENDED), {0: waited(2), 1: waited(0, 2)}, (2,), ()),
    "a survivor that is told to lack itself": ((RUNS, RUNS, ENDED), {0: waited(), 1: waited(0, 2)}, (2,), ()),
    "two have ended": ((RUNS, ENDED, RUNS, ENDED), {0: waited(1), 2: waited(0, 1, 3)}, (1, 3), ()),
    "one has ended, one is stopped": ((RUNS, ENDED, RUNS, STOPPED), {0: waited(1), 2: waited(3)}, (1, 3), ()),
    "all but one have ended": ((RUNS, ENDED, ENDED), {0: waited(1)}, (1, 2), ()),
    "one is late": ((RUNS, RUNS, RUNS), {0: waited(2), 1: waited(0, 2)}, (), (2,)),
    "one is late and comes meanwhile": ((RUNS, RUNS, RUNS), {0: waited(2), 1: waited(0, 2), 2: CAME_LATE}, (), (2,)),
    "two are late": ((RUNS, RUNS, RUNS), {0: waited(1, 2), 1: CAME_LATE}, (), (1, 2)),
    "one is gone, and a survivor slow": ((RUNS, RUNS, ENDED), {0: waited(1, 2)}, (2,), (1,)),
    "one is gone, and a survivor comes meanwhile": ((RUNS, RUNS, ENDED), {0: waited(1, 2), 1: CAME_LATE}, (2,), ()),
    "nobody lacks a rank that is silent": ((RUNS, RUNS, RUNS), {0: waited(2), 2: CAME_LATE}, (), (2,)),
    "a pause is no stop": ((RUNS, PAUSED, ENDED), {0: waited(2)}, (2,), ()),
    "another host's rank did not come": ((RUNS, RUNS, UNSEEN), {0: waited(2), 1: waited(2)}, (2,), ()),
    "another host's rank may wait for one here": ((RUNS, ENDED, UNSEEN), {0: waited(1, 2)}, (1,), ()),
    "a host waits for the late one": ((RUNS, Presence.WAITS, RUNS), {0: waited(1, 2)}, (), (2,)),
    "all have come by now": ((RUNS, RUNS), {0: waited(1), 1: waited(0)}, (), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_judge(name):
    seen, given_up, missing, late = CASES[name]
    verdict = Verdict(judge(dict(enumerate(seen)), given_up))
    assert (verdict.missing, verdict.late) == (missing, late)


class Meeting:
    """Stands for a Rendezvous of ranks in processes that inherit a file."""

    def __init__(self, rank: int, names: list[str]) -> None:
        self.rank, self.names, self.world_size = rank, names, 3

    def exchange(self, label: str, name: str) -> list[str]:
        return [self.names[0] or name, name, name]

    def barrier(self, label: str) -> None:
        pass


PEER = """
import sys, time
from tests.unit.test_agreement import Meeting
from ep_a2a.memory.liveness import GivenUp, Liveness
rank, name, does = int(sys.argv[1]), sys.argv[2], sys.argv[3]
there = Liveness.meet(Meeting(rank, [name]))
if does == "leaves":
    there.close()
if does == "gives up":
    there.give_up(1, (0, 2), began=True)
if does.startswith("gives up in another op"):
    there.give_up(2, (2,), began=True)
if does == "gives up in another op and resets":
    there.wait_no_more()
if does == "came late in another op":
    there.give_up(2, (), began=False)
print("joined", flush=True)
if does == "gives up after 3 s":
    time.sleep(3)
    there.give_up(1, (0, 2), began=True)
time.sleep(60)
"""


@pytest.fixture
def own(monkeypatch):
    """This process' view as rank 0; its file keeps its name for peers to join."""
    kept = []
    monkeypatch.setattr(type(host_shm.SHM_DIRECTORY), "unlink", lambda path, missing_ok=False: kept.append(path))
    own = Liveness.meet(Meeting(0, [""]))
    monkeypatch.undo()
    own.path = kept[0]
    yield own
    own.close()
    kept[0].unlink()


@pytest.fixture
def peer(own):
    """Starts a process that joins as a rank."""
    processes = []

    def start(rank: int, does: str = "stays") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PEER, str(rank), own.path.name, does]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "joined\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def patient(monkeypatch):
    """Verdicts whose patience is longer than this file's: one that waits it out is too late, a slow machine is not."""
    monkeypatch.setattr(agreement_module, "PATIENCE_SECS", 1.5 * PATIENCE_SECS)


def begun(own: Liveness) -> Agreement:
    """Rank 0's agreement on a first failure."""
    agreement = Agreement(own, 0, 3)
    agreement.begin_anew()
    return agreement


def becomes(own: Liveness, rank: int, presence: Presence, stopped_secs: float = BOUND_SECS) -> bool:
    deadline = time.monotonic() + PATIENCE_SECS
    while time.monotonic() < deadline:
        if own.presence(rank, stopped_secs) is presence:
            return True
        time.sleep(0.01)
    return False


def test_presence(own, peer):
    assert own.presence(0, 0.0) is RUNS
    assert own.presence(1, 0.0) is UNSEEN
    process = peer(1)
    assert own.presence(1, 0.0) is RUNS
    process.send_signal(signal.SIGSTOP)
    assert becomes(own, 1, PAUSED, 60.0)
    assert becomes(own, 1, STOPPED)
    process.send_signal(signal.SIGCONT)
    assert becomes(own, 1, RUNS, 60.0)
    process.kill()
    # seen before its parent has waited for it
    assert becomes(own, 1, ENDED)


def test_a_rank_in_another_namespace_of_processes_is_known_by_its_beats(own, peer, monkeypatch):
    process = peer(1)
    # what Linux says of the holder of a lock whose number this namespace does not have
    monkeypatch.setattr(own, "_holder", lambda rank: UNKNOWN_PROCESS)
    assert becomes(own, 1, RUNS, 60.0)
    process.send_signal(signal.SIGSTOP)
    assert becomes(own, 1, PAUSED, 60.0)
    assert becomes(own, 1, Presence.SILENT, 2.0)
    process.send_signal(signal.SIGCONT)
    assert becomes(own, 1, RUNS, 60.0)


def test_ranks_are_told_apart_for_a_meeting(own, peer):
    peer(1)
    assert own.tell_apart((0, 1, 2), 0.0) == ((), (0, 1))
    process = peer(2)
    process.kill()
    assert becomes(own, 2, ENDED)
    assert own.tell_apart((1, 2), 0.0) == ((2,), (1,))


def test_a_rank_that_has_left_runs_until_it_ends(own, peer):
    process = peer(1, "leaves")
    assert own.presence(1, 0.0) is RUNS
    process.kill()
    assert becomes(own, 1, ENDED)


@pytest.mark.usefixtures("patient")
def test_a_verdict_waits_for_those_who_may_give_up_and_counts_for_all(own, peer):
    peer(1, "gives up")
    peer(2).kill()
    assert becomes(own, 2, ENDED)
    agreement = begun(own)
    start = time.monotonic()
    verdict = agreement.verdict(GivenUp((), began=True), BOUND_SECS)
    assert time.monotonic() - start < PATIENCE_SECS
    assert (verdict.missing, verdict.late) == ((2,), ())
    assert str(verdict) == "rank 2 is gone (its process has ended)"
    assert own.record(1, (Fate.LATE,) * 3) == verdict == own.verdict(1)
    assert own.verdict(2) is None
    agreement.begin_anew()
    assert own.given_up(2) == {}


@pytest.mark.usefixtures("patient")
def test_a_stop_counts_once_it_has_lasted_for_the_bound(own, peer):
    peer(2, "gives up")
    peer(1).send_signal(signal.SIGSTOP)
    agreement = begun(own)
    start = time.monotonic()
    assert agreement.verdict(GivenUp((1,), began=True), 3.0).missing == (1,)
    end = time.monotonic()
    assert end - start < PATIENCE_SECS
    # a stop is counted from the last beat, which came before it or while it came
    assert end - own._lines[1]["beat"] >= 3.0


@pytest.mark.usefixtures("patient")
def test_a_rank_that_waits_in_another_op_is_not_late(own, peer):
    peer(2).kill()
    assert becomes(own, 2, ENDED)
    agreement = begun(own)
    peer(1, "gives up in another op")
    start = time.monotonic()
    # a rank that gave up within the last two bounds still waits
    verdict = agreement.verdict(GivenUp((1, 2), began=True), 60.0)
    assert time.monotonic() - start < PATIENCE_SECS
    assert (verdict.missing, verdict.late) == ((2,), ())


def test_a_rank_that_was_late_in_another_op_is_late_here(own, peer):
    peer(1, "came late in another op")
    verdict = begun(own).verdict(GivenUp((1,), began=True), BOUND_SECS)
    assert (verdict.missing, verdict.late) == ((), (1,))


def test_a_failure_before_its_bound_waits_for_those_who_wait_longer(own, peer):
    peer(2).kill()
    assert becomes(own, 2, ENDED)
    peer(1, "gives up after 3 s")
    agreement = begun(own)
    verdict = agreement.verdict(GivenUp((1, 2), began=True), BOUND_SECS, left_secs=30.0)
    assert (verdict.missing, verdict.late) == ((2,), ())


def test_whoever_stood_still_looks_again_before_it_judges(own, peer, monkeypatch):
    """What this rank saw before is older than its patience."""
    monkeypatch.setattr(agreement_module, "PATIENCE_SECS", 1.0)
    peer(2, "gives up")
    peer(1).kill()
    assert becomes(own, 1, ENDED)
    look, looks = own.presence, []

    def stand_still(rank: int, stopped_secs: float) -> Presence:
        looks.append(rank)
        if looks != [0, 1]:
            return look(rank, stopped_secs)
        time.sleep(1.5)
        return RUNS

    monkeypatch.setattr(own, "presence", stand_still)
    verdict = begun(own).verdict(GivenUp((1,), began=True), BOUND_SECS)
    assert (verdict.missing, verdict.late) == ((1,), ())


def test_whoever_stood_still_at_last_listens_before_it_judges(own, peer, monkeypatch):
    """What other hosts have said meanwhile is still to be read when this process wakes."""
    monkeypatch.setattr(agreement_module, "PATIENCE_SECS", 1.0)
    peer(2, "gives up")
    peer(1).kill()
    assert becomes(own, 1, ENDED)
    look, start, awake_since = own.presence, time.monotonic(), []

    def stand_still(rank: int, stopped_secs: float) -> Presence:
        if rank != 1:
            return look(rank, stopped_secs)
        if not awake_since and time.monotonic() - start > 0.9:
            time.sleep(2.0)
            awake_since.append(time.monotonic())
        is_heard = awake_since and time.monotonic() - awake_since[0] > 0.1
        return look(rank, stopped_secs) if is_heard else RUNS

    monkeypatch.setattr(own, "presence", stand_still)
    verdict = begun(own).verdict(GivenUp((1,), began=True), BOUND_SECS)
    assert (verdict.missing, verdict.late) == ((1,), ())


def test_a_rank_that_waited_in_vain_before_a_reset_is_late_behind_it(own, peer):
    agreement = begun(own)
    peer(1, "gives up in another op and resets")
    peer(2, "gives up")
    verdict = agreement.verdict(GivenUp((1,), began=True), 60.0)
    assert (verdict.missing, verdict.late) == ((), (1,))


def test_without_shared_memory_the_hint_is_all_there_is():
    agreement = Agreement(None, 0, 3)
    agreement.begin_anew()
    verdict = agreement.verdict(GivenUp((2,), began=True), 1.0)
    assert verdict.missing == (2,)
    assert "cannot be seen from here" in str(verdict)


def test_a_file_of_another_user_is_not_joined(own, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Exception, match="only user 12345"):
        liveness.open_private(own.path, 1)
