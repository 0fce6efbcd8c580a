"""Computes the traffic: expected numbers of copies by exact formulas, and sampled routings cut into chunks."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ep_a2a.config import FP8_GROUP_SIZE, num_owned_experts
from ep_a2a.errors import ConfigError
from ep_a2a.routing import owner_of_experts

if TYPE_CHECKING:
    from ep_a2a.commands.simulation.cluster import Cluster

ID_WEIGHT_BYTES = 8
POSITION_BYTES = 8
BFLOAT16_BYTES = 2
SCALE_BYTES = 4


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
    def dispatch_row_bytes(self) -> int:
        """Bytes of a row with its scales."""
        if not self.casts:
            return self.hidden_dim * BFLOAT16_BYTES
        return self.hidden_dim + self.hidden_dim // FP8_GROUP_SIZE * SCALE_BYTES

    @property
    def dispatch_record_bytes(self) -> int:
        """Bytes of a row with its scales, ids, weights and source."""
        return self.dispatch_row_bytes + self.topk * ID_WEIGHT_BYTES + POSITION_BYTES

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of a row on the way back."""
        return self.hidden_dim * BFLOAT16_BYTES

    def placed_experts(self, num_ranks: int) -> int:
        """Experts with their copies: with more ranks than experts each has as many copies as it takes to fill them.

        A routing draws from copies as from experts.
        """
        return self.num_experts * math.ceil(num_ranks / self.num_experts)


@dataclass(frozen=True)
class Chunk:
    """Some of a rank's tokens on the way to one node.

    Attributes:
        num_records: rows that cross between the nodes.
        num_nvlink_rows: rows that go on by NVLink, for which the peer of the same local rank is not the destination.
    """

    num_records: int
    num_nvlink_rows: int


def expected_distinct(num_experts: int, owned: list[int], topk: int) -> float:
    """Returns the exact expected number of owners that a token goes to, its topk distinct experts drawn uniformly.

    Args:
        num_experts: to draw from. owned: how many of them each owner has. topk: experts per token.
    """
    ways = math.comb(num_experts, topk)
    return sum(1 - math.comb(num_experts - count, topk) / ways for count in owned)


def expected_remote_copies(cluster: Cluster, shape: Shape, copies: Copies) -> float:
    """Returns the exact expected rows per token that leave its node, averaged over the nodes.

    Raises:
        ConfigError: shape limits nodes.
    """
    if shape.max_nodes:
        raise ConfigError("routing without a limit on nodes", f"max_nodes={shape.max_nodes}", "Sample it.")
    num_experts = shape.placed_experts(cluster.num_ranks)
    by_rank = [num_owned_experts(num_experts, cluster.num_ranks, rank) for rank in range(cluster.num_ranks)]
    size = cluster.gpus_per_node
    by_node = [sum(by_rank[first : first + size]) for first in range(0, cluster.num_ranks, size)]
    away = 1 - 1 / cluster.num_nodes
    if copies is Copies.EXPERT:
        return shape.topk * away
    return away * expected_distinct(num_experts, by_node if copies is Copies.NODE else by_rank, shape.topk)


def sample_chunks(cluster: Cluster, shape: Shape, copies: Copies, seed: int = 0) -> list[list[list[Chunk]]]:
    """Returns chunks by source and destination node, of the first GPU of each node; the others are like it.

    Each token's experts are distinct and drawn uniformly, from the experts of `max_nodes` nodes where that limits them.
    """
    generator = torch.Generator().manual_seed(seed)
    return [_chunks_of(cluster, shape, copies, generator) for _ in range(cluster.num_nodes)]


def _chunks_of(cluster: Cluster, shape: Shape, copies: Copies, generator: torch.Generator) -> list[list[Chunk]]:
    counts = _slots_by_rank(cluster, shape, generator)
    ranks = counts > 0
    to_peer = ranks[:, :, 0]
    per_node = ranks.sum(-1)
    if copies is Copies.NODE:
        crossing, on = (per_node > 0).long(), per_node - to_peer.long()
    else:
        crossing = per_node if copies is Copies.RANK else counts.sum(-1)
        # Inside a node rows for the sending rank itself stay where they are.
        on = crossing - (to_peer.long() if copies is Copies.RANK else counts[:, :, 0])
    # A token belongs to the chunk that its first row falls into.
    chunk_of = (crossing.cumsum(0) - crossing) // cluster.chunk_tokens
    num_chunks = int(chunk_of.max()) + 1
    records = torch.zeros(num_chunks, cluster.num_nodes, dtype=torch.long).scatter_add_(0, chunk_of, crossing)
    rows = torch.zeros_like(records).scatter_add_(0, chunk_of, on)
    return [
        [Chunk(*found) for found in zip(records[:, node].tolist(), rows[:, node].tolist()) if found[0]]
        for node in range(cluster.num_nodes)
    ]


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
