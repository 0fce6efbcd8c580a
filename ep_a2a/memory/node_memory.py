"""NodeArena: memory that is mapped inside of each node, with a transport for blocks between nodes."""

from dataclasses import replace

import torch
import torch.distributed as dist

from ep_a2a.errors import EpA2AError
from ep_a2a.memory.arena import Arena, allocate_symmetric
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.node_transport import NodeTransport
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup
from ep_a2a.memory.symmetric import SymmetricMemory


class NodeArena(Arena):
    """An arena of all ranks, each of which maps the memory of its node only.

    Making one is collective over the ranks of a node.

    Args:
        group: all ranks.
        grid: the nodes, and this rank's place.
        device: where the memory lies.
        between_nodes: the transport of the same grid; closed with the arena.
        rendezvous: where all ranks meet; None makes a new one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        grid: NodeGrid,
        device: torch.device,
        between_nodes: NodeTransport,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self._node = Rendezvous(make_subgroup(group, grid.node_ranks))
        self._grid = grid
        super().__init__(group, device, self._allocate_on_node, rendezvous or Rendezvous(group))
        self.between_nodes = between_nodes

    def _allocate_on_node(self, everyone: Rendezvous, device: torch.device, num_bytes: int) -> SymmetricMemory:
        """Allocate memory that the ranks of this node map, on all nodes or on none. Other ranks have address 0."""
        made: list[SymmetricMemory] = []
        try:
            everyone.attempt("allocating memory of each node", lambda: made.append(self._on_node(device, num_bytes)))
        except EpA2AError:
            for memory in made:
                memory.close()
            raise
        memory = made[0]
        by_rank = dict(zip(self._grid.node_ranks, memory.peer_addresses, strict=True))
        addresses = tuple(by_rank.get(rank, 0) for rank in range(everyone.world_size))
        return replace(memory, peer_addresses=addresses, elements=())

    def _on_node(self, device: torch.device, num_bytes: int) -> SymmetricMemory:
        with self._node.telling():
            return allocate_symmetric(self._node, device, num_bytes)

    def close(self, *, alone: bool = False) -> None:
        """Give back all memory, the node's process group and the transport; `alone` is that of Arena.close."""
        if not self.closed:
            super().close(alone=alone)
            if self.between_nodes is not None:
                self.between_nodes.close()
            destroy_subgroup(self._node.group)
