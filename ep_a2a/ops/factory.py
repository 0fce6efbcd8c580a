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
from ep_a2a.ops.config_agreement import agree_on_config
from ep_a2a.ops.inputs import construction_error

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.topology import Topology


logger = logging.getLogger(__name__)


class OpFactory:
    """Makes the native ops of one arena. All methods are collective."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._own: dict[tuple[str, int], Arena] = {}

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
        config, grid, reason = self._agree(config, topology, index)
        logger.info("%s through %s: %s", config.kernel_type.name, config.internode_transport, reason)
        arena = self._arena_of(config, grid)
        if arena is None:
            arena = self._make_arena(config, grid, reason)
        return EpDispatchCombineOp(config, arena=arena, index=index, _is_agreed=True)

    def _agree(
        self, config: EpDispatchCombineConfig, topology: Topology, index: int | None
    ) -> tuple[EpDispatchCombineConfig, NodeGrid, str]:
        """The config with the transport that is used, where this rank stands, and why the transport was chosen.

        The ranks agree before any of them makes an arena: the environment of another rank may name another transport,
        and that rank would wait in a meeting of its own.
        """
        rendezvous = self.arena.rendezvous
        try:
            grid = NodeGrid.of(topology, rendezvous.rank)
            transport, reason = choose_transport(config.internode_transport, self._out_of_use(topology))
        except EpA2AError as error:
            agree_on_config(None, rendezvous, index or 0, error)
            raise
        if transport != "peer_memory" and not config.uses_rings:
            config = replace(config, kernel_type=EpDispatchCombineKernelType.InterNodeV1)
        config = replace(config, internode_transport=transport)
        agree_on_config(config, rendezvous, index or 0, construction_error(config, self._arena_of(config, grid), index))
        return config, grid, reason

    def _out_of_use(self, topology: Topology) -> dict[str, str]:
        """Transports that cannot serve these nodes, and why."""
        if topology.on_one_host:
            return {}
        found = {"peer_memory": "these are nodes of several hosts"}
        if self.arena.device.type == "cpu":
            found["nvshmem"] = "these are nodes of several hosts without GPUs"
        return found

    def _arena_of(self, config: EpDispatchCombineConfig, grid: NodeGrid) -> Arena | None:
        """The arena of an op between nodes; None where it has not been made. On CPU copies of bytes stand for puts."""
        if config.is_staged:
            return self._own.get((config.internode_transport, grid.num_nodes))
        if config.internode_transport == BY_PUTS and self.arena.device.type != "cpu":
            return self._own.get((BY_PUTS, 0))
        return self.arena

    def _make_arena(self, config: EpDispatchCombineConfig, grid: NodeGrid, reason: str) -> Arena:
        """Makes memory that ranks of other nodes reach by puts; else memory of a node, and what moves blocks."""
        group, device, transport = self.arena.group, self.arena.device, config.internode_transport
        if transport == BY_PUTS:
            name_network_devices()
            made = self._own[BY_PUTS, 0] = Arena(group, device, nvshmem.allocate_symmetric)
            return made
        between = make_transport(transport, reason, group, grid, device, config.timeout)
        made = self._own[transport, grid.num_nodes] = NodeArena(group, grid, device, between)
        return made

    @property
    def num_bytes(self) -> int:
        """Bytes of the arenas that are not the factory's own."""
        return sum(arena.num_bytes for arena in self._own.values())

    def close(self) -> None:
        """Gives back the memory of ops across nodes, not the arena's; to be called on every rank."""
        for arena in self._own.values():
            # the manager's own arena, which all ranks share, is where they meet
            arena.close(alone=True)
        self._own.clear()
