"""Peers: the ranks of a group as this process sees them: who lives, which calls they gave up, and the verdicts."""

import contextlib
import itertools
import json
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a import clock
from ep_a2a.errors import ForkedProcessError
from ep_a2a.memory.host_record import HostRecord, parsed
from ep_a2a.memory.verdict import GivenUp, Seen, Verdict, judge_trial

Result = TypeVar("Result")

BEAT_SECS = 0.05
"""How often a process looks at the locks of its peers."""
STOPPED_SECS = 0.5
"""A process that has not looked for longer was stopped, as a rule."""
HEART_SECS = 0.5
"""How often a rank tells other hosts that it lives."""
UNHEARD_SECS = 1.0
"""A rank of another host that says nothing for longer may be gone."""
TRIAL_SECS = 0.5
"""From a rank's first suspicion to its verdict who is masked: ranks that wait in one step suspect at about one time."""
SILENT_SECS = 30.0
"""A rank of another host that was heard, and has been silent for so long, is not waited for in a meeting."""
GRACE_SECS = 0.8
"""From the last death that is seen to the alarm, for two reasons. Ranks often die together, and all of them are to be
named. A rank that ends after its last step has sent its rows, and the others need time to end their steps."""
STORE_SECS = 2.0
"""Bound on an answer of the store, behind a link that may be cut."""


class Peers:
    """This rank's view of a group; `peers_of` makes one for each group of a process.

    A thread looks at the locks of the host's ranks. When one has fallen, and GRACE_SECS later, it calls `lose` of
    everything in `alarms`. Another thread tells ranks of other hosts that this one lives, by keys in the group's store.

    Args:
        rank, world_size: this rank's place in the group.
        store: of the group.

    Attributes:
        group_store: `store`, where the ranks meet.
        gone: ranks that are known to have ended, ascending.
        masked: ranks without which ops with on_rank_loss="mask" go on.
        alarms: arenas, held weakly. `lose` makes kernels leave, or go on without ranks; `awaited` says whom they await.
        arena_numbers: numbers of the group's arenas in the order in which they are made, equal on all ranks.
        host_record: the file that the ranks of this host share.
    """

    def __init__(self, rank: int, world_size: int, store: distributed_c10d.Store) -> None:
        self.rank, self.world_size, self.group_store = rank, world_size, store
        self.gone: tuple[int, ...] = ()
        self.alarms: weakref.WeakSet[Any] = weakref.WeakSet()
        self.arena_numbers = itertools.count(1)
        self._alarmed: tuple[int, ...] = ()
        self.masked: set[int] = set()
        self._num_trials, self._trial_over_at, self._watched_at = 0, math.inf, clock.now()
        self._fallen: dict[int, float] = {}
        self._joined: set[int] = {rank}
        self._given_up: dict[int, GivenUp] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._reading = threading.RLock()
        # a store that has ended says so here; a new connection would try for the store's time-out
        store.check(["ep_a2a"])
        # a connection of its own, since a thread that waits for a key occupies one
        self._store = distributed_c10d.PrefixStore("ep_a2a/peers", store.clone())  # type: ignore[attr-defined]
        self._heard: dict[int, tuple[bytes, float]] = dict.fromkeys(range(world_size), (b"", clock.now()))
        self._num_beats = 0
        self.host_record = HostRecord.join(self._store, rank, world_size)
        self.host_record.append({"joined": rank})
        # at once: a rank that dies soon has been heard
        self.beat()
        stopping = threading.Event()
        threads = [
            _start(self, stopping, "ep_a2a watches", BEAT_SECS, Peers.watch),
            _start(self, stopping, "ep_a2a beats", HEART_SECS, Peers.beat),
        ]
        self._finalizer = weakref.finalize(self, _leave, stopping, threads, self.host_record)

    # --- looking ---

    def look(self) -> tuple[int, ...]:
        """Reads what is new on this host, and returns the ranks that are gone."""
        with self._reading:
            for line in self.host_record.new_lines():
                # the store names the record, and strangers can write to the store: it may be another group's
                with contextlib.suppress(KeyError, ValueError, TypeError, OverflowError):
                    self._take(line)
            if len(self._joined) == self.world_size:
                self.host_record.unlink()
            for rank in self._joined - {self.rank} - self._fallen.keys():
                if self.host_record.has_ended(rank):
                    self._fallen[rank] = clock.now()
            if self._fallen and clock.now() >= max(self._fallen.values()) + self._grace_secs:
                self.gone = tuple(sorted(self._fallen))
            return self.gone

    def _take(self, line: dict[str, Any]) -> None:
        """Applies one line of the host's record; this rank's own lines come back, too."""
        if "joined" in line:
            self._joined.add(range(self.world_size).index(line["joined"]))
        elif "given_up" in line:
            failure, call, awaited, waited, at, is_meeting = line["given_up"]
            ranks = tuple(map(operator.index, awaited))
            found = GivenUp(str(failure), str(call), ranks, bool(waited), float(at), bool(is_meeting))
            self._given_up[range(self.world_size).index(line["rank"])] = found
        else:
            self._verdicts.setdefault(line["failure"], Verdict.from_json(line["verdict"]))

    @property
    def _grace_secs(self) -> float:
        """From the last death until it counts. A death on another host is heard two beats later."""
        return GRACE_SECS + 2 * HEART_SECS * (len(self._joined) < self.world_size)

    def settle(self) -> tuple[int, ...]:
        """Waits until deaths just noticed are confirmed, for a second or two at most; returns the dead ranks."""
        until = clock.now() + self._grace_secs + BEAT_SECS
        while not self.look() and clock.now() < until:
            clock.sleep(BEAT_SECS / 4)
        return self.gone

    def see(self, silent_secs: float = SILENT_SECS) -> Seen:
        """Returns what this rank sees of its group; a rank of another host is gone after `silent_secs` of silence."""
        self.look()
        record, local = self.host_record, frozenset(self._joined)
        given_up = {rank: each for rank, each in self._given_up.items() if each.failure}
        # who is stopped waits for nobody any more
        given_up |= {rank: each._replace(waited=False) for rank, each in given_up.items() if record.is_stopped(rank)}
        gone, unheard = self._gone(silent_secs), self._silent(UNHEARD_SECS) | self._fallen.keys()
        return Seen(self.world_size, gone, unheard - gone, given_up, local, frozenset(filter(record.waits, local)))

    def _gone(self, silent_secs: float) -> frozenset[int]:
        return self._silent(max(silent_secs, UNHEARD_SECS)) - self._fallen.keys() | {*self.gone}

    def _silent(self, secs: float) -> frozenset[int]:
        """Ranks of other hosts that have said nothing for so long."""
        heard = self._heard.items()
        return frozenset(rank for rank, (_, at) in heard if rank not in self._joined and clock.now() - at >= secs)

    def has_gone(self, rank: int) -> bool:
        """Whether a meeting stops waiting for a rank. A rank that was never seen may be slow to start."""
        return rank in self._gone(SILENT_SECS) and (rank in self._joined or bool(self._heard[rank][0]))

    def forgive(self) -> None:
        """Takes back the masks of ranks that live, when all ranks have met again."""
        with self._reading:
            self.masked &= self._fallen.keys()

    # --- telling ---

    def give_up(self, given_up: GivenUp) -> None:
        """Tells the ranks of this host that this one has given up a call."""
        self.host_record.append({"rank": self.rank, "given_up": given_up})

    def withdraw(self) -> None:
        """Takes back what this rank has given up, after ranks have met again."""
        if self._given_up.pop(self.rank, None) is not None:
            self.give_up(GivenUp("", "", (), waited=False, at=0.0))

    def verdict(self, failure: str) -> Verdict | None:
        """The verdict on a failure; None where nobody of this host has judged it.

        Args:
            failure: a key, equal on all ranks.
        """
        self.look()
        return self._verdicts.get(failure)

    def record(self, failure: str, verdict: Verdict) -> Verdict:
        """Makes this the verdict on a failure unless there is one; returns the one that counts.

        On several hosts the store keeps the first one, on one host the host's record.
        """
        if len(self._joined) < self.world_size:
            text = json.dumps(verdict)
            found = within(STORE_SECS, lambda: self._store.compare_set(f"verdict/{failure}", "", text))
            with contextlib.suppress(ValueError, TypeError):
                verdict = Verdict.from_json(parsed(found)) if found is not None else verdict
        self.host_record.append({"failure": failure, "verdict": verdict})
        return self.verdict(failure) or verdict

    def watch(self) -> bool:
        """Tells arenas which ranks have been lost since the last call. Returns whether to go on.

        Who has ended is masked without grace: what it sent before lies there.
        """
        with self._reading:
            self._watched_at, gone, known = clock.now(), self.look(), self.masked
            self.masked = masked = known | self._fallen.keys() | self._accused()
        if (gone, masked) != (self._alarmed, known):
            self._alarmed = gone
            for each in list(self.alarms):
                # a GPU that is lost has no kernels that wait; this thread goes on
                with contextlib.suppress(RuntimeError):
                    each.lose(gone, masked)
        return self.world_size > 1

    def catch_up(self) -> None:
        """Watches where the thread that does so has not for long: a process that was stopped may be masked by now."""
        if clock.now() > self._watched_at + STOPPED_SECS:
            self.watch()

    def _accused(self) -> set[int]:
        """Ranks that live, that others await for too long and that await nobody, by the first verdict on this host."""
        trial, now = f"masks {self._num_trials}", clock.now()
        # a rank that is masked itself has been away: what it awaits says nothing about the others
        arenas = [] if self.rank in self.masked else list(self.alarms)
        awaited = [ranks - self.masked for each in arenas for ranks in each.awaited()]
        suspects = tuple(sorted(set().union(*awaited)))
        found = self.verdict(trial)
        if found is None and (suspects or any(each.failure == trial for each in self._given_up.values())):
            self._trial_over_at = min(self._trial_over_at, now + TRIAL_SECS)
            # once is enough: on a busy host kernels that wait look less often than this
            if awaited:
                self.give_up(GivenUp(trial, "a step", suspects, waited=True, at=now))
        if found is None and now >= self._trial_over_at:
            spared = self.masked | self._fallen.keys()
            if all(each.device.type == "cpu" for each in list(self.alarms)):
                # interpreted kernels are slow beside a busy host; one that waits for a GPU may compute, too
                spared |= set(filter(self.host_record.computes, self._joined))
            found = self.record(trial, judge_trial(trial, self.see(), spared))
        if found is None:
            return set()
        self._num_trials, self._trial_over_at = self._num_trials + 1, math.inf
        return set(found.late)

    def beat(self) -> bool:
        """Tells other hosts that this rank lives, and listens to them. Returns whether there is another host."""
        elsewhere = [rank for rank in range(self.world_size) if rank not in self._joined]
        if not elsewhere:
            return False
        self._num_beats += 1
        try:
            self._store.set(f"beat/{self.rank}", json.dumps([self._num_beats, sorted(self._fallen)]))
            known = [rank for rank in elsewhere if self._heard[rank][0] or self._store.check([f"beat/{rank}"])]
            values = self._store.multi_get([f"beat/{rank}" for rank in known]) if known else []
        except RuntimeError:
            # the process of the store has ended: nobody can be heard any more
            return False
        for rank, value in zip(known, values, strict=True):
            if value != self._heard[rank][0]:
                self._heard[rank] = value, clock.now()
                self._hear(value)
        return True

    def _hear(self, value: bytes) -> None:
        """Keeps which ranks another host has seen end. Strangers can write to the store, so any text may come."""
        with contextlib.suppress(ValueError, TypeError), self._reading:
            _, gone = parsed(value)
            for rank in gone:
                if rank in range(self.world_size) and rank not in self._joined:
                    self._fallen.setdefault(rank, clock.now())


_peers: weakref.WeakKeyDictionary[dist.ProcessGroup, Peers] = weakref.WeakKeyDictionary()
_of_parent: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups that this process was forked with."""
os.register_at_fork(after_in_child=lambda: _of_parent.update(distributed_c10d._world.pg_map))


def peers_of(group: dist.ProcessGroup) -> Peers:
    """Returns this process's view of a group. The first call joins the host's ranks; it waits for nobody.

    Raises:
        ForkedProcessError: this is a forked child of the process that made the group.
    """
    if group in _of_parent:
        raise ForkedProcessError(
            f"the process group to be used by process {os.getppid()}, which made it", f"process {os.getpid()}"
        )
    found = _peers.get(group)
    if found is None:
        world_size = dist.get_world_size(group)
        # a rank that is alone meets nobody, and the store that it came by may have ended
        alone = world_size == 1
        store: distributed_c10d.Store = (
            dist.HashStore() if alone else distributed_c10d._get_process_group_store(group)  # type: ignore[attr-defined]
        )
        found = _peers[group] = Peers(dist.get_rank(group), world_size, store)
    return found


def begun(work: Callable[[], Result]) -> Future[Result]:
    """Begins `work` in a thread of its own, which is left behind where nobody can wait any longer."""
    found: Future[Result] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            found.set_exception(error)

    threading.Thread(target=run, name="ep_a2a asks", daemon=True).start()
    return found


def within(secs: float, work: Callable[[], Result]) -> Result | None:
    """Returns what `work` finds in the store; None where that has ended, or does not answer in time.

    A store behind a cut link ignores its own bound.
    """
    with contextlib.suppress(RuntimeError, TimeoutError):
        return begun(work).result(secs)
    return None


def _start(
    peers: Peers, stopping: threading.Event, name: str, period_secs: float, work: Callable[[Peers], bool]
) -> threading.Thread:
    """Starts a thread that repeats `work`, while it returns True and `peers` lives."""
    held = weakref.ref(peers)

    def repeat() -> None:
        while not stopping.wait(period_secs):
            found = held()
            if found is None or not work(found):
                break
            del found

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    return thread


def _leave(stopping: threading.Event, threads: list[threading.Thread], record: HostRecord) -> None:
    stopping.set()
    for thread in threads:
        # garbage collection may come in one of them, and a thread that Python ends in the store ends the process
        if thread is not threading.current_thread():
            thread.join(HEART_SECS)
    record.close()
