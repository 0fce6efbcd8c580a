"""MORI's symmetric world, which its ops share, and the choice of our op for one of MORI's kernel types."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ep_a2a import shmem
from ep_a2a.compat.parameters import warn_once
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.errors import max_tokens_named
from ep_a2a.ops.factory import OpFactory
from ep_a2a.topology import Topology, TopologyReport, classify, gather_report

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.arena import Arena
    from ep_a2a.ops.op import EpDispatchCombineOp

IN_A_NODE = (KernelType.IntraNode, KernelType.IntraNodeLL)
"""Kernel types inside one node. The ranks' hosts decide the nodes of AsyncLL, gpu_per_node those of the others."""


class World:
    """The topology and the op factory that ops of one symmetric world share.

    Args:
        arena: the world's.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._report: TopologyReport | None = None
        self._factory = OpFactory(arena)

    def make_op(self, config: EpDispatchCombineConfig) -> EpDispatchCombineOp:
        """Returns an op for a configuration of any of MORI's kernel types. Collective.

        Raises:
            ConfigError: gpu_per_node would put ranks of two hosts on one node.
            UnsupportedError: nodes differ in size, or their ranks do not follow one another.
        """
        with self.arena.rendezvous.telling(), max_tokens_named("max_num_inp_token_per_rank"):
            topology = self._topology(config)
            if not topology.internode and config.kernel_type is not KernelType.IntraNode:
                warn_once("mori", "ops.EpDispatchCombineConfig", "kernel_type")
                config = replace(config, kernel_type=KernelType.IntraNode)
            return self._factory.make(config, topology, None)

    def _topology(self, config: EpDispatchCombineConfig) -> Topology:
        """Returns the nodes that the op spans."""
        if self._report is None:
            self._report = gather_report(self.arena.group, self.arena.device, self.arena.rendezvous)
        if config.kernel_type in IN_A_NODE:
            return classify(self._report, config.world_size)
        return classify(self._report, None if config.kernel_type is KernelType.AsyncLL else config.gpu_per_node)

    def close(self) -> None:
        """Closes the factory; must be called on every rank. The arena stays open."""
        self._factory.close()


_world: World | None = None


def current_world() -> World:
    """Returns the world of shmem_torch_process_group_init; raises NotInitializedError before it."""
    global _world
    arena = shmem.default_arena()
    if _world is None or _world.arena is not arena:
        close_world()
        _world = World(arena)
    return _world


def close_world() -> None:
    """Closes the world, if there is one; must be called on every rank. Its arena belongs to `ep_a2a.shmem`."""
    global _world
    world, _world = _world, None
    if world is not None:
        world.close()
