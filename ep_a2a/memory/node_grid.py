"""NodeGrid: a group's ranks as a grid, with a row for each node and a column for each local rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ep_a2a.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from ep_a2a.topology import Topology

_REMEDY = "or use the allgather_reducescatter backend, which takes any topology."


@dataclass(frozen=True)
class NodeGrid:
    """The place of a rank among nodes of equally many ranks, numbered node by node.

    Attributes:
        num_nodes, gpus_per_node: size of the grid; the group has num_nodes * gpus_per_node ranks.
        node, local_rank: place of this rank, which is node * gpus_per_node + local_rank.
        node_ranks: ranks of the group on this node, by local rank.
        partners: ranks of the group with this local rank, by node: with these it exchanges across nodes.
    """

    num_nodes: int
    gpus_per_node: int
    node: int
    local_rank: int
    node_ranks: tuple[int, ...]
    partners: tuple[int, ...]

    @classmethod
    def of(cls, topology: Topology, rank: int) -> NodeGrid:
        """The grid as `rank` of the group sees it.

        Raises:
            UnsupportedError: nodes differ in their number of ranks, or their ranks are not contiguous.
            ConfigError: `rank` is not a rank of the group.
        """
        if not 0 <= rank < topology.world_size:
            raise ConfigError(f"a rank from 0 to {topology.world_size - 1}", str(rank), "Pass the rank in the group.")
        if topology.uneven:
            raise UnsupportedError(
                "nodes of equally many ranks", topology.reason, f"Start as many ranks on each node, {_REMEDY}"
            )
        if not topology.contiguous:
            raise UnsupportedError(
                "ranks numbered node by node", topology.reason, f"Number the ranks node by node, {_REMEDY}"
            )
        return cls.even(topology.num_nodes, topology.gpu_per_node, rank)

    @classmethod
    def even(cls, num_nodes: int, gpus_per_node: int, rank: int) -> NodeGrid:
        """The grid of nodes of this size as `rank` of the group sees it."""
        node, local_rank = divmod(rank, gpus_per_node)
        return cls(
            num_nodes,
            gpus_per_node,
            node,
            local_rank,
            node_ranks=tuple(range(node * gpus_per_node, (node + 1) * gpus_per_node)),
            partners=tuple(range(local_rank, num_nodes * gpus_per_node, gpus_per_node)),
        )
