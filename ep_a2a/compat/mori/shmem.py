"""`mori.shmem`: MORI's functions on addresses and tensors, and the symmetric world that its ops share.

`ep_a2a.shmem`, below, takes and returns tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ep_a2a import shmem
from ep_a2a.compat.parameters import refusals, refused, remedy_of, take_mori_variables, warn_once
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.errors import InputError, UnsupportedError, max_tokens_named
from ep_a2a.ops.factory import OpFactory
from ep_a2a.shmem import shmem_barrier_all, shmem_mype, shmem_npes
from ep_a2a.topology import Topology, TopologyReport, classify, gather_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.arena import Arena
    from ep_a2a.ops.op import EpDispatchCombineOp

__all__ = [
    "MORI_SHMEM_INIT_WITH_MPI_COMM",
    "MORI_SHMEM_INIT_WITH_UNIQUEID",
    "mori_shmem_create_tensor",
    "mori_shmem_free_tensor",
    "shmem_barrier_all",
    "shmem_finalize",
    "shmem_free",
    "shmem_malloc",
    "shmem_malloc_align",
    "shmem_mype",
    "shmem_npes",
    "shmem_ptr_p2p",
    "shmem_torch_process_group_init",
    "symm_mori_shmem_tensor",
]

MORI_SHMEM_INIT_WITH_MPI_COMM = 0
MORI_SHMEM_INIT_WITH_UNIQUEID = 1

ALLOCATION_ALIGNMENT_BYTES = 256
"""Every allocation of shmem_malloc starts at a multiple of this, whatever the kind of memory."""

globals().update(refusals("mori", "shmem"))


def shmem_torch_process_group_init(group_name: str, *, device: torch.device | str | None = None) -> int:
    """Make the symmetric world from a torch process group. Collective.

    Args:
        group_name: "default" is torch's default group, all ranks, unless a group is registered under this name.
        device: where memory lies; None is the current CUDA device, or CPU without one. Not MORI's.

    Returns:
        0. MORI_RDMA_DEVICES counts as EP_A2A_RDMA_DEVICES. A warning says once which other MORI_* variables are set,
        since they have no effect.

    Raises:
        EnvironmentVariableError: MORI_RDMA_DEVICES is not a list of devices.
        UnknownNameError: no process group of that name is registered.
        StateError: there is a world already.
    """
    take_mori_variables()
    return shmem.shmem_torch_process_group_init(group_name, device)


def shmem_finalize() -> int:
    """Frees all memory of the world and its ops, and returns 0. Must be called on every rank."""
    close_world()
    return shmem.shmem_finalize()


def shmem_malloc(size: int) -> int:
    """Allocates `size` bytes of zeroed symmetric memory and returns its address. Collective; lives with the world."""
    return shmem.shmem_malloc(size).data_ptr()


def shmem_malloc_align(alignment: int, size: int) -> int:
    """Allocates as shmem_malloc, at a multiple of `alignment` bytes, a power of two up to 256.

    Raises:
        InputError: alignment is no power of two. UnsupportedError: it is more than 256.
    """
    if alignment < 1 or alignment & (alignment - 1):
        raise InputError("alignment to be a power of two", str(alignment))
    if alignment > ALLOCATION_ALIGNMENT_BYTES:
        raise UnsupportedError(
            f"shmem_malloc_align with an alignment of at most {ALLOCATION_ALIGNMENT_BYTES} bytes",
            str(alignment),
            remedy_of("mori", "shmem.shmem_malloc_align", "alignment"),
        )
    return shmem_malloc(size)


def shmem_free(ptr: int) -> None:
    """Frees memory of shmem_malloc; local. Raises InputError for any other address."""
    found = shmem.find_allocation(ptr)
    if found is None or found[1]:
        raise InputError("an address that shmem_malloc returned and shmem_free has not taken", hex(ptr))
    shmem.shmem_free(found[0].local)


def shmem_ptr_p2p(dest_ptr: int, my_pe: int, dest_pe: int) -> int:
    """Returns the address by which this process reaches rank dest_pe's byte for `dest_ptr`; 0 outside allocations.

    Args:
        dest_ptr: an address inside of memory of shmem_malloc on this rank.
        my_pe: this rank. dest_pe: the other.

    Raises:
        InputError: my_pe is not this rank, or dest_pe is none.
    """
    if my_pe != shmem_mype():
        raise InputError(f"my_pe to be this rank, {shmem_mype()}", str(my_pe))
    found = shmem.find_allocation(dest_ptr)
    if found is None:
        return 0
    memory, offset = found
    return shmem.shmem_ptr_p2p(memory.local, dest_pe) + offset


def mori_shmem_create_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a zeroed tensor in symmetric memory. Collective; valid until it is freed or the world ends."""
    size = torch.Size(shape)
    return shmem.shmem_malloc(size.numel() * dtype.itemsize).view(dtype).view(size)


def mori_shmem_free_tensor(tensor: torch.Tensor) -> None:
    """Frees a tensor of mori_shmem_create_tensor; local. Raises InputError for any other tensor."""
    shmem.shmem_free(tensor)


def symm_mori_shmem_tensor(tensor: torch.Tensor, peer: int) -> torch.Tensor:
    """Returns the tensor itself if `peer` is this rank.

    Raises:
        UnsupportedError: another rank; peers' memory is not available as tensors.
    """
    if peer != shmem.shmem_mype():
        raise refused("mori", "shmem.symm_mori_shmem_tensor", "peer")
    return tensor


class World:
    """The topology and the op factory that ops of one symmetric world share.

    Args:
        arena: the world's.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.factory = OpFactory(arena)
        self._report: TopologyReport | None = None

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
            return self.factory.make(config, topology, None)

    def _topology(self, config: EpDispatchCombineConfig) -> Topology:
        """Returns the nodes that the op spans: one, those of the ranks' hosts (AsyncLL), or those of gpu_per_node."""
        if self._report is None:
            self._report = gather_report(self.arena.group, self.arena.rendezvous)
        kind = config.kernel_type
        if kind in (KernelType.IntraNode, KernelType.IntraNodeLL):
            return classify(self._report, config.world_size)
        return classify(self._report, None if kind is KernelType.AsyncLL else config.gpu_per_node)


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
    """Closes the world's factory, if there is a world; must be called on every rank. Its arena stays open."""
    global _world
    world, _world = _world, None
    if world is not None:
        world.factory.close()
