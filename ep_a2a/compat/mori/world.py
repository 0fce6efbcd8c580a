"""Which of our ops serves a configuration that names one of MORI's kernels."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ep_a2a import shmem
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.managers.native import Nodes
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.topology import TopologyReport, classify, gather_report

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.managers.native import NativeOp
    from ep_a2a.memory.arena import Arena

logger = logging.getLogger(__name__)

IN_A_NODE = (KernelType.IntraNode, KernelType.IntraNodeLL)
"""Kernel types that never leave a node. AsyncLL goes by where the ranks really are, the others by gpu_per_node."""


class World:
    """What ops of one symmetric world share besides its arena.

    Args:
        arena: the world's.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._report: TopologyReport | None = None
        self._nodes: dict[int, Nodes] = {}

    def make_op(self, config: EpDispatchCombineConfig) -> NativeOp:
        """The op for a configuration of any of MORI's kernel types. Collective.

        Raises:
            ConfigError: gpu_per_node would put ranks of two hosts on one node.
            UnsupportedError: nodes differ in size, or their ranks do not follow one another.
        """
        # Triton is loaded when the first op is made.
        from ep_a2a.kernels.op import EpDispatchCombineOp
        from ep_a2a.managers.inter_node_op import InterNodeDispatchCombineOp

        grid = self._grid(config)
        ours = KernelType.IntraNode if grid is None else KernelType.InterNodeV1
        if config.kernel_type is not ours:
            _say_once(config.kernel_type.name, ours.name)
            config = replace(config, kernel_type=ours)
        if grid is None:
            return EpDispatchCombineOp(config, arena=self.arena)
        nodes = self._nodes_of(grid, config.timeout)
        rendezvous, index = self.arena.rendezvous, nodes.arena.unshared_index()
        return InterNodeDispatchCombineOp(config, grid, nodes.rail, nodes.arena, rendezvous, index)

    def _grid(self, config: EpDispatchCombineConfig) -> NodeGrid | None:
        """The nodes that the op spans; None where it is one."""
        if config.kernel_type in IN_A_NODE:
            return None
        if self._report is None:
            self._report = gather_report(self.arena.rendezvous.group, self.arena.device)
        wanted = None if config.kernel_type is KernelType.AsyncLL else config.gpu_per_node
        topology = classify(self._report, wanted)
        return NodeGrid.of(topology, self.arena.rendezvous.rank) if topology.internode else None

    def _nodes_of(self, grid: NodeGrid, timeout_secs: float) -> Nodes:
        if grid.num_nodes not in self._nodes:
            group = self.arena.rendezvous.group
            self._nodes[grid.num_nodes] = Nodes(group, grid, self.arena.device, timeout_secs)
        return self._nodes[grid.num_nodes]

    def close(self) -> None:
        """Gives back what is not the arena's; to be called on every rank."""
        for nodes in self._nodes.values():
            nodes.close()
        self._nodes.clear()


_world: World | None = None


def current_world() -> World:
    """The world that shmem_torch_process_group_init has made; NotInitializedError before it."""
    global _world
    arena = shmem.default_arena()
    if _world is None or _world.arena is not arena:
        close_world()
        _world = World(arena)
    return _world


def close_world() -> None:
    """Forgets the world, if there is one; its arena is `ep_a2a.shmem`'s. To be called on every rank."""
    global _world
    world, _world = _world, None
    if world is not None:
        world.close()


@functools.cache
def _say_once(asked: str, ours: str) -> None:
    logger.warning("mori on ep_a2a: kernel type %s runs as %s, which has its calls and its results", asked, ours)
