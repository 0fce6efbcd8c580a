"""Which class serves an op's configuration on a topology, and what ops across nodes share."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ep_a2a.config import EpDispatchCombineKernelType
from ep_a2a.errors import EpA2AError
from ep_a2a.memory import nvshmem
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup
from ep_a2a.memory.transport_choice import choose_transport, make_rail, name_network_devices
from ep_a2a.ops.base import agree_on_config

if TYPE_CHECKING:
    import torch

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.rendezvous import Rendezvous
    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.ops.staged import InterNodeDispatchCombineOp
    from ep_a2a.topology import Topology

    NativeOp = EpDispatchCombineOp | InterNodeDispatchCombineOp

logger = logging.getLogger(__name__)


class Nodes:
    """What ops across nodes share: the rail between them, and an arena of the ranks of this one. Collective.

    Args:
        rendezvous: all ranks.
        grid: the nodes, and where this rank is.
        device: where tensors lie.
        timeout_secs: bound of a hop between nodes.
        reason: why there is a rail.
    """

    def __init__(
        self, rendezvous: Rendezvous, grid: NodeGrid, device: torch.device, timeout_secs: float, reason: str
    ) -> None:
        self._group = make_subgroup(rendezvous.group, grid.node_ranks)
        self.rail = make_rail(reason, rendezvous.group, grid, device, timeout_secs)
        self.arena = Arena(self._group, device)

    def close(self) -> None:
        """Gives everything back; to be called on every rank."""
        # the manager's own arena, which all ranks share, is where they meet
        self.arena.close(alone=True)
        self.rail.close()
        destroy_subgroup(self._group)


class OpFactory:
    """Makes the native ops of one arena. All methods are collective."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._nodes: dict[int, Nodes] = {}
        self._puts: Arena | None = None

    def make(self, config: EpDispatchCombineConfig, topology: Topology, index: int | None) -> NativeOp:
        """The op of a config: kernels that write to all ranks where they can, else a hop over a rail and one inside.

        Args:
            config: its kernel_type is IntraNode on one node, and one of the others on several. InterNode, the flat
                form, runs as InterNodeV1 where kernels cannot write to all nodes.
            topology: of the arena's ranks.
            index: as of EpDispatchCombineOp.

        Raises:
            UnsupportedError: nodes are of unlike sizes, or the rail is not to be had; see choose_transport.
        """
        # Triton is loaded when the first op is made, not when a manager is
        from ep_a2a.ops.op import EpDispatchCombineOp

        if not topology.internode:
            return EpDispatchCombineOp(config, arena=self.arena, index=index)
        config, grid, reason = self._agree_on_transport(config, topology, index)
        logger.info("%s through %s: %s", config.kernel_type.name, config.rail, reason)
        if config.rail != "torch.distributed":
            arena = self.arena if config.rail == "peer_memory" else self._put_arena()
            return EpDispatchCombineOp(config, arena=arena, index=index)
        from ep_a2a.ops.staged import InterNodeDispatchCombineOp

        nodes = self._nodes_of(grid, config.timeout, reason)
        index = nodes.arena.unshared_index() if index is None else index
        return InterNodeDispatchCombineOp(config, grid, nodes.rail, nodes.arena, self.arena.rendezvous, index)

    def _agree_on_transport(
        self, config: EpDispatchCombineConfig, topology: Topology, index: int | None
    ) -> tuple[EpDispatchCombineConfig, NodeGrid, str]:
        """The config with the transport that is used, where this rank stands, and why the transport was chosen.

        The environment may say something else on another rank, which would wait in a meeting of its own.
        """
        try:
            grid = NodeGrid.of(topology, self.arena.rendezvous.rank)
            transport, reason = choose_transport(config.rail, self._out_of_use(topology))
        except EpA2AError as error:
            agree_on_config(None, self.arena.rendezvous, index or 0, error)
            raise
        if transport != "peer_memory" and not config.uses_rings:
            config = replace(config, kernel_type=EpDispatchCombineKernelType.InterNodeV1)
        config = replace(config, rail=transport)
        agree_on_config(config, self.arena.rendezvous, index or 0)
        return config, grid, reason

    def _out_of_use(self, topology: Topology) -> dict[str, str]:
        """Transports that cannot serve these nodes, and why."""
        if topology.on_one_host:
            return {}
        found = {"peer_memory": "these are nodes of several hosts"}
        if self.arena.device.type == "cpu":
            found["nvshmem"] = "these are nodes of several hosts without GPUs"
        return found

    def _put_arena(self) -> Arena:
        """Memory that ranks of other nodes reach by puts; on CPU, where copies stand for them, that is all memory."""
        if self.arena.device.type == "cpu":
            return self.arena
        if self._puts is None:
            name_network_devices()
            self._puts = Arena(self.arena.group, self.arena.device, nvshmem.allocate_symmetric)
        return self._puts

    def _nodes_of(self, grid: NodeGrid, timeout_secs: float, reason: str) -> Nodes:
        if grid.num_nodes not in self._nodes:
            rendezvous, device = self.arena.rendezvous, self.arena.device
            self._nodes[grid.num_nodes] = Nodes(rendezvous, grid, device, timeout_secs, reason)
        return self._nodes[grid.num_nodes]

    @property
    def num_bytes(self) -> int:
        """Bytes of the arenas that are not the factory's own."""
        arenas = [nodes.arena for nodes in self._nodes.values()]
        return sum(arena.num_bytes for arena in (arenas if self._puts is None else [*arenas, self._puts]))

    def close(self) -> None:
        """Gives back what ops across nodes share, not the arena; to be called on every rank."""
        for nodes in self._nodes.values():
            nodes.close()
        self._nodes.clear()
        if self._puts is not None:
            # the manager's own arena, which all ranks share, is where they meet
            self._puts.close(alone=True)
