"""NodeGrid: a group's ranks as a grid, with a row for each node and a column for each local rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ep_a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from ep_a2a.topology import Topology

_REMEDY = "or use the allgather_reducescatter backend, which takes any topology."


@dataclass(frozen=True)
class NodeGrid:
    """The place of a rank among nodes of equally many ranks, numbered node by node.

    Attributes:
        num_nodes, gpus_per_node: size of the grid; the group has num_nodes * gpus_per_node ranks.
        rank: this rank of the group.
    """

    num_nodes: int
    gpus_per_node: int
    rank: int

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.rank // self.gpus_per_node

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self.rank % self.gpus_per_node

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks of the group on this node, by local rank."""
        first = self.node * self.gpus_per_node
        return tuple(range(first, first + self.gpus_per_node))

    @property
    def partners(self) -> tuple[int, ...]:
        """Ranks of the group with this local rank, by node: with these it exchanges across nodes."""
        return tuple(range(self.local_rank, self.num_nodes * self.gpus_per_node, self.gpus_per_node))

    @classmethod
    def of(cls, topology: Topology, rank: int) -> NodeGrid:
        """The grid as `rank` of the group sees it.

        Raises:
            UnsupportedError: nodes differ in their number of ranks, or their ranks are not contiguous.
        """
        if topology.uneven:
            raise UnsupportedError(
                "nodes of equally many ranks", topology.reason, f"Start as many ranks on each node, {_REMEDY}"
            )
        if not topology.contiguous:
            raise UnsupportedError(
                "ranks numbered node by node", topology.reason, f"Number the ranks node by node, {_REMEDY}"
            )
        return cls(topology.num_nodes, topology.gpu_per_node, rank)
