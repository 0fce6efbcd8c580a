"""Predicts dispatch and combine between nodes by arithmetic over a sampled routing; nothing in it is measured there.

With a copy per node (InterNodeV1) a token crosses once, to the GPU of the same local rank, which pushes it on over
NVLink to the ranks of its node that need it; combine goes the same way back, and each node adds up its rows before one
row per token crosses. With a copy per rank or per expert rows go straight to their destinations.

A phase takes its latencies and as long as its busiest wire is busy. Left out are multiprocessors (they keep up with the
wires), a GPU's own memory, the filling of the pipeline between NIC and NVLink (chunks are small), the network behind
the NICs (it has no bottleneck), and skew between ranks at the start of a step.
"""

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ep_a2a.config import FP8_GROUP_SIZE
from ep_a2a.errors import ConfigError
from ep_a2a.routing import owner_of_experts

MAX_RANKS = 4096
"""More take minutes to sample."""
BITS_PER_BYTE = 8
START_US = 2.7
"""From the end of the kernel before until senders know where rows go. Measured: 1.0 between two launches and 1.7 in
dispatch, T = 128 (2026-11-21_h200x2_round_trip, an older report of docs/results/index.md)."""
NVLINK_HOP_US = 1.7
"""From a row's push until its receiver has it. Measured: 2.05 to 3.78 µs at T = 1 (2026-11-21_h200x2_round_trip)."""
FINISH_US = 0.3
"""From the last row to the end of the last program. Measured: 3.78 to 4.09 µs at T = 1
(2026-11-21_h200x2_round_trip)."""
NVLINK_GB_PER_S = 346.0
"""From one GPU to the others of its node, all pushing at once. Measured: 234.3 MB in the 677.4 µs that a round trip of
T = 4096 takes longer than one of T = 128, four H200s (2026-11-21_h200x4_round_trip)."""
NIC_LATENCY_US = 8.35
"""From a put with a signal until the other GPU sees the signal. Published: half of a round trip of 16.7 µs with small
messages, GPU-initiated, H100 and ConnectX-7 (NCCL GIN, arXiv 2511.15076)."""
NIC_EFFICIENCY = 0.969
"""Payload's share of a NIC's rate. Published: 48.44 of 50 GB/s in transfers of 1 MiB (MORI, README, MORI-IO)."""
BYTES_PER_US = 1e3
"""Of 1 GB/s, 1e9 bytes a second."""
BFLOAT16_BYTES, SCALE_BYTES, ID_WEIGHT_BYTES, POSITION_BYTES = 2, 4, 8, 8


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs, each with a NIC of its own and NVLink to the GPUs of its node.

    Attributes:
        num_nodes, gpus_per_node: N and G; ranks are numbered node by node.
        nic_gbps: rate of a GPU's NIC in each direction, 1e9 bits per second.
        nvlink_gb_per_s: what a GPU pushes to the others of its node together, 1e9 bytes per second.
    """

    num_nodes: int
    gpus_per_node: int = 8
    nic_gbps: float = 400.0
    nvlink_gb_per_s: float = NVLINK_GB_PER_S

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node", "nic_gbps"):
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


class Traffic(NamedTuple):
    """Rows of the first GPU of each node, int64 `[N, N]` by source and destination node; other GPUs are like it.

    Attributes:
        crossing: rows to the node. onward: rows for ranks of the node whose local number is not the source's.
    """

    crossing: torch.Tensor
    onward: torch.Tensor


def sample_traffic(cluster: Cluster, shape: Shape, copies: Copies, seed: int = 0) -> Traffic:
    """Returns the rows of one routing.

    Each token's experts are distinct and drawn uniformly, from the experts of `max_nodes` nodes where that limits them.
    """
    generator = torch.Generator().manual_seed(seed)
    rows_of_sources = []
    for _ in range(cluster.num_nodes):
        slots = _slots_by_rank(cluster, shape, generator)
        rows = slots if copies is Copies.EXPERT else (slots > 0).long()
        by_node = rows.sum(-1)
        crossing = (by_node > 0).long() if copies is Copies.NODE else by_node
        rows_of_sources.append((crossing.sum(0), (by_node - rows[:, :, 0]).sum(0)))
    return Traffic(*map(torch.stack, zip(*rows_of_sources)))


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


def phase_us(cluster: Cluster, copies: Copies, traffic: Traffic, row_bytes: int) -> float:
    """Returns microseconds until the last GPU is done with rows of so many bytes.

    Combine sends back over each wire what dispatch has sent, so that direction does not matter.
    """
    own = traffic.onward.diagonal()
    remote = traffic.crossing - traffic.crossing.diagonal().diag()
    most_remote = int(torch.maximum(remote.sum(0), remote.sum(1)).max())
    nic_us = most_remote * row_bytes / cluster.nic_gb_per_s / BYTES_PER_US
    pushed = traffic.onward.sum(0) if copies is Copies.NODE else own
    nvlink_us = int(pushed.max()) * row_bytes / cluster.nvlink_gb_per_s / BYTES_PER_US
    across_us = 0.0
    if most_remote:
        last_us = max(nic_us, nvlink_us) + NVLINK_HOP_US if copies is Copies.NODE else nic_us
        across_us = NIC_LATENCY_US + last_us
    return START_US + max(nvlink_us + NVLINK_HOP_US, across_us) + FINISH_US


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
    """Predicts dispatch and combine of one sampled routing.

    Raises:
        ConfigError: a token has more experts than there are, or there are too many ranks to sample.
    """
    if cluster.num_ranks > MAX_RANKS:
        raise ConfigError(f"at most {MAX_RANKS} GPUs", str(cluster.num_ranks), "Lower --nodes.")
    if shape.topk > shape.num_experts:
        raise ConfigError(f"of at most {shape.num_experts} experts", str(shape.topk), "Lower --topk.", field="topk")
    traffic = sample_traffic(cluster, shape, copies, seed)
    sizes = (shape.dispatch_record_bytes, shape.combine_row_bytes)
    dispatch_us, combine_us = (phase_us(cluster, copies, traffic, row_bytes) for row_bytes in sizes)
    # of a GPU, on average
    sent = int(traffic.crossing.sum()) / cluster.num_nodes
    remote = sent - int(traffic.crossing.diagonal().sum()) / cluster.num_nodes
    nic_bytes = (round(remote * row_bytes) for row_bytes in sizes)
    return Prediction(dispatch_us, combine_us, sent / shape.num_tokens, remote / shape.num_tokens, *nic_bytes)
