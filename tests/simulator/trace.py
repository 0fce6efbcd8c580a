"""The operations of a run, kept so that a failure can tell which of them led to it (explain.py)."""

import collections
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

MOST_ELEMENTS, ELEMENTS_OF_NONE = 1 << 22, 64
"""Elements of all operations that are kept, each of which takes as much memory as so many more. The oldest are dropped.
"""
HOST_WRITES = "host write"
FUNCTIONS: dict[str, str] = {}
"""The device function of each place "file:line" of a kernel's source."""


@dataclass(eq=False)
class Operation:
    """An access to memory.

    Attributes:
        number: place in the order of all operations of a run, from 1.
        rank: whose it is, -1 for hosts. task: the program, by a name.
        name: what it does. site: "file:line" of the kernel's source.
        places, size: byte offsets in the pool of its elements [elements], and their bytes.
        program, phase: of the memory's author.
        read, stored: bytes [elements, size] that it has returned, and that it has stored.
        landed_at: number of the last operation before its store has landed, None where it has not.
    """

    number: int
    rank: int
    task: str
    name: str
    site: str
    places: np.ndarray
    size: int
    program: int
    phase: int
    read: np.ndarray | None = None
    stored: np.ndarray | None = None
    landed_at: int | None = None

    @property
    def bytes(self) -> np.ndarray:
        """Byte offsets [elements, size] in the pool."""
        return self.places[:, None] + np.arange(self.size)


class Trace:
    """The last operations of a run.

    Attributes:
        operations: oldest first. num_operations: of the run.
        names: of places in the pool, by the byte offset at which each begins.
    """

    def __init__(self) -> None:
        self.operations: collections.deque[Operation] = collections.deque()
        self.num_operations = self._num_elements = 0
        self.names: dict[int, str] = {}

    def add(
        self, rank: int, task: str, name: str, site: str, places: np.ndarray, size: int, program: int, phase: int
    ) -> Operation:
        """Note an operation."""
        self.num_operations += 1
        operation = Operation(self.num_operations, rank, task, name, site, places, size, program, phase)
        self.operations.append(operation)
        self._num_elements += places.size + ELEMENTS_OF_NONE
        while self._num_elements > MOST_ELEMENTS:
            self._num_elements -= self.operations.popleft().places.size + ELEMENTS_OF_NONE
        return operation

    def add_host_write(self, places: np.ndarray, values: np.ndarray) -> None:
        """Note bytes [.] that hosts have written. They have landed."""
        operation = self.add(-1, "hosts", HOST_WRITES, "?", places, 1, 0, -1)
        operation.stored, operation.landed_at = values[:, None], operation.number

    def region_of(self, place: int) -> int:
        """Where the region of a place begins."""
        return max((each for each in self.names if each <= place), default=0)

    def name_of(self, place: int) -> str:
        """The region that begins at a place of the pool or before, and the words of four bytes from there."""
        start = self.region_of(place)
        words, rest = divmod(place - start, 4)
        return f"{self.names.get(start, 'pool')} word {words}" + (f" byte {rest}" if rest else "")

    def before(self, number: int) -> Iterator[Operation]:
        """The operations below a number, newest first."""
        return (each for each in reversed(self.operations) if each.number < number)
