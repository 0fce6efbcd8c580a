"""Loads that a later store may overtake: each store is checked against the loads of what it overwrites.

The simulator performs a load at once. A GPU may perform it later, so a store to the same place must be ordered behind:

- The load of another program comes before the store if a release, an acquire and barriers lead from there to here. It
  also does if its launch had ended before a flag was posted that a launch before the store's has read.
- The load of the same program comes before the store if a barrier lies between, or a reduction over as many lanes as
  the program has threads. Each element is loaded and stored by threads of their own.
- A volatile load is checked only against stores of its own program, since it waits for those of others.
- Atomics of gpu scope are not checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.simulator.memory import Author

GROWTH = 1 << 16
BEFORE, PROGRAM, PHASE, TURN, SITE, IS_VOLATILE = range(6)
"""Columns of a record: the place's record before it, 0 for none; of the load: whose it is, when, and where."""


class Overtaken(AssertionError):
    """A store is not ordered behind a load of what it overwrites."""


class Reads:
    """The loads of each byte since it was stored last.

    Args:
        num_bytes: size of the pool.
    """

    def __init__(self, num_bytes: int) -> None:
        self._last = np.zeros(num_bytes, np.int32)
        self._records = np.zeros((6, GROWTH), np.int32)
        self._num_records = 1
        self._sites: dict[str, int] = {}

    def add(self, author: Author, places: np.ndarray, site: str, *, is_volatile: bool) -> None:
        """Note a load of places [elements, size]."""
        flat = np.unique(places)
        last = self._records[:, self._last[flat]]
        same = (last[PROGRAM] == author.number) & (last[TURN] == author.turn) & (last[IS_VOLATILE] == is_volatile)
        flat = flat[~same]
        first, end = self._num_records, self._num_records + len(flat)
        while end > self._records.shape[1]:
            self._records = np.concatenate([self._records, np.zeros_like(self._records)], axis=1)
        self._num_records = end
        site_number = self._sites.setdefault(site, len(self._sites))
        self._records[BEFORE, first:end] = self._last[flat]
        self._records[PROGRAM:, first:end] = np.array(
            [author.number, author.phase, author.turn, site_number, is_volatile], np.int32
        )[:, None]
        self._last[flat] = np.arange(first, end)

    def forget(self, places: np.ndarray) -> None:
        """Drop the loads of places that hosts have written: hosts wait for their launches and for each other."""
        self._last[places] = 0

    def check_store(self, author: Author, places: np.ndarray, site: str) -> None:
        """Check a store to places [elements, size].

        Raises:
            Overtaken: a load of one of them may not have been performed.
        """
        flat = places.ravel()
        at = self._last[flat]
        while at.any():
            loads = self._records[:, at[at > 0]]
            known = np.maximum(author.view.of(loads[PROGRAM]), author.performed.of(loads[PROGRAM]))
            is_own = loads[PROGRAM] == author.number
            is_late = np.where(is_own, loads[TURN] >= author.turn, (loads[PHASE] >= known) & (loads[IS_VOLATILE] == 0))
            if is_late.any():
                load = loads[:, is_late.argmax()]
                whose = "the same program" if load[PROGRAM] == author.number else f"program {load[PROGRAM]}"
                where = list(self._sites)[load[SITE]]
                text = f"the load at {where} of {whose} is not ordered before the store at {site}"
                raise Overtaken(text)
            at = self._records[BEFORE, at]
        self._last[flat] = 0
