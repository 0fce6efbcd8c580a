"""Which of our ops serves a configuration that names one of MORI's kernels."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ep_a2a import shmem
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.ops.factory import OpFactory
from ep_a2a.topology import Topology, TopologyReport, classify, gather_report

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.arena import Arena
    from ep_a2a.ops.op import EpDispatchCombineOp

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
        self._factory = OpFactory(arena)

    def make_op(self, config: EpDispatchCombineConfig) -> EpDispatchCombineOp:
        """The op for a configuration of any of MORI's kernel types. Collective.

        Raises:
            ConfigError: gpu_per_node would put ranks of two hosts on one node.
            UnsupportedError: nodes differ in size, or their ranks do not follow one another.
        """
        topology = self._topology(config)
        ours = config.kernel_type
        if not topology.internode:
            ours = KernelType.IntraNode
        if config.kernel_type is not ours:
            _say_once(config.kernel_type.name, ours.name)
            config = replace(config, kernel_type=ours)
        return self._factory.make(config, topology, None)

    def _topology(self, config: EpDispatchCombineConfig) -> Topology:
        """The nodes that the op spans."""
        if self._report is None:
            self._report = gather_report(self.arena.rendezvous.group, self.arena.device)
        if config.kernel_type in IN_A_NODE:
            return classify(self._report, config.world_size)
        return classify(self._report, None if config.kernel_type is KernelType.AsyncLL else config.gpu_per_node)

    def close(self) -> None:
        """Gives back what is not the arena's; to be called on every rank."""
        self._factory.close()


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
