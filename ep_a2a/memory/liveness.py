"""Liveness: which ranks live, and what they have agreed on about a failure, in one file per arena and host.

Nothing here needs the store of the process group or any other rank to answer: the kernel of the host says who has
ended, since it gives up their locks, and a beat says for how long a process has been stopped. Ranks of other hosts are
as their neighbours report them; see other_hosts.py.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ep_a2a.memory.host_shm import create_private, in_shared_memory, new_path, open_private, process_namespace
from ep_a2a.memory.other_hosts import SILENCE_SECS, OtherHosts, Report, Said, Seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ep_a2a.memory.rendezvous import Rendezvous

BEAT_SECS = 0.2
LOCK_PATIENCE_SECS = 1.0
"""Whoever holds the lock on verdicts does so for microseconds, unless it is stopped just then."""
NUM_FAILURES = 16
"""Failures whose verdicts are kept. Each op of an arena has one at most, until its reset."""
UNKNOWN_PROCESS = 0
"""What Linux says of a lock's holder that this namespace of processes does not have."""
FLOCK = "hhqqi4x"
"""struct flock of Linux: type, whence, start, length, holder."""


class Presence(enum.IntEnum):
    """The state of a rank's process, as another rank sees it."""

    UNSEEN = 0
    """It shares no memory with this rank, and nothing has been heard from its host."""
    RUNS = 1
    PAUSED = 2
    """It is stopped, for less than the time that was asked about."""
    STOPPED = 3
    ENDED = 4
    WAITS = 5
    """It runs, and waits for others on the host."""
    SILENT = 6
    """Nobody of its host has been heard for the time that was asked about."""


GONE = Presence.ENDED, Presence.STOPPED, Presence.SILENT


class Fate(enum.IntEnum):
    """A rank in the verdict on a failure."""

    FINE = 0
    ENDED = 1
    STOPPED = 2
    LATE = 3
    """Its process runs, and others wait for it."""
    UNSEEN = 4
    """It did not come, and nothing has ever been heard from its host."""
    SILENT = 5


class GivenUp(NamedTuple):
    """The statement of a rank that gives up a call.

    Attributes:
        lacked: the ranks that had not come to it here.
        began: whether this rank had sent anything of the call, so that it waited itself.
    """

    lacked: tuple[int, ...]
    began: bool


class Liveness:
    """A line for each rank of a group in a file that the ranks of one host share. Made by `meet`.

    Args:
        descriptor: of the file, on which this rank has its lock.
        rank, world_size: this rank's place in the group, whose ranks of other hosts leave their lines empty.

    Attributes:
        others: the ranks of other hosts; None where there are none, or where they cannot be reached.
    """

    others: OtherHosts | None = None

    def __init__(self, descriptor: int, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        lines, failures = _shapes(world_size)
        memory = mmap.mmap(descriptor, num_bytes(world_size))
        self._lines = np.frombuffer(memory, lines, world_size)
        self._failures = np.frombuffer(memory, failures, NUM_FAILURES, lines.itemsize * world_size)
        self._descriptor = descriptor
        self._num_failures = 0
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        line = self._lines[rank : rank + 1]
        line["pid"], line["started"], line["beat"] = os.getpid(), _started(os.getpid()), time.monotonic()
        line["namespace"], line["joined"] = process_namespace(), 1
        stopping = threading.Event()
        threading.Thread(target=_beat, args=(line, stopping), name="ep_a2a beats", daemon=True).start()
        self._finalizer = weakref.finalize(self, _leave, line, stopping, descriptor)
        # a process that ends has not left: its lock goes with it
        self._finalizer.atexit = False

    @classmethod
    def meet(cls, rendezvous: Rendezvous) -> Liveness | None:
        """Joins the file of the lowest rank whose file this rank can open. Collective. None where there is none."""
        size = num_bytes(rendezvous.world_size)
        path, descriptor = new_path(), None
        with contextlib.suppress(OSError):
            descriptor = create_private(path, size)
        try:
            names = rendezvous.exchange("files of liveness", path.name if descriptor is not None else "")
            joined, found = _open_first(names, path.name, descriptor, size)
            if descriptor is not None and found != descriptor:
                os.close(descriptor)
            liveness = None if found is None else cls(found, rendezvous.rank, rendezvous.world_size)
            hosts = rendezvous.exchange("joined the files of liveness", joined)
        finally:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        others = OtherHosts.meet(rendezvous, hosts, liveness.report if liveness is not None else None)
        if liveness is not None:
            liveness.others = others
        return liveness

    def presence(self, rank: int, stopped_secs: float) -> Presence:
        """Returns the state of a rank's process; one that has been stopped for `stopped_secs` is STOPPED.

        A process that is stopped beats no more. One that beats late and is not stopped is busy.
        """
        line = self._lines[rank]
        if not line["joined"]:
            return self._presence_elsewhere(rank, stopped_secs)
        awake = Presence.WAITS if line["waits"] else Presence.RUNS
        if rank == self.rank:
            return awake
        holder = self._holder(rank)
        if holder is None and line["left"]:
            # it has closed its arena; in another namespace of processes nothing more is seen of it
            runs = _started(int(line["pid"])) == line["started"] or line["namespace"] != process_namespace()
            return Presence.RUNS if runs else Presence.ENDED
        still_secs = time.monotonic() - line["beat"]
        if holder == UNKNOWN_PROCESS:
            # another namespace of processes hides it, and one that is stopped beats no more
            return _of_silence(still_secs, stopped_secs) or awake
        state = "X" if holder is None else _state_of(holder)
        if state in "ZX":
            return Presence.ENDED
        if state not in "Tt":
            return awake
        return Presence.STOPPED if still_secs >= stopped_secs else Presence.PAUSED

    def _presence_elsewhere(self, rank: int, stopped_secs: float) -> Presence:
        """The state of a rank of another host."""
        told = None if self.others is None else self.others.seen(rank)
        if told is None:
            return Presence.UNSEEN
        seen, silent_secs = told
        presence = Presence(seen.presence)
        if presence is not Presence.ENDED and (silence := _of_silence(silent_secs, stopped_secs)) is not None:
            return silence
        stopped = presence is Presence.PAUSED and seen.still_secs + silent_secs >= stopped_secs
        return Presence.STOPPED if stopped else presence

    def tell_apart(self, ranks: Sequence[int], stopped_secs: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of `ranks` that are gone, and those that live. A rank that cannot be seen is in neither."""
        seen = {rank: self.presence(rank, stopped_secs) for rank in ranks}
        gone = tuple(rank for rank in ranks if seen[rank] in GONE)
        return gone, tuple(rank for rank in ranks if rank not in gone and seen[rank] is not Presence.UNSEEN)

    def report(self) -> Report:
        """Returns what this rank tells the ranks of other hosts."""
        seen: dict[int, Seen] = {}
        for rank in np.flatnonzero(self._lines["joined"]).tolist():
            presence = self.presence(rank, float("inf"))
            seen[rank] = Seen(int(presence), max(0.0, time.monotonic() - float(self._lines[rank]["beat"])))
        said: list[Said] = []
        for line in self._failures["given_up"].reshape(-1, self.world_size):
            for rank in np.flatnonzero(line["failure"]).tolist():
                lacked = tuple(np.flatnonzero(line[rank]["lacked"]).tolist())
                said.append(Said(int(line[rank]["failure"]), rank, lacked, bool(line[rank]["began"])))
        verdicts = {
            int(entry["failure"]): tuple(entry["fates"].tolist()) for entry in self._failures if entry["failure"]
        }
        return Report(seen, tuple(said), verdicts)

    def is_first_host(self, ranks: Iterable[int]) -> bool:
        """Whether the lowest of these ranks is on this host, whose verdict the other hosts take."""
        return self.others is None or bool(self._lines[min(ranks)]["joined"])

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, this rank's host waits for other ranks, so that it cannot give up with them and is not late."""
        line = self._lines[self.rank : self.rank + 1]
        line["waits"] = 1
        try:
            yield
        finally:
            line["waits"] = 0

    def _holder(self, rank: int) -> int | None:
        """The process that has the lock of a rank, or UNKNOWN_PROCESS; None when nobody has it."""
        request = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, request))
        return None if kind == fcntl.F_UNLCK else max(pid, UNKNOWN_PROCESS)

    def new_failure(self) -> int:
        """A number for a failure that may come, equal on all ranks that ask in the same order."""
        self._num_failures += 1
        return self._num_failures

    def give_up(self, failure: int, lacked: Sequence[int], *, began: bool) -> None:
        """Says that this rank has given up a call; see GivenUp."""
        own = self._failures[failure % NUM_FAILURES : failure % NUM_FAILURES + 1]["given_up"][:, self.rank]
        own["lacked"], own["began"] = 0, began
        own["lacked"][0, list(lacked)] = 1
        own["failure"] = failure
        if began:
            self._lines[self.rank : self.rank + 1]["gave_up"] = time.monotonic()
        self.tell()

    def wait_no_more(self) -> None:
        """Says that this rank is in no call that it has given up, of whatever op."""
        self._lines[self.rank : self.rank + 1]["gave_up"] = 0.0

    def tell(self) -> None:
        """Tells other hosts at once what is known here."""
        if self.others is not None:
            self.others.speak()

    def gave_up_since(self, moment: float) -> tuple[int, ...]:
        """Ranks of this host that have waited in vain, in a step of whatever op, since a time.monotonic()."""
        return tuple(np.flatnonzero(self._lines["gave_up"] >= moment).tolist())

    def given_up(self, failure: int) -> dict[int, GivenUp]:
        """What the ranks have said that have given up."""
        lines = self._failures[failure % NUM_FAILURES]["given_up"]
        elsewhere = [] if self.others is None else self.others.said(failure)
        return {said.rank: GivenUp(said.lacked, said.began) for said in elsewhere} | {
            rank: GivenUp(tuple(np.flatnonzero(line["lacked"]).tolist()), bool(line["began"]))
            for rank, line in enumerate(lines)
            if line["failure"] == failure
        }

    def verdict(self, failure: int) -> tuple[Fate, ...] | None:
        """What the first rank to judge has found, by rank; None when none has. Another host's becomes this one's."""
        found = self._recorded(failure)
        if found is None and self.others is not None:
            heard = self.others.verdict(failure)
            found = None if heard is None else self.record(failure, tuple(map(Fate, heard)))
        return found

    def _recorded(self, failure: int) -> tuple[Fate, ...] | None:
        entry = self._failures[failure % NUM_FAILURES]
        return tuple(map(Fate, entry["fates"].tolist())) if entry["failure"] == failure else None

    def record(self, failure: int, fates: Sequence[Fate]) -> tuple[Fate, ...]:
        """Makes this the verdict unless there is one; returns the one that counts."""
        with self._locked():
            found = self._recorded(failure)
            if found is None:
                entry = self._failures[failure % NUM_FAILURES : failure % NUM_FAILURES + 1]
                entry["fates"] = fates
                entry["failure"] = failure
                found = tuple(fates)
        self.tell()
        return found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock on verdicts; goes on without it where its holder does not give it up."""
        deadline = time.monotonic() + LOCK_PATIENCE_SECS
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.world_size)
            except OSError:
                if time.monotonic() < deadline:
                    time.sleep(0.001)
                    continue
            break
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self.world_size)

    def close(self) -> None:
        """Leaves: others go on seeing this process as one that runs, while it does. Idempotent."""
        if self.others is not None:
            self.others.close()
        self._finalizer()


def _of_silence(silent_secs: float, stopped_secs: float) -> Presence | None:
    """The state of a rank that has not been heard for so long; None where that says nothing yet."""
    if silent_secs <= SILENCE_SECS:
        return None
    return Presence.SILENT if silent_secs >= stopped_secs else Presence.PAUSED


def num_bytes(world_size: int) -> int:
    """Bytes of the file of a group."""
    lines, failures = _shapes(world_size)
    return lines.itemsize * world_size + failures.itemsize * NUM_FAILURES


def _shapes(world_size: int) -> tuple[np.dtype[np.void], np.dtype[np.void]]:
    """A rank's line, and what is known of one failure."""
    words = ("joined", "left", "waits", "pid", "namespace", "started")
    line = np.dtype([*((word, "u8") for word in words), ("beat", "f8"), ("gave_up", "f8")])
    given_up = np.dtype([("failure", "u8"), ("began", "u1"), ("lacked", "u1", (world_size,))], align=True)
    failure = np.dtype(
        [("failure", "u8"), ("fates", "u1", (world_size,)), ("given_up", given_up, (world_size,))], align=True
    )
    return line, failure


def _open_first(names: Sequence[str], own: str, descriptor: int | None, size: int) -> tuple[str, int | None]:
    """The first file that can be opened here, and a descriptor; a second one of a file would give up its locks."""
    for name in names:
        if name and name == own:
            return name, descriptor
        with contextlib.suppress(OSError, RuntimeError):
            if name:
                return name, open_private(in_shared_memory(name), size)
    return own, None


def _beat(line: np.ndarray[tuple[int], np.dtype[np.void]], stopping: threading.Event) -> None:
    while not stopping.wait(BEAT_SECS):
        line["beat"] = time.monotonic()


def _leave(line: np.ndarray[tuple[int], np.dtype[np.void]], stopping: threading.Event, descriptor: int) -> None:
    stopping.set()
    if int(line["pid"][0]) == os.getpid():  # not a forked child
        line["left"] = 1
    os.close(descriptor)


def _stat_of(pid: int) -> list[str]:
    """Words of /proc/PID/stat behind the name, which may hold anything; none where there is no such process."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state_of(pid: int) -> str:
    """The letter of a process' state; "R" where nothing is known but that it has not ended."""
    return (_stat_of(pid) or ["R"])[0] if pid else "R"


def _started(pid: int) -> int:
    """When a process started, in ticks since the host did; 0 where there is none, or it is a zombie."""
    words = _stat_of(pid)
    return int(words[19]) if words and words[0] not in "ZX" else 0
