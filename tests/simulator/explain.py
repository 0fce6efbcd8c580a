"""Why a run has failed: the loads that missed a store on the way to a wrong value, and why they could."""

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

SHOWN_MISSES, SHOWN_OPERATIONS = 2, 8
"""Loads that missed a store, and operations of each rank, that a failure shows."""
NUMBER_BITS = 32


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

    def misses(self, program: int, before: int) -> list[Miss]:
        """The misses of a program, or of the nearest programs whose values it has read."""
        programs, visited = [(program, before)], {program}
        while programs:
            loads = [load for each in programs for load in self.loads(*each)]
            found: dict[tuple[int, int], Miss] = {}
            for miss in map(self.miss_of, loads):
                if miss is not None:
                    found.setdefault((miss.store.number, miss.place), miss)
            if found:
                return list(found.values())
            programs = []
            for load in loads:
                numbers = np.unique(self.last_stores(load.bytes, load.number)[0])
                for store in [self._by_number[number] for number in numbers.tolist() if number]:
                    if store.name != HOST_WRITES and store.program not in visited:
                        visited.add(store.program)
                        programs.append((store.program, store.number))
        return []

    # --- words ---

    def misses_of(self, program: int, before: int) -> Iterator[str]:
        """What programs have missed on the way to an operation of one, in words."""
        found = self.misses(program, before)
        self.cause_at = found[0].load.number if found else before
        for miss in found[:SHOWN_MISSES]:
            yield from self.words_of(miss)
        if not found:
            yield "No load on the way missed a store."

    def words_of(self, miss: Miss) -> Iterator[str]:
        """A miss, and why it could be."""
        load, store = miss.load, miss.store
        yield f"The load {self.line(load, miss.element)}"
        yield f"  missed the store {self.line(store, self._element(store, miss.place))}"
        if store.landed_at is None or store.landed_at >= load.number:
            later = "did not until the failure" if store.landed_at is None else f"did at operation {store.landed_at}"
            yield f"  The store had not landed: it {later}."
        else:
            yield f"  The store had landed at operation {store.landed_at}, and nothing orders it before the load."
        yield from self._order_of(store, load)

    def _order_of(self, first: Operation, last: Operation) -> Iterator[str]:
        """The release behind an operation, and the acquire before another one."""
        behind = [each for each in self.operations if each.program == first.program and each.number > first.number]
        before = [each for each in self.operations if each.program == last.program and each.number < last.number]
        for when, wanted, atomics in (
            ("Behind the store", "release", behind),
            ("Before the load", "acquire", reversed(before)),
        ):
            found = next((each for each in atomics if "atomic" in each.name and wanted in each.name), None)
            if found is None:
                yield f"  {when}, its program had no {wanted}."
            else:
                between = last.phase > found.phase if wanted == "acquire" else found.phase > first.phase
                yield f"  {when}, its program had {self.line(found)}; {'a' if between else 'no'} barrier lies between."

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
        if store is None or store.name == HOST_WRITES:
            yield "  No kernel has stored its value."
            return
        yield f"  Its value comes from {self.line(store, self._element(store, place))}"
        yield from self.misses_of(store.program, store.number)

    def of_two(self, program: int, place: int) -> Iterator[str]:
        """The last operation, and the one before it of a program at the same place, in words."""
        last = self.operations[-1]
        first = next(
            each for each in reversed(self.operations[:-1]) if each.program == program and (each.bytes == place).any()
        )
        yield f"The place is {self.trace.name_of(place)}. The operations:"
        yield f"  {self.line(first, self._element(first, place))}"
        yield f"  {self.line(last, self._element(last, place))}"
        yield from self._order_of(first, last)

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
            for each in self.trace.before(self.cause_at + 1):
                if each.rank == rank and each.places.size and len(last) < SHOWN_OPERATIONS:
                    last.setdefault((each.task, each.name, each.site, int(each.places[0])), each)
            yield f"rank {rank}, its last operations up to operation {self.cause_at}:"
            yield from (f"  {self.line(each)}" for each in reversed(last.values()))


def describe(simulation: Simulation) -> str:
    """Why the first task has failed, or where programs wait, and the last operations of each rank before the cause."""
    failures, trace = simulation.scheduler.failures, simulation.pool.trace
    history = History(trace, failures[0].number if failures else trace.num_operations)
    cause = cause_of(simulation, history, failures[0]) if failures else waiting(simulation, history)
    return "\n".join([*cause, *history.last_operations(sorted(simulation.scheduler.num_operations))])


def cause_of(simulation: Simulation, history: History, failure: Failure) -> Iterator[str]:
    """Why a task has failed, as far as operations tell."""
    error = failure.error
    if isinstance(error, Overtaken | MixedScopes):
        yield from history.of_two(error.program, error.place)
        return
    if (failing := history.first_in("fail")) is not None:
        yield f"The first program that gave up is {failing.task}, at operation {failing.number}:"
        yield from history.misses_of(failing.program, failing.number)
        if history.misses(failing.program, failing.number):
            return
    if isinstance(error, DifferentRows):
        yield from history.of_byte(error.address - simulation.pool.address, error.value)


def waiting(simulation: Simulation, history: History) -> Iterator[str]:
    """What each program that has not ended waits for."""
    for task in simulation.scheduler.tasks:
        program = getattr(task.context, "program", None)
        if program is not None:
            yield f"{task.name} {'polls' if task.has_polled else 'waits'}:"
            yield from history.misses_of(program.author.number, history.until + 1)
