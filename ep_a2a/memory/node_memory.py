"""Arenas whose ranks reach each other's memory inside of a node only, and exchange blocks between nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ep_a2a.errors import EpA2AError
from ep_a2a.memory.arena import Arena, allocate_symmetric
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

    from ep_a2a.memory.node_grid import NodeGrid
    from ep_a2a.memory.node_transport import NodeTransport
    from ep_a2a.memory.symmetric import SymmetricMemory


class NodeArena(Arena):
    """An arena of all ranks, of which each maps the memory of its node; `between_nodes` moves blocks to other nodes.

    Making one is collective over the ranks of a node.

    Args:
        group: all ranks.
        grid: the nodes, and where this rank is.
        device: where the memory lies.
        between_nodes: of the same grid; closed with the arena.
    """

    def __init__(
        self, group: dist.ProcessGroup, grid: NodeGrid, device: torch.device, between_nodes: NodeTransport
    ) -> None:
        self._node = Rendezvous(make_subgroup(group, grid.node_ranks))
        self._grid = grid
        super().__init__(group, device, self._allocate_on_node)
        self.between_nodes = between_nodes

    def _allocate_on_node(self, everyone: Rendezvous, device: torch.device, num_bytes: int) -> SymmetricMemory:
        """Memory that the ranks of this node map; the addresses of others are 0. All nodes have it, or none."""
        memory: SymmetricMemory | None = None
        error: EpA2AError | None = None
        try:
            memory = allocate_symmetric(self._node, device, num_bytes)
        except EpA2AError as cause:
            error = cause
        try:
            everyone.agree("allocating memory of each node", error)
        except EpA2AError:
            if memory is not None:
                memory.close()
            raise
        assert memory is not None
        by_rank = dict(zip(self._grid.node_ranks, memory.peer_addresses, strict=True))
        addresses = tuple(by_rank.get(rank, 0) for rank in range(everyone.world_size))
        return replace(memory, peer_addresses=addresses, elements=tuple(range(everyone.world_size)))

    def close(self, *, alone: bool = False, also: Sequence[SymmetricMemory] = ()) -> None:
        """Gives all memory back, and the groups of the node and between nodes; see Arena.close."""
        if not self.closed:
            super().close(alone=alone, also=also)
            if self.between_nodes is not None:
                self.between_nodes.close()
            destroy_subgroup(self._node.group)
