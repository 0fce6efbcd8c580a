"""Predicts an exchange between nodes: simulated times, expected traffic, buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.simulation.exchange import Phase, simulate
from ep_a2a.commands.simulation.traffic import Copies, expected_remote_copies, sample_chunks
from ep_a2a.errors import ConfigError

if TYPE_CHECKING:
    from ep_a2a.commands.simulation.cluster import Cluster
    from ep_a2a.commands.simulation.traffic import Shape

GATHER_CHUNKS = 4
"""Chunks whose rows come together at a GPU before they are added and cross: more than a hop of NVLink takes."""
MAX_RANKS = 4096
"""More take minutes to sample."""


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one exchange; nothing in it is measured.

    Attributes:
        cluster, shape, copies: the exchange.
        dispatch_us, combine_us: simulated, until the last GPU is done, for one sampled routing.
    """

    cluster: Cluster
    shape: Shape
    copies: Copies
    dispatch_us: float
    combine_us: float

    @cached_property
    def remote_copies(self) -> float:
        """Expected rows per token that leave its node, by exact formula."""
        return expected_remote_copies(self.cluster, self.shape, self.copies)

    @property
    def buffers(self) -> dict[str, int]:
        """Bytes on each GPU by name, without the rows that experts read."""
        return wire_buffers(self.cluster, self.shape, self.copies)

    @property
    def expert_rows_bytes(self) -> int:
        """Bytes of the rows that experts read: at worst all tokens of all ranks."""
        return self.cluster.num_ranks * self.shape.num_tokens * self.shape.dispatch_record_bytes

    @property
    def nic_dispatch_bytes(self) -> int:
        """Expected bytes that a GPU's NIC sends (and receives) in dispatch."""
        return round(self.remote_copies * self.shape.num_tokens * self.shape.dispatch_record_bytes)

    @property
    def nic_combine_bytes(self) -> int:
        """Expected bytes that a GPU's NIC sends (and receives) in combine."""
        return round(self.remote_copies * self.shape.num_tokens * self.shape.combine_row_bytes)

    @property
    def buffer_bytes(self) -> int:
        """Sum of `buffers`."""
        return sum(self.buffers.values())

    def as_json_object(self) -> dict[str, Any]:
        """Returns the fields for --json."""
        return {
            "predicted": True,
            "nodes": self.cluster.num_nodes,
            "gpus_per_node": self.cluster.gpus_per_node,
            "ranks": self.cluster.num_ranks,
            "nic_gbps": self.cluster.nic_gbps,
            "tokens": self.shape.num_tokens,
            "experts": self.shape.placed_experts(self.cluster.num_ranks),
            "copy_per": self.copies.value,
            "dispatch_us": round(self.dispatch_us, 2),
            "combine_us": round(self.combine_us, 2),
            "remote_copies_per_token": round(self.remote_copies, 4),
            "nic_dispatch_bytes": self.nic_dispatch_bytes,
            "nic_combine_bytes": self.nic_combine_bytes,
            "buffer_bytes": self.buffers | {"total": self.buffer_bytes},
            "expert_rows_bytes": self.expert_rows_bytes,
        }


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
    return Prediction(cluster, shape, copies, *(simulate(cluster, shape, copies, phase, chunks) for phase in Phase))


def wire_buffers(cluster: Cluster, shape: Shape, copies: Copies) -> dict[str, int]:
    """Returns the bytes of all other buffers, by name.

    A copy per node: tokens packed for the NIC; rings of `num_credits` chunks per other node, of dispatch on arrival and
    of combine on both sides; a pool of rows to add up; slots for the rows of the own node. Otherwise: packed tokens,
    and a slot for each row that can come back: of each token one per rank, as this package has it inside a node, or
    one per expert.
    """
    tokens, row_bytes = shape.num_tokens, shape.combine_row_bytes
    packed = {"packed_tokens": tokens * shape.dispatch_record_bytes}
    if copies is not Copies.NODE:
        most = cluster.num_ranks if copies is Copies.RANK else shape.topk
        return packed | {"combine_slots": most * tokens * row_bytes}
    chunks = min(cluster.num_credits, math.ceil(tokens / cluster.chunk_tokens))
    ring_rows = (cluster.num_nodes - 1) * chunks * cluster.chunk_tokens
    gathered_rows = GATHER_CHUNKS * cluster.chunk_tokens * cluster.gpus_per_node if ring_rows else 0
    return packed | {
        "dispatch_rings": ring_rows * shape.dispatch_record_bytes,
        "combine_rings": 2 * ring_rows * row_bytes,
        "combine_pool": gathered_rows * row_bytes,
        "combine_slots": cluster.gpus_per_node * tokens * row_bytes,
    }
