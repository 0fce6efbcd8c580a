"""The last operations of each rank, which a failure prints (explain.py)."""

import collections
from dataclasses import dataclass

import numpy as np

KEPT = 256
"""Operations of each rank."""


@dataclass(eq=False)
class Operation:
    """An access to memory.

    Attributes:
        number: place in the order of all operations of a run, from 1.
        rank: whose it is. task: the program, by a name.
        name: what it does. site: "file:line" of the kernel's source.
        places, size: byte offsets in the pool of its elements [elements], and their bytes.
        values: bytes [elements, size] that it has returned, or that it has stored.
    """

    number: int
    rank: int
    task: str
    name: str
    site: str
    places: np.ndarray
    size: int
    values: np.ndarray | None = None

    @property
    def bytes(self) -> np.ndarray:
        """Byte offsets [elements, size] in the pool."""
        return self.places[:, None] + np.arange(self.size)


class Trace:
    """The last operations of a run.

    Attributes:
        last: by rank, oldest first. names: of places in the pool, by the byte offset at which each begins.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._num_operations = 0
        self.last: dict[int, collections.deque[Operation]] = collections.defaultdict(
            lambda: collections.deque(maxlen=KEPT)
        )

    def add(self, rank: int, task: str, name: str, site: str, places: np.ndarray, size: int) -> Operation:
        """Note an operation."""
        self._num_operations += 1
        self.last[rank].append(Operation(self._num_operations, rank, task, name, site, places, size))
        return self.last[rank][-1]

    def name_of(self, place: int) -> str:
        """The region that begins at a place of the pool or before, and the words of four bytes from there."""
        start = max((each for each in self.names if each <= place), default=0)
        words, rest = divmod(place - start, 4)
        return f"{self.names.get(start, 'pool')} word {words}" + (f" byte {rest}" if rest else "")
