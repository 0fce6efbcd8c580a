"""Which kernels make the steps of an op."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.memory.node_memory import NodeArena
from ep_a2a.ops.intra_node import IntraNodeKernels
from ep_a2a.ops.rings import InterNodeKernels
from ep_a2a.ops.staged import StagedKernels

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.arena import Arena
    from ep_a2a.ops.memory import BoundMemory


def kernels_of(config: EpDispatchCombineConfig, memory: BoundMemory, arena: Arena) -> IntraNodeKernels:
    """The kernels of an op. InterNode, the flat form, takes those of IntraNode: every rank writes to every other."""
    if config.is_staged and isinstance(arena, NodeArena):
        return StagedKernels(config, memory, arena)
    return (InterNodeKernels if config.uses_rings else IntraNodeKernels)(config, memory.table, arena.device)
