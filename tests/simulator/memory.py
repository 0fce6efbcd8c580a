"""Weak memory of all ranks in one process, as far as the kernels use the PTX memory model.

A byte of the pool has the value that has landed, and a chain of records: who wrote it, and in which phase. A phase is
the part of a program between two barriers. A program knows a phase of another program when a release, an acquire and
barriers lead from there to here, or a launch has ended in between.

- A store is pending first. It lands when its launch ends, or when a release of system scope that covers it is made.
  A store past all caches (`.wt`) also lands by itself, in any order and at any time, whole or (`halves`) by halves.
- A plain load may return any value that is not older than the newest one it knows of.
- A volatile load may return any value that had not been replaced when its program last paused after a look in vain,
  or began. It returns nothing older than a volatile load of the same place did before, or than what it knows of.
- An atomic sees what has landed now, and lands at once.
- A store fails the run if a load of what it overwrites may come after it (reads.py). So do atomics of two ranks that
  meet at a place, unless both have the scope of the system or one is ordered behind the other.
- A release covers the phases of its program before its own, since each element is stored by a thread of its own.
- An acquire counts for the program from its next barrier on.
- An atomic, a release or an acquire of gpu scope means nothing to other ranks before its launch ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tests.simulator.reads import Reads
from tests.simulator.trace import Operation, Trace

GROWTH = 1 << 16
VIEW_GROWTH = 64


@dataclass(eq=False)
class Pending:
    """A store that has not landed.

    Attributes:
        places: byte offsets in the pool. values: the bytes.
        rank, program, phase: of the store. operation: of the trace.
        passes_caches: whether it lands by itself.
        seen_by_rank: the rank whose programs see it already, since it is an atomic of gpu scope; else None.
        behind: None, or what lands before it. released: what whoever acquires it knows; None for stores.
        value_now: makes its bytes when it lands, where they depend on what is there.
    """

    places: np.ndarray
    values: np.ndarray
    rank: int
    program: int
    phase: int
    operation: Operation
    passes_caches: bool = False
    seen_by_rank: int | None = None
    behind: Pending | None = None
    released: View | None = None
    value_now: Callable[[], np.ndarray] | None = None


@dataclass(eq=False)
class View:
    """The phases that a program, a launch or a released word knows.

    Attributes:
        known: by program, the first phase that is not known.
    """

    known: np.ndarray = field(default_factory=lambda: np.zeros(VIEW_GROWTH, np.int32))

    def of(self, programs: np.ndarray) -> np.ndarray:
        """By program of `programs`, the first phase that is not known."""
        self._reach(int(programs.max(initial=0)))
        return self.known[programs]

    def _reach(self, program: int) -> None:
        if program >= len(self.known):
            new = np.zeros((program // VIEW_GROWTH + 1) * VIEW_GROWTH - len(self.known), np.int32)
            self.known = np.concatenate([self.known, new])

    def learn(self, program: int, phase: int) -> None:
        """Know all phases of a program below `phase`."""
        self._reach(program)
        self.known[program] = max(self.known[program], phase)

    def join(self, other: View) -> None:
        """Know what another view knows, too."""
        self._reach(len(other.known) - 1)
        np.maximum(self.known[: len(other.known)], other.known, out=self.known[: len(other.known)])

    def copy(self) -> View:
        """A view of its own."""
        return View(self.known.copy())


@dataclass(eq=False)
class Author:
    """A program as the memory knows it.

    Attributes:
        number: unique among all programs of a run, > 0. rank: whose program it is.
        phase: barriers that it has passed. view: the phases that it knows.
        acquired: what it will know behind its next barrier.
        polled_at: the pool's moment when it last paused after a look in vain, or began.
        has_looked: whether it has made a volatile load since.
        seen: by place, the moment at which what a volatile load or an atomic has returned last had landed.
        performed: phases whose loads have been performed, as launches before its own have learnt from flags.
        posted: the same that this program has learnt, for later launches.
        turn: barriers, and reductions over all its threads, that it has passed.
    """

    number: int
    rank: int
    view: View
    phase: int = 0
    acquired: View | None = None
    polled_at: int = 0
    has_looked: bool = False
    seen: dict[int, int] = field(default_factory=dict)
    performed: View = field(default_factory=View)
    posted: View = field(default_factory=View)
    turn: int = 0

    def barrier(self) -> None:
        """Pass a barrier."""
        self.phase += 1
        self.turn += 1
        self.view.learn(self.number, self.phase)
        if self.acquired is not None:
            self.view.join(self.acquired)
            self.acquired = None


@dataclass(eq=False)
class Released:
    """A word that a release has written.

    Attributes:
        view: what whoever acquires it knows. rank, is_system: of the release, and whether its scope is the system.
    """

    view: View
    rank: int
    is_system: bool


class Atomic(NamedTuple):
    """The last atomic at a place: its program and phase, and whether its scope is the system."""

    program: int
    phase: int
    rank: int
    is_system: bool


class MixedScopes(AssertionError):
    """Atomics of two ranks meet that are not atomic for each other."""


class Pool:
    """The memory that ranks share or that their launches hand on.

    Args:
        num_bytes: size.
        draws: random choices. staleness: probability that a plain load goes one value further back.
        fresh_looks: the first volatile load behind a pause sees all that has landed.

    Attributes:
        moment: elements that have landed, each one counted whenever it does.
        num_changes: grows whenever a landed byte changes.
        pending: stores that have not landed, oldest first.
        trace: the last operations.
    """

    def __init__(self, num_bytes: int, draws: random.Random, staleness: float, fresh_looks: bool) -> None:
        backing = np.zeros(num_bytes + 256, np.uint8)
        start = -backing.ctypes.data % 256
        self.landed = backing[start : start + num_bytes]
        self.address = self.landed.ctypes.data
        self.draws, self.staleness, self.fresh_looks = draws, staleness, fresh_looks
        self.num_changes = 0
        self.pending: list[Pending] = []
        self._free = 0
        self.trace = Trace()
        self._last = np.zeros(num_bytes, np.int32)
        self._settled, self._mirror = np.zeros_like(self.landed), np.zeros_like(self.landed)
        self._reset_records()
        self._released: dict[int, Released] = {}
        self._posted: dict[int, View] = {}
        self._atomics: dict[int, Atomic] = {}
        self.reads = Reads(num_bytes)

    def _reset_records(self) -> None:
        self._num_records = self.moment = 1
        self._value, self._before = np.zeros(GROWTH, np.uint8), np.zeros(GROWTH, np.int32)
        self._program, self._phase = np.zeros(GROWTH, np.int32), np.full(GROWTH, -1, np.int32)
        self._moment, self._rank = np.zeros(GROWTH, np.int32), np.full(GROWTH, -1, np.int32)

    def take(self, num_bytes: int) -> np.ndarray:
        """Zeroed memory that nobody has had."""
        start, self._free = self._free, self._free + -(-num_bytes // 256) * 256
        if self._free > len(self.landed):
            raise MemoryError(f"a pool of more than {len(self.landed)} bytes")
        return self.landed[start : start + num_bytes]

    def has(self, addresses: np.ndarray) -> bool:
        """Whether an access is to this memory."""
        return bool(addresses.size) and self.address <= int(addresses.flat[0]) < self.address + len(self.landed)

    def absorb(self) -> None:
        """Take in what hosts have written, whose writes everybody knows: all ranks have met since, or will."""
        taken = slice(self._free)
        changed = np.flatnonzero(self.landed[taken] != self._mirror[taken])
        if changed.size:
            self.num_changes += 1
            self._settled[changed] = self._mirror[changed] = self.landed[changed]
            self._last[changed] = 0
            self.reads.forget(changed)

    # --- what programs do ---

    def load(self, author: Author, operation: Operation, *, is_strong: bool, is_checked: bool = True) -> np.ndarray:
        """Bytes [elements, size] of a load. With is_checked no later store may overtake it."""
        places = operation.bytes
        if is_checked:
            self.reads.add(author, places, operation.site, is_volatile=is_strong)
        values = self._at_some_time(author, places) if is_strong else self._maybe_old(author, places)
        self._add_pending(author, places, values)
        operation.values = values
        return values

    def _at_some_time(self, author: Author, places: np.ndarray) -> np.ndarray:
        """What a volatile load sees: nothing older than its program has seen, or had to see, by now."""
        since = author.polled_at
        moment = since if self.draws.random() < self.staleness else self.moment
        if self.fresh_looks and not author.has_looked:
            moment = self.moment
        author.has_looked = True
        records, firsts = self._last[places], places[:, 0].tolist()
        seen = np.array([author.seen.get(place, 0) for place in firsts], np.int32)[:, None]
        while True:
            later = (self._moment[records] >= moment) & (self._moment[records] > seen)
            later &= self._phase[records] >= author.view.of(self._program[records])
            if not later.any():
                break
            records = np.where(later, self._before[records], records)
        author.seen.update(zip(firsts, self._moment[records[:, 0]].tolist()))
        return np.where(records == 0, self._settled[places], self._value[records])

    def _add_pending(self, author: Author, places: np.ndarray, values: np.ndarray) -> None:
        """Put what a program sees of pending stores into values [elements, size]."""
        for store in self.pending:
            if store.seen_by_rank == author.rank or self._knows(author, store):
                self._overlay(store, places, values)

    @staticmethod
    def _knows(author: Author, store: Pending) -> bool:
        known = author.view.known
        return store.program < len(known) and store.phase < int(known[store.program])

    def _maybe_old(self, author: Author, places: np.ndarray, *, is_ours: bool = False) -> np.ndarray:
        """Values without what the author does not know of; with is_ours they have all that its rank has written."""
        records = self._last[places]
        while True:
            unknown = self._phase[records] >= author.view.of(self._program[records])
            if is_ours:
                unknown &= self._rank[records] != author.rank
            # an element moves as a whole, so its bytes go back together
            back = unknown.any(1)
            if self.staleness < 1.0:
                back &= np.array([self.draws.random() < self.staleness for _ in back], bool)
            if not back.any():
                break
            older = np.where(unknown & back[:, None], self._before[records], records)
            if (older == records).all():
                break
            records = older
        return np.where(records == 0, self._settled[places], self._value[records])

    @staticmethod
    def _overlay(store: Pending, places: np.ndarray, values: np.ndarray) -> None:
        flat, new = store.places.ravel(), store.values.ravel()
        if places.max(initial=-1) < flat.min() or places.min(initial=0) > flat.max():
            return
        order = np.argsort(flat, kind="stable")
        found = np.searchsorted(flat[order], places).clip(max=len(flat) - 1)
        hit = flat[order][found] == places
        values[hit] = new[order][found[hit]]

    def store(self, author: Author, operation: Operation, values: np.ndarray, *, passes_caches: bool) -> None:
        """A store of elements: pending from now on. Of equal addresses the last one counts."""
        places = operation.bytes
        raw = operation.values = np.ascontiguousarray(values).view(np.uint8).reshape(places.shape)
        self.reads.check_store(author, places, operation.site)
        self.pending.append(Pending(places, raw, author.rank, author.number, author.phase, operation, passes_caches))

    def system_atomic(
        self, author: Author, operation: Operation, work: Callable[[], Any], *, acquires: bool, releases: bool
    ) -> Any:
        """An atomic of system scope: `work` performs it on the landed bytes, and its result is returned."""
        places = operation.bytes
        for store in list(self.pending):
            # a thread's accesses to one place keep their order
            is_own = store.program == author.number or store.seen_by_rank == author.rank
            here = np.flatnonzero(np.isin(store.places, places).any(1))
            if releases and self._knows(author, store):
                self.land(store)
            elif is_own and here.size:
                self.land(store, here)
        result = work()
        changed = (self.landed[places] != self._mirror[places]).any(1)
        self.reads.check_store(author, places[changed], operation.site)
        self._write(places[changed], self.landed[places[changed]], author.rank, author.number, author.phase)
        author.seen.update(zip(places[:, 0].tolist(), self._moment[self._last[places[:, 0]]].tolist()))
        self._synchronize(author, places[:, 0].tolist(), acquires=acquires, releases=releases, system=True)
        return result

    def gpu_atomic(
        self, author: Author, operation: Operation, work: Callable[[np.ndarray], Any], *, acquires: bool, releases: bool
    ) -> Any:
        """An atomic of gpu scope: `work` performs it at other addresses, which hold what the rank's programs see."""
        firsts, copies = np.unique(operation.places, return_inverse=True)
        places = firsts[:, None] + np.arange(operation.size)
        # what other ranks have written may stay unseen
        values = self._maybe_old(author, places, is_ours=True)
        self._add_pending(author, places, values)
        before = values.copy()
        result = work(values.ctypes.data + copies.astype(np.uint64) * np.uint64(operation.size))
        changed = (values != before).any(1)
        if changed.any():
            self.num_changes += 1
            self.pending.append(
                Pending(
                    places[changed],
                    values[changed],
                    author.rank,
                    author.number,
                    author.phase,
                    operation,
                    seen_by_rank=author.rank,
                )
            )
        self._synchronize(author, places[:, 0].tolist(), acquires=acquires, releases=releases, system=False)
        return result

    def _synchronize(self, author: Author, places: list[int], *, acquires: bool, releases: bool, system: bool) -> None:
        for place in places:
            self._check_scopes(author, place, system=system)
            if system:
                posted = self._posted.setdefault(place, View())
                author.posted.join(posted)
                posted.join(author.performed)
            before = self._released.get(place)
            if acquires and before is not None and (before.rank == author.rank or (before.is_system and system)):
                author.acquired = author.acquired or View()
                author.acquired.join(before.view)
            if releases:
                view = author.view.copy()
                view.learn(author.number, author.phase)
                if before is not None:  # a chain of atomics carries on what the first one has released
                    view.join(before.view)
                self._released[place] = Released(view, author.rank, system)

    def _check_scopes(self, author: Author, place: int, *, system: bool) -> None:
        """Atomics of two ranks at one place need the scope of the system, or an order."""
        last = self._atomics.get(place)
        self._atomics[place] = Atomic(author.number, author.phase, author.rank, system)
        if last is None or last.rank == author.rank or (system and last.is_system):
            return
        program = np.array([last.program])
        if last.phase >= max(int(author.view.of(program)[0]), int(author.performed.of(program)[0])):
            where = self.trace.name_of(place)
            text = f"atomics of ranks {last.rank} and {author.rank} at {where}, one of gpu scope"
            raise MixedScopes(text)

    def land(self, store: Pending, elements: np.ndarray | None = None) -> None:
        """Let a pending store land, or some of its elements."""
        if store.behind in self.pending:
            self.land(store.behind)
        if store.value_now is not None:
            store.values = store.value_now()
        places, values = store.places, store.values
        rest = np.zeros(len(places), bool)
        if elements is not None:
            rest[:] = True
            rest[elements] = False
        if rest.any():
            store.places, store.values = places[rest], values[rest]
        else:
            self.pending.remove(store)
        self._land_elements(store, places[~rest], values[~rest])

    def _land_elements(self, store: Pending, places: np.ndarray, values: np.ndarray) -> None:
        if store.seen_by_rank is None:
            for place in places[:, 0].tolist():
                self._released.pop(place, None)
        if store.released is not None:
            self._released.update(
                (place, Released(store.released, store.rank, is_system=True)) for place in places[:, 0].tolist()
            )
        # of equal places in one store the last one counts
        last = len(places) - 1 - np.unique(places[::-1, 0], return_index=True)[1]
        self._write(places[last], values[last], store.rank, store.program, store.phase)

    def _write(self, places: np.ndarray, values: np.ndarray, rank: int, program: int, phase: int) -> None:
        """Elements [elements, size] land, one after the other."""
        num_elements, size = places.shape
        first, end = self._num_records, self._num_records + places.size
        while end > len(self._value):
            for name in ("_value", "_before", "_program", "_phase", "_moment", "_rank"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self._num_records = end
        self._value[first:end], self._before[first:end] = values.ravel(), self._last[places.ravel()]
        self._rank[first:end], self._program[first:end], self._phase[first:end] = rank, program, phase
        self._moment[first:end] = self.moment + np.repeat(np.arange(num_elements), size)
        self.moment += num_elements
        self._last[places.ravel()] = np.arange(first, end)
        if (self._mirror[places] != values).any():
            self.num_changes += 1
        self.landed[places] = self._mirror[places] = values

    def land_all_of(self, programs: set[int]) -> None:
        """Let all stores of programs land: their launch has ended."""
        for store in [p for p in self.pending if p.program in programs]:
            self.land(store)
