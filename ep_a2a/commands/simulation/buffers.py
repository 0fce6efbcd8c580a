"""Computes the memory of an exchange between nodes on each GPU, by the number of crossings of a token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ep_a2a.commands.simulation.traffic import Copies

if TYPE_CHECKING:
    from ep_a2a.commands.simulation.cluster import Cluster
    from ep_a2a.commands.simulation.traffic import Shape

GATHER_CHUNKS = 4
"""Chunks whose rows come together at a GPU before they are added and cross: more than a hop of NVLink takes."""


def expert_rows_bytes(cluster: Cluster, shape: Shape) -> int:
    """Returns the bytes of the rows that experts read: at worst all tokens of all ranks."""
    return cluster.num_ranks * shape.num_tokens * shape.dispatch_record_bytes


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
