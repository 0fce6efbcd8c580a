"""Why a run has failed: the loads that missed a store on the way to a wrong value, and why they could."""

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tests.cases.op_cases import DifferentRows
from tests.simulator.memory import MixedScopes
from tests.simulator.ranks import POOL_BYTES, Simulation
from tests.simulator.reads import Overtaken
from tests.simulator.scheduler import Failure
from tests.simulator.trace import FUNCTIONS, HOST_WRITES, Operation, Trace

SHOWN_MISSES, SHOWN_LOADS, SHOWN_OPERATIONS = 2, 8, 8
"""Loads that missed a store, other loads, and operations of each rank, that a failure shows."""
NUMBER_BITS = 32
LANDS_LATE = " It lands by a release that covers it, or at the end of its launch."
READS_OLD = "The load may return any value that is not ordered away."
READS_OLD_AND_POLLS = "The load may return any value since its program has last paused."


@dataclass
class Miss:
    """A load that has returned an older value than that of the newest store before it.

    Attributes:
        load, store: the two. element: of the load. place: of the first byte that differs.
    """

    load: Operation
    store: Operation
    element: int
    place: int


class History:
    """What led to a value, from the operations up to a moment.

    Args:
        trace: of the run. until: number of the last operation that counts.
    """

    def __init__(self, trace: Trace, until: int) -> None:
        self.trace, self.until, self.cause_at = trace, until, until
        self.operations = [each for each in trace.operations if each.number <= until]
        self._by_number = {each.number: each for each in self.operations}

    @cached_property
    def _stored(self) -> tuple[np.ndarray, np.ndarray]:
        """Of all stored bytes: (place and number of the store, ascending; value)."""
        stores = [each for each in self.operations if each.stored is not None]
        keys = [((each.bytes << NUMBER_BITS) | each.number).ravel() for each in stores]
        values = [each.stored.ravel() for each in stores if each.stored is not None]
        all_keys = np.concatenate([np.zeros(0, np.int64), *keys])
        order = np.argsort(all_keys, kind="stable")
        return all_keys[order], np.concatenate([np.zeros(0, np.uint8), *values])[order]

    def last_stores(self, places: np.ndarray, before: int) -> tuple[np.ndarray, np.ndarray]:
        """(number, value) of the newest store to each byte before that operation; number 0 where there is none."""
        keys, values = self._stored
        if not len(keys):
            return np.zeros_like(places), np.zeros(places.shape, np.uint8)
        at = np.searchsorted(keys, (places << NUMBER_BITS) | before) - 1
        is_there = (at >= 0) & (keys[at] >> NUMBER_BITS == places)
        return np.where(is_there, keys[at] & ((1 << NUMBER_BITS) - 1), 0), values[at]

    def producer(self, place: int, value: int) -> Operation | None:
        """The newest store of that value to a byte, None where there is none."""
        before = self.until + 1
        while True:
            number, found = (int(each[0]) for each in self.last_stores(np.array([place]), before))
            if number == 0 or found == value:
                return self._by_number.get(number)
            before = number

    def miss_of(self, load: Operation) -> Miss | None:
        """What a load has missed, None for nothing."""
        assert load.read is not None
        numbers, values = self.last_stores(load.bytes, load.number)
        missed = ((numbers > 0) & (values != load.read)).any(1)
        if not missed.any():
            return None
        element = int(missed.argmax())
        byte = int(((numbers[element] > 0) & (values[element] != load.read[element])).argmax())
        return Miss(load, self._by_number[int(numbers[element, byte])], element, int(load.bytes[element, byte]))

    def loads(self, program: int, before: int) -> list[Operation]:
        """The last load of each place by a program before that operation, newest first."""
        found: dict[tuple[str, int, int], Operation] = {}
        for each in reversed(self.operations):
            if each.program == program and each.number < before and each.read is not None:
                found.setdefault((each.site, int(each.places[0]), each.places.size), each)
        return list(found.values())

    def misses(self, program: int, before: int) -> tuple[list[Miss], list[Operation]]:
        """The misses of a program, or of the nearest programs whose values it has read; the last is what it read."""
        programs, visited = [(program, before)], {program}
        first_loads = self.loads(program, before)
        while programs:
            loads = [load for each in programs for load in self.loads(*each)]
            found: dict[tuple[int, int], Miss] = {}
            for miss in map(self.miss_of, loads):
                if miss is not None:
                    found.setdefault((miss.store.number, miss.place), miss)
            if found:
                return list(found.values()), first_loads
            programs = []
            for load in loads:
                numbers = np.unique(self.last_stores(load.bytes, load.number)[0])
                for store in [self._by_number[number] for number in numbers.tolist() if number]:
                    if store.name != HOST_WRITES and store.program not in visited:
                        visited.add(store.program)
                        programs.append((store.program, store.number))
        return [], first_loads

    # --- words ---

    def misses_of(self, program: int, before: int) -> Iterator[str]:
        """What programs have missed on the way to an operation of one, in words."""
        found, loads = self.misses(program, before)
        self.cause_at = found[0].load.number if found else before
        for miss in found[:SHOWN_MISSES]:
            yield from self.words_of(miss)
        if not found:
            yield "No load on the way missed a store. The program had read, of memory that the simulator watches:"
            for load in loads[:SHOWN_LOADS]:
                yield f"  {self.line(load)}"
                yield f"    {self._stored_before(load)}"

    def _stored_before(self, load: Operation) -> str:
        """The store that a load has seen; where nobody has stored, the newest store to the region."""
        place = int(load.places[0])
        number = int(self.last_stores(np.array([place]), load.number)[0][0])
        if number and self._by_number[number].name != HOST_WRITES:
            return f"stored by {self.line(self._by_number[number], self._element(self._by_number[number], place))}"
        begin = self.trace.region_of(place)
        for each in self.trace.before(load.number):
            if (
                each.stored is not None
                and each.name != HOST_WRITES
                and self.trace.region_of(int(each.places[0])) == begin
            ):
                return f"no kernel had stored there; the newest store to this region is {self.line(each)}"
        return "no kernel had stored to this region"

    def words_of(self, miss: Miss) -> Iterator[str]:
        """A miss, and why it could be."""
        load, store = miss.load, miss.store
        yield f"The load {self.line(load, miss.element)}"
        yield f"  missed the store {self.line(store, self._element(store, miss.place))}"
        if store.landed_at is None or store.landed_at >= load.number:
            later = "did not until the failure" if store.landed_at is None else f"did at operation {store.landed_at}"
            yield f"  The store had not landed: it {later}.{LANDS_LATE if store.name == 'store' else ''}"
        else:
            yield f"  The store had landed at operation {store.landed_at}, and nothing orders it before the load."
            yield f"  {READS_OLD_AND_POLLS if load.name.startswith('volatile') else READS_OLD}"
        yield f"  Behind the store, its program {self._release(store)}."
        yield f"  Before the load, its program {self._acquire(load)}."

    def _release(self, store: Operation) -> str:
        behind = [each for each in self.operations if each.program == store.program and each.number > store.number]
        atomics = [each for each in behind if "atomic" in each.name]
        release = next((each for each in atomics if "release" in each.name), None)
        if release is None:
            return f"had no release{f', only {self.line(atomics[0])}' if atomics else ''}"
        barrier = "a barrier lies between" if release.phase > store.phase else "no barrier lies between"
        return f"had {self.line(release)}; {barrier}"

    def _acquire(self, load: Operation) -> str:
        atomics = [
            each
            for each in reversed(self.operations)
            if each.program == load.program and each.number < load.number and "atomic" in each.name
        ]
        acquire = next((each for each in atomics if "acquire" in each.name), None)
        if acquire is None:
            return f"had no acquire{f', only {self.line(atomics[0])}' if atomics else ''}"
        barrier = "a barrier lies between" if load.phase > acquire.phase else "no barrier lies between"
        return f"had {self.line(acquire)}; {barrier}"

    def line(self, operation: Operation, element: int = 0) -> str:
        """An operation in a line."""
        size, place = operation.size, int(operation.places[element]) if operation.places.size else 0
        values = [
            f"{word} {int.from_bytes(raw[element].tobytes(), 'little', signed=True)}"
            for word, raw in (("read", operation.read), ("stored", operation.stored))
            if raw is not None and len(raw)
        ]
        where = self.trace.name_of(place) + (f" ({operation.places.size} elements of {size} bytes)")
        site = f"{operation.site} {FUNCTIONS.get(operation.site, '')}".strip()
        return f"{operation.number}: {operation.task}: {operation.name} {where}, {', '.join(values)}, at {site}"

    def of_byte(self, place: int, value: int) -> Iterator[str]:
        """How a byte has come to its wrong value, in words."""
        if not 0 <= place < POOL_BYTES:
            return
        yield f"The first wrong element is {self.trace.name_of(place)}."
        store = self.producer(place, value)
        newest = self._by_number.get(int(self.last_stores(np.array([place]), self.until + 1)[0][0]))
        if newest is not None and newest is not store and newest.landed_at is None:
            yield f"  A store to it has not landed: {self.line(newest, self._element(newest, place))}"
        if store is None or store.name == HOST_WRITES:
            yield "  No kernel has stored its value."
            return
        yield f"  Its value comes from {self.line(store, self._element(store, place))}"
        yield from self.misses_of(store.program, store.number)

    def of_two(self, program: int, place: int) -> Iterator[str]:
        """The last operation, and the one before it of a program at the same place, in words."""
        last = self.operations[-1]
        yield f"The place is {self.trace.name_of(place)}. The operations:"
        for each in reversed(self.operations[:-1]):
            if each.program == program and (each.bytes == place).any():
                yield f"  {self.line(each, self._element(each, place))}"
                yield f"    Behind it, its program {self._release(each)}."
                break
        yield f"  {self.line(last, self._element(last, place))}"
        yield f"    Before it, its program {self._acquire(last)}."

    def first_in(self, function: str) -> Operation | None:
        """The first operation of a device function."""
        return next((each for each in self.operations if FUNCTIONS.get(each.site) == function), None)

    @staticmethod
    def _element(operation: Operation, place: int) -> int:
        return int((operation.bytes == place).any(1).argmax())

    def last_operations(self, ranks: list[int]) -> Iterator[str]:
        """Operations of each rank up to the cause."""
        for rank in ranks:
            last: dict[tuple[str, str, str, int], Operation] = {}
            repeats: collections.Counter[tuple[str, str, str, int]] = collections.Counter()
            for each in self.trace.before(self.cause_at + 1):
                if each.rank == rank and each.places.size:
                    key = each.task, each.name, each.site, int(each.places[0])
                    if len(last) == SHOWN_OPERATIONS and key not in last:
                        break
                    last.setdefault(key, each)
                    repeats[key] += 1
            yield f"rank {rank}, its last operations up to operation {self.cause_at}:"
            for key, each in reversed(last.items()):
                yield f"  {self.line(each)}" + (f", {repeats[key]} times" if repeats[key] > 1 else "")


def describe(simulation: Simulation) -> str:
    """Why the first task has failed, or where programs wait, and the last operations of each rank before the cause."""
    failures, trace = simulation.scheduler.failures, simulation.pool.trace
    history = History(trace, failures[0].number if failures else trace.num_operations)
    if failures:
        cause = list(cause_of(simulation, history, failures[0]))
    else:
        cause = [line for task in waiting(simulation) for line in task]
    ranks = sorted(simulation.scheduler.num_operations)
    return "\n".join([*cause, *history.last_operations(ranks)])


def cause_of(simulation: Simulation, history: History, failure: Failure) -> Iterator[str]:
    """Why a task has failed, as far as operations tell."""
    error = failure.error
    if isinstance(error, Overtaken | MixedScopes):
        yield from history.of_two(error.program, error.place)
        return
    if (failing := history.first_in("fail")) is not None:
        yield f"The first program that gave up is {failing.task}, at operation {failing.number}:"
        yield from history.misses_of(failing.program, failing.number)
        if history.misses(failing.program, failing.number)[0]:
            return
    if isinstance(error, DifferentRows):
        yield from history.of_byte(error.address - simulation.pool.address, error.value)


def waiting(simulation: Simulation) -> Iterator[list[str]]:
    """What each program that has not ended waits for."""
    history = History(simulation.pool.trace, simulation.pool.trace.num_operations)
    for task in simulation.scheduler.tasks:
        program = getattr(task.context, "program", None)
        if program is not None:
            end = history.until + 1
            yield [
                f"{task.name} {'polls' if task.has_polled else 'waits'}:",
                *history.misses_of(program.author.number, end),
            ]
