"""Simulates time: actions in order of time, and wires that carry one transfer after another."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES_PER_US_OF_GB_PER_S = 1e3
"""1 GB/s (1e9 bytes a second) is 1000 bytes in a microsecond."""


class Clock:
    """Runs actions in order of time; those of one time in the order of their calls."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_us: float, action: Callable[[], None]) -> None:
        """Runs `action` at `time_us`, which is not before now."""
        heapq.heappush(self._waiting, (time_us, next(self._numbers), action))

    def run(self) -> None:
        """Runs until nothing is left to do."""
        while self._waiting:
            self.now_us, _, action = heapq.heappop(self._waiting)
            action()


class Wire:
    """One direction of a link; transfers go through whole, in the order in which they come."""

    def __init__(self, gb_per_s: float) -> None:
        self._bytes_per_us = gb_per_s * BYTES_PER_US_OF_GB_PER_S
        self._free_at_us = 0.0

    def reserve(self, now_us: float, num_bytes: float) -> tuple[float, float]:
        """Returns when a transfer that is ready now begins and ends."""
        begin_us = max(now_us, self._free_at_us)
        self._free_at_us = begin_us + num_bytes / self._bytes_per_us
        return begin_us, self._free_at_us


def transfer(
    clock: Clock, source: Wire, destination: Wire | None, num_bytes: float, latency_us: float, then: Callable[[], None]
) -> None:
    """Sends bytes from one wire into another and calls `then` when the last one has arrived.

    Their first byte enters `destination` when it has left `source` and latency_us are over, not behind the last one;
    there it may have to wait for other senders. None: nothing else arrives there at the same time.
    """
    begin_us, end_us = source.reserve(clock.now_us, num_bytes)
    if destination is None:
        clock.at(end_us + latency_us, then)
        return

    def arrive() -> None:
        _, arrived_us = destination.reserve(clock.now_us, num_bytes)
        clock.at(arrived_us, then)

    clock.at(begin_us + latency_us, arrive)
