"""Chooses an op's transport and arena by its config and the topology; owns the arenas of ops across nodes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ep_a2a.config import EpDispatchCombineKernelType
from ep_a2a.errors import EpA2AError
from ep_a2a.kernels.ring_shape import BY_PUTS
from ep_a2a.memory import nvshmem
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.node_memory import NodeArena
from ep_a2a.memory.transport_choice import choose_transport, make_transport, name_network_devices
from ep_a2a.ops.base import agree_on_config

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.topology import Topology


logger = logging.getLogger(__name__)


class OpFactory:
    """Makes the native ops of one arena. All methods are collective."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._nodes: dict[tuple[str, int], NodeArena] = {}
        self._puts: Arena | None = None

    def make(self, config: EpDispatchCombineConfig, topology: Topology, index: int | None) -> EpDispatchCombineOp:
        """The op of a config, over the transport that it names or that suits the topology.

        Args:
            config: its kernel_type is IntraNode on one node, and one of the others on several. InterNode, the flat
                form, runs as InterNodeV1 where kernels cannot write to all nodes.
            topology: of the arena's ranks.
            index: as of EpDispatchCombineOp.

        Raises:
            UnsupportedError: nodes are of unlike sizes, or the transport is not to be had; see choose_transport.
        """
        # Triton is loaded when the first op is made, not when a manager is
        from ep_a2a.ops.op import EpDispatchCombineOp

        if not topology.internode:
            return EpDispatchCombineOp(config, arena=self.arena, index=index)
        config, grid, reason = self._agree_on_transport(config, topology, index)
        logger.info("%s through %s: %s", config.kernel_type.name, config.internode_transport, reason)
        arena = self.arena
        if config.internode_transport == BY_PUTS:
            arena = self._put_arena()
        elif config.is_staged:
            arena = self._node_arena(config.internode_transport, grid, config.timeout, reason)
        return EpDispatchCombineOp(config, arena=arena, index=index)

    def _agree_on_transport(
        self, config: EpDispatchCombineConfig, topology: Topology, index: int | None
    ) -> tuple[EpDispatchCombineConfig, NodeGrid, str]:
        """The config with the transport that is used, where this rank stands, and why the transport was chosen.

        The environment may say something else on another rank, which would wait in a meeting of its own.
        """
        try:
            grid = NodeGrid.of(topology, self.arena.rendezvous.rank)
            transport, reason = choose_transport(config.internode_transport, self._out_of_use(topology))
        except EpA2AError as error:
            agree_on_config(None, self.arena.rendezvous, index or 0, error)
            raise
        if transport != "peer_memory" and not config.uses_rings:
            config = replace(config, kernel_type=EpDispatchCombineKernelType.InterNodeV1)
        config = replace(config, internode_transport=transport)
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

    def _node_arena(self, transport: str, grid: NodeGrid, timeout_secs: float, reason: str) -> NodeArena:
        """Memory that the ranks of a node share, and what moves blocks between nodes."""
        key = transport, grid.num_nodes
        if key not in self._nodes:
            group, device = self.arena.group, self.arena.device
            between = make_transport(transport, reason, group, grid, device, timeout_secs)
            self._nodes[key] = NodeArena(group, grid, device, between)
        return self._nodes[key]

    @property
    def num_bytes(self) -> int:
        """Bytes of the arenas that are not the factory's own."""
        return sum(arena.num_bytes for arena in self._own_arenas)

    @property
    def _own_arenas(self) -> list[Arena]:
        return [*self._nodes.values(), *([] if self._puts is None else [self._puts])]

    def close(self) -> None:
        """Gives back what ops across nodes share, not the arena; to be called on every rank."""
        for arena in self._own_arenas:
            # the manager's own arena, which all ranks share, is where they meet
            arena.close(alone=True)
        self._nodes.clear()
