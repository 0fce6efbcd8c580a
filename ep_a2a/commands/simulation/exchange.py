"""Simulates dispatch and combine between nodes, event by event, on one GPU of each node.

With a copy per node (InterNodeV1) a token crosses once, to the GPU of the same local rank, which pushes it on over
NVLink to the ranks of its node that need it; combine goes the same way back, and each node adds up its rows before one
row per token crosses. A node has room for `num_credits` chunks of each other GPU; a credit comes back when a chunk has
been worked off. With a copy per rank or per expert rows go straight to their destinations, without credits.

The model leaves out multiprocessors (they keep up with the wires), a GPU's own memory, the network behind the NICs (it
has no bottleneck), and skew between ranks at the start of a step.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from functools import partial
from typing import TYPE_CHECKING

from ep_a2a.commands.simulation.cluster import FINISH_US, NIC_LATENCY_US, NVLINK_HOP_US, START_US, Cluster
from ep_a2a.commands.simulation.traffic import Chunk, Copies, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES_PER_US_OF_GB_PER_S = 1e3
"""1 GB/s (1e9 bytes a second) is 1000 bytes in a microsecond."""
OWN_CHUNKS = 2
"""Chunks of a rank's own node that are on NVLink at once, so that they share it with what comes from other nodes."""


class Phase(enum.StrEnum):
    """Half of a round trip."""

    DISPATCH = "dispatch"
    COMBINE = "combine"


def simulate(cluster: Cluster, shape: Shape, copies: Copies, phase: Phase, chunks: list[list[list[Chunk]]]) -> float:
    """Returns microseconds until the last GPU is done.

    Args:
        cluster, shape, copies: the exchange.
        phase: dispatch or combine.
        chunks: of that cluster, shape and copies, as sample_chunks makes them.
    """
    row_bytes = shape.dispatch_record_bytes if phase is Phase.DISPATCH else shape.combine_row_bytes
    return _Exchange(cluster, chunks, row_bytes, phase is Phase.COMBINE, copies is Copies.NODE).run()


class _Exchange:
    """One exchange; goes_on: rows go on over NVLink in the other node, and chunks need credits."""

    def __init__(
        self, cluster: Cluster, chunks: list[list[list[Chunk]]], row_bytes: int, is_combine: bool, goes_on: bool
    ) -> None:
        self.cluster, self.chunks, self.row_bytes = cluster, chunks, row_bytes
        self.is_combine, self.goes_on = is_combine, goes_on
        self.clock, self.last_us = Clock(), 0.0
        nodes = range(cluster.num_nodes)
        self.nvlink = [Wire(cluster.nvlink_gb_per_s) for _ in nodes]
        self.nic_out = [Wire(cluster.nic_gb_per_s) for _ in nodes]
        self.nic_in = [Wire(cluster.nic_gb_per_s) for _ in nodes]

    def run(self) -> float:
        num_nodes = self.cluster.num_nodes
        for window in range(self.cluster.num_credits):
            # Nodes are served in turn, each rank beginning with the next node: no NIC is everybody's first.
            for distance in range(1, num_nodes):
                for node in range(num_nodes):
                    self.clock.at(START_US, partial(self.cross, node, (node + distance) % num_nodes, window))
        for node in range(num_nodes):
            for window in range(OWN_CHUNKS):
                self.clock.at(START_US, partial(self.stay, node, window))
        self.clock.run()
        return self.last_us + FINISH_US

    def stay(self, node: int, number: int) -> None:
        """Sends the rows for ranks of the own node; the chunk behind them follows."""
        chunks = self.chunks[node][node]
        if number < len(chunks):
            num_bytes = chunks[number].num_nvlink_rows * self.row_bytes
            _, end_us = self.nvlink[node].reserve(self.clock.now_us, num_bytes)
            self.clock.at(end_us + NVLINK_HOP_US, self.finish)
            self.clock.at(end_us, partial(self.stay, node, number + OWN_CHUNKS))

    def cross(self, node: int, other: int, number: int) -> None:
        """Sends a chunk that has a credit from node to other; the credit's next chunk follows when it is back."""
        # In combine rows return: node sends back the rows that `other` brought in dispatch.
        chunks = self.chunks[other][node] if self.is_combine else self.chunks[node][other]
        if number >= len(chunks):
            return
        nic_bytes = chunks[number].num_records * self.row_bytes
        nvlink_bytes = chunks[number].num_nvlink_rows * self.row_bytes
        put = partial(transfer, self.clock, self.nic_out[node], self.nic_in[other], nic_bytes, NIC_LATENCY_US)
        nvlink = self.nvlink[node if self.is_combine else other]
        hop = partial(transfer, self.clock, nvlink, None, nvlink_bytes, NVLINK_HOP_US)
        following = partial(self.cross, node, other, number + self.cluster.num_credits)

        def done() -> None:
            self.finish()
            self.clock.at(self.clock.now_us + NIC_LATENCY_US, following)

        if not self.goes_on:
            put(self.finish)
            self.clock.at(self.clock.now_us, following)
        elif self.is_combine:
            hop(partial(put, done))
        else:
            put(partial(hop, done))

    def finish(self) -> None:
        """Notes an arrival at its destination."""
        self.last_us = max(self.last_us, self.clock.now_us)


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
