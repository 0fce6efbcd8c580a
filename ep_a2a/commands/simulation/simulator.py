"""Simulates dispatch and combine between nodes, event by event, on one GPU of each node, for a sampled routing.

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
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ep_a2a.config import FP8_GROUP_SIZE
from ep_a2a.errors import ConfigError
from ep_a2a.routing import owner_of_experts

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_RANKS = 4096
"""More take minutes to sample."""
BITS_PER_BYTE = 8
START_US = 2.7
"""From the end of the kernel before until senders know where rows go. Measured: 1.0 between two launches and 1.7 in
dispatch, T = 128 (bench/results/2026-11-21_h200x2_round_trip.md)."""
NVLINK_HOP_US = 1.7
"""From a row's push until its receiver has it. Measured: 2.05 to 3.78 µs at T = 1 (same file)."""
FINISH_US = 0.3
"""From the last row to the end of the last program. Measured: 3.78 to 4.09 µs at T = 1 (same file)."""
NVLINK_GB_PER_S = 346.0
"""From one GPU to the others of its node, all pushing at once. Measured: 234.3 MB in the 677.4 µs that a round trip of
T = 4096 takes longer than one of T = 128, four H200s (bench/results/2026-11-21_h200x4_round_trip.md)."""
NIC_LATENCY_US = 8.35
"""From a put with a signal until the other GPU sees the signal. Published: half of a round trip of 16.7 µs with small
messages, GPU-initiated, H100 and ConnectX-7 (NCCL GIN, arXiv 2511.15076)."""
NIC_EFFICIENCY = 0.969
"""Payload's share of a NIC's rate. Published: 48.44 of 50 GB/s in transfers of 1 MiB (MORI, README, MORI-IO)."""
BYTES_PER_US = 1e3
"""Of 1 GB/s, 1e9 bytes a second."""
OWN_CHUNKS = 2
"""Chunks of a rank's own node that are on NVLink at once, so that they share it with what comes from other nodes."""
BFLOAT16_BYTES, SCALE_BYTES, ID_WEIGHT_BYTES, POSITION_BYTES = 2, 4, 8, 8


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs, each with a NIC of its own and NVLink to the GPUs of its node.

    Attributes:
        num_nodes, gpus_per_node: N and G; ranks are numbered node by node.
        nic_gbps: rate of a GPU's NIC in each direction, 1e9 bits per second.
        nvlink_gb_per_s: what a GPU pushes to the others of its node together, 1e9 bytes per second.
        chunk_tokens: tokens that cross to another node in one message.
        num_credits: chunks that may be on the way to one node, or wait there, per GPU.
    """

    num_nodes: int
    gpus_per_node: int = 8
    nic_gbps: float = 400.0
    nvlink_gb_per_s: float = NVLINK_GB_PER_S
    chunk_tokens: int = 64
    num_credits: int = 8

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node", "nic_gbps", "chunk_tokens", "num_credits"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError("above 0", str(getattr(self, name)), "Give a positive number.", field=name)

    @property
    def num_ranks(self) -> int:
        """W, GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    @property
    def nic_gb_per_s(self) -> float:
        """Payload of a NIC, 1e9 bytes per second."""
        return self.nic_gbps / BITS_PER_BYTE * NIC_EFFICIENCY


class Copies(enum.StrEnum):
    """Number of crossings of a token to another node: per node (then on by NVLink), per rank, or per expert."""

    NODE = "node"
    RANK = "rank"
    EXPERT = "expert"


@dataclass(frozen=True)
class Shape:
    """The tokens of a step.

    Attributes:
        num_tokens: T of each rank. hidden_dim: H. topk: K. num_experts: over all ranks.
        casts: whether dispatch sends fp8 with a float32 scale per 128 elements; else bf16, as combine always does.
        max_nodes: most nodes that a token's experts lie on (group-limited gating); 0 = no limit.
    """

    num_tokens: int
    hidden_dim: int = 7168
    topk: int = 8
    num_experts: int = 256
    casts: bool = True
    max_nodes: int = 0

    @property
    def dispatch_record_bytes(self) -> int:
        """Bytes of a row with its scales, ids, weights and source."""
        cast_bytes = self.hidden_dim + self.hidden_dim // FP8_GROUP_SIZE * SCALE_BYTES
        return (cast_bytes if self.casts else self.combine_row_bytes) + self.topk * ID_WEIGHT_BYTES + POSITION_BYTES

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of a row on the way back."""
        return self.hidden_dim * BFLOAT16_BYTES

    def placed_experts(self, num_ranks: int) -> int:
        """Experts with their copies: with more ranks than experts each has as many copies as it takes to fill them.

        A routing draws from copies as from experts.
        """
        return self.num_experts * math.ceil(num_ranks / self.num_experts)


class Chunk(NamedTuple):
    """Some of a rank's tokens on the way to one node.

    Attributes:
        num_records: rows that cross between the nodes.
        num_nvlink_rows: rows that go on by NVLink, for which the peer of the same local rank is not the destination.
    """

    num_records: int
    num_nvlink_rows: int


def sample_chunks(cluster: Cluster, shape: Shape, copies: Copies, seed: int = 0) -> list[list[list[Chunk]]]:
    """Returns chunks by source and destination node, of the first GPU of each node; the others are like it.

    Each token's experts are distinct and drawn uniformly, from the experts of `max_nodes` nodes where that limits them.
    """
    generator = torch.Generator().manual_seed(seed)
    return [_chunks_of(cluster, shape, copies, generator) for _ in range(cluster.num_nodes)]


def _chunks_of(cluster: Cluster, shape: Shape, copies: Copies, generator: torch.Generator) -> list[list[Chunk]]:
    counts = _slots_by_rank(cluster, shape, generator)
    if copies is not Copies.EXPERT:
        counts = (counts > 0).long()
    crossing = counts.sum(-1)
    on = crossing - counts[:, :, 0]
    if copies is Copies.NODE:
        crossing = (crossing > 0).long()
    # A token belongs to the chunk that its first row falls into.
    chunk_of = (crossing.cumsum(0) - crossing) // cluster.chunk_tokens
    records = torch.zeros(int(chunk_of.max()) + 1, cluster.num_nodes, dtype=torch.long)
    rows = records.scatter_add(0, chunk_of, on)
    records.scatter_add_(0, chunk_of, crossing)
    by_node = zip(records.T.tolist(), rows.T.tolist())
    return [[Chunk(*found) for found in zip(*columns) if found[0]] for columns in by_node]


def _slots_by_rank(cluster: Cluster, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """int64 `[T, N, G]`: how many of each token's experts each rank owns."""
    num_ranks, num_experts = cluster.num_ranks, shape.placed_experts(cluster.num_ranks)
    keys = torch.rand(shape.num_tokens, num_experts, generator=generator)
    owners = owner_of_experts(torch.arange(num_experts), num_experts, num_ranks).long()
    if 0 < shape.max_nodes < cluster.num_nodes:
        scores = torch.rand(shape.num_tokens, cluster.num_nodes, generator=generator)
        taken = torch.zeros_like(scores).scatter_(1, scores.topk(shape.max_nodes).indices, 1.0)
        keys += taken[:, owners // cluster.gpus_per_node]
    ids = keys.topk(shape.topk).indices
    counts = torch.zeros(shape.num_tokens, num_ranks, dtype=torch.long)
    counts.scatter_add_(1, owners[ids], torch.ones_like(ids))
    return counts.view(shape.num_tokens, cluster.num_nodes, cluster.gpus_per_node)


class Phase(enum.StrEnum):
    """Half of a round trip."""

    DISPATCH = "dispatch"
    COMBINE = "combine"


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
        self._bytes_per_us = gb_per_s * BYTES_PER_US
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


def simulate(cluster: Cluster, shape: Shape, copies: Copies, phase: Phase, chunks: list[list[list[Chunk]]]) -> float:
    """Returns microseconds until the last GPU is done.

    Args:
        cluster, shape, copies: the exchange.
        phase: dispatch or combine.
        chunks: of that cluster, shape and copies, as sample_chunks makes them.
    """
    is_combine = phase is Phase.COMBINE
    row_bytes = shape.combine_row_bytes if is_combine else shape.dispatch_record_bytes
    clock, nodes, last_us = Clock(), range(cluster.num_nodes), 0.0
    nvlink = [Wire(cluster.nvlink_gb_per_s) for _ in nodes]
    nic_out, nic_in = ([Wire(cluster.nic_gb_per_s) for _ in nodes] for _ in range(2))

    def finish() -> None:
        nonlocal last_us
        last_us = clock.now_us

    def stay(node: int, number: int) -> None:
        """Sends the rows for ranks of the own node; the chunk behind them follows."""
        if number < len(chunks[node][node]):
            _, end_us = nvlink[node].reserve(clock.now_us, chunks[node][node][number].num_nvlink_rows * row_bytes)
            clock.at(end_us + NVLINK_HOP_US, finish)
            clock.at(end_us, partial(stay, node, number + OWN_CHUNKS))

    def cross(node: int, other: int, number: int) -> None:
        """Sends a chunk that has a credit from node to other; the credit's next chunk follows when it is back."""
        # In combine rows return: node sends back the rows that `other` brought in dispatch.
        waiting = chunks[other][node] if is_combine else chunks[node][other]
        if number >= len(waiting):
            return
        records, rows = (count * row_bytes for count in waiting[number])
        put = partial(transfer, clock, nic_out[node], nic_in[other], records, NIC_LATENCY_US)
        hop = partial(transfer, clock, nvlink[node if is_combine else other], None, rows, NVLINK_HOP_US)
        following = partial(cross, node, other, number + cluster.num_credits)

        def done() -> None:
            finish()
            clock.at(clock.now_us + NIC_LATENCY_US, following)

        if copies is not Copies.NODE:
            put(finish)
            clock.at(clock.now_us, following)
        elif is_combine:
            hop(partial(put, done))
        else:
            put(partial(hop, done))

    # Nodes are served in turn, each rank beginning with the next node: no NIC is everybody's first.
    for window, distance, node in itertools.product(range(cluster.num_credits), nodes[1:], nodes):
        clock.at(START_US, partial(cross, node, (node + distance) % cluster.num_nodes, window))
    for node, window in itertools.product(nodes, range(OWN_CHUNKS)):
        clock.at(START_US, partial(stay, node, window))
    clock.run()
    return last_us + FINISH_US


class Prediction(NamedTuple):
    """The predicted cost of one exchange, for one sampled routing; nothing in it is measured.

    Attributes:
        dispatch_us, combine_us: until the last GPU is done.
        copies: rows of a token, those to its own node included. remote_copies: those that leave its node.
        nic_dispatch_bytes, nic_combine_bytes: what a GPU's NIC sends (and receives).
    """

    dispatch_us: float
    combine_us: float
    copies: float
    remote_copies: float
    nic_dispatch_bytes: int
    nic_combine_bytes: int


def predict(cluster: Cluster, shape: Shape, copies: Copies, seed: int = 0) -> Prediction:
    """Simulates dispatch and combine of one sampled routing.

    Raises:
        ConfigError: a token has more experts than there are, or there are too many ranks to sample.
    """
    if cluster.num_ranks > MAX_RANKS:
        raise ConfigError(f"at most {MAX_RANKS} GPUs", str(cluster.num_ranks), "Lower --nodes.")
    if shape.topk > shape.num_experts:
        raise ConfigError(f"of at most {shape.num_experts} experts", str(shape.topk), "Lower --topk.", field="topk")
    chunks = sample_chunks(cluster, shape, copies, seed)
    dispatch_us, combine_us = (simulate(cluster, shape, copies, phase, chunks) for phase in Phase)
    rows = [[sum(chunk.num_records for chunk in there) for there in source] for source in chunks]
    # of a GPU, on average
    sent = sum(map(sum, rows)) / cluster.num_nodes
    remote = sent - sum(there[node] for node, there in enumerate(rows)) / cluster.num_nodes
    nic_bytes = (round(remote * size) for size in (shape.dispatch_record_bytes, shape.combine_row_bytes))
    return Prediction(dispatch_us, combine_us, sent / shape.num_tokens, remote / shape.num_tokens, *nic_bytes)
