"""OpFactory: chooses the transport between nodes and the arena of an op; owns the arenas of ops between nodes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ep_a2a.config import EpDispatchCombineKernelType
from ep_a2a.config.transports import transport_maker
from ep_a2a.kernels.ring_shape import BY_PUTS
from ep_a2a.memory import nvshmem
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.node_memory import NodeArena
from ep_a2a.memory.transport_choice import choose_transport, name_network_devices
from ep_a2a.ops.config_agreement import agree_on_config
from ep_a2a.ops.inputs import check_construction

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.topology import Topology


logger = logging.getLogger(__name__)


class OpFactory:
    """Makes EpDispatchCombineOps. All methods are collective.

    Args:
        arena: memory of ops whose kernels store to all ranks, and the ranks' meeting place.
        kind: class of the ops; None = EpDispatchCombineOp.
    """

    def __init__(self, arena: Arena, kind: type[EpDispatchCombineOp] | None = None) -> None:
        self.arena, self._kind = arena, kind
        self._own: dict[tuple[str, int], Arena] = {}

    def make(self, config: EpDispatchCombineConfig, topology: Topology, index: int | None) -> EpDispatchCombineOp:
        """Make an op for a config, over the transport that it names, or one that suits the topology.

        Args:
            config: its kernel_type is IntraNode on one node, and another one on several. InterNode, the flat form,
                runs as InterNodeV1 where kernels cannot store to all nodes.
            topology: the nodes of the arena's ranks.
            index: of the op in its arena; None gives the op memory of its own.

        Raises:
            UnsupportedError: nodes differ in size, or the transport does not work here.
            ConfigMismatchError: the ranks' configs, or the transports that they chose, differ.
        """
        # Triton is loaded when the first op is made, not when a manager is
        from ep_a2a.ops.op import EpDispatchCombineOp

        kind = self._kind or EpDispatchCombineOp
        if not topology.internode:
            return kind(config, arena=self.arena, index=index)
        with self.arena.rendezvous.telling():
            config, grid = self._agree(config, topology, index)
            logger.info("%s through %s", config.kernel_type.name, config.internode_transport)
            arena = self._arena_of(config, grid)
            if arena is None:
                arena = self._make_arena(config, grid)
            return kind(config, arena=arena, index=index, _is_agreed=True)

    def _agree(
        self, config: EpDispatchCombineConfig, topology: Topology, index: int | None
    ) -> tuple[EpDispatchCombineConfig, NodeGrid]:
        """Choose the transport and agree on the config: (config with it, this rank's place).

        The ranks agree before any of them makes an arena: the environment of another rank may name another transport,
        and that rank would wait in a meeting of its own.
        """
        rendezvous = self.arena.rendezvous
        grid = NodeGrid.of(topology, rendezvous.rank)
        transport = choose_transport(config.internode_transport, self._out_of_use(topology))
        if transport != "peer_memory" and not config.uses_rings:
            config = replace(config, kernel_type=EpDispatchCombineKernelType.InterNodeV1)
        config = replace(config, internode_transport=transport)
        check_construction(config, self._arena_of(config, grid), index)
        agree_on_config(config, rendezvous, index or 0)
        return config, grid

    def _out_of_use(self, topology: Topology) -> dict[str, str]:
        """The transports that cannot serve these nodes, with the reason."""
        if topology.on_one_host:
            return {}
        found = {"peer_memory": "these are nodes of several hosts"}
        if self.arena.device.type == "cpu":
            found["nvshmem"] = "these are nodes of several hosts without GPUs"
        return found

    def _arena_of(self, config: EpDispatchCombineConfig, grid: NodeGrid) -> Arena | None:
        """The arena of an op between nodes; None if it has not been made. On CPU copies of bytes stand for puts."""
        if config.is_staged:
            return self._own.get((config.internode_transport, grid.num_nodes))
        if config.internode_transport == BY_PUTS and self.arena.device.type != "cpu":
            return self._own.get((BY_PUTS, 0))
        return self.arena

    def _make_arena(self, config: EpDispatchCombineConfig, grid: NodeGrid) -> Arena:
        """Make an arena on NVSHMEM's heap for puts; else an arena of this node, with a transport between nodes."""
        group, device, transport = self.arena.group, self.arena.device, config.internode_transport
        if device.type == "cuda":
            name_network_devices()
        if transport == BY_PUTS:
            made = self._own[BY_PUTS, 0] = Arena(group, device, nvshmem.allocate_symmetric, self.arena.rendezvous)
            return made
        between = transport_maker(transport)(group, grid, config.timeout)
        made = self._own[transport, grid.num_nodes] = NodeArena(group, grid, device, between, self.arena.rendezvous)
        return made

    @property
    def num_bytes(self) -> int:
        """Bytes of the arenas that the factory has made."""
        return sum(arena.num_bytes for arena in self._own.values())

    def close(self, *, alone: bool = True) -> None:
        """Give back the memory of the arenas that the factory has made. Call it on every rank.

        Args:
            alone: wait for no rank: the owner of the arena that all ranks share meets them there.
        """
        for arena in self._own.values():
            arena.close(alone=alone)
        self._own.clear()
