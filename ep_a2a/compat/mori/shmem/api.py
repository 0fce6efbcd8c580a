"""`mori.shmem.api`: MORI's functions on addresses, over ep_a2a.shmem, whose functions take tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a import shmem
from ep_a2a.compat.mori.shmem_context import close_world
from ep_a2a.compat.mori.unsupported import unsupported
from ep_a2a.compat.parameters import remedy_of, take_mori_variables
from ep_a2a.errors import InputError, UnsupportedError
from ep_a2a.shmem import shmem_barrier_all, shmem_mype, shmem_npes

if TYPE_CHECKING:
    import torch

__all__ = [
    "MORI_SHMEM_INIT_WITH_MPI_COMM",
    "MORI_SHMEM_INIT_WITH_UNIQUEID",
    "shmem_barrier_all",
    "shmem_barrier_on_stream",
    "shmem_buffer_deregister",
    "shmem_buffer_register",
    "shmem_ext_malloc_with_flags",
    "shmem_finalize",
    "shmem_free",
    "shmem_get_unique_id",
    "shmem_init_attr",
    "shmem_malloc",
    "shmem_malloc_align",
    "shmem_module_init",
    "shmem_mpi_init",
    "shmem_mype",
    "shmem_npes",
    "shmem_num_qp_per_pe",
    "shmem_ptr_p2p",
    "shmem_torch_process_group_init",
]

MORI_SHMEM_INIT_WITH_MPI_COMM = 0
MORI_SHMEM_INIT_WITH_UNIQUEID = 1

ALLOCATION_ALIGNMENT_BYTES = 256
"""Every allocation of shmem_malloc starts at a multiple of this, whatever the kind of memory."""


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
    shmem.shmem_free(_allocation_at(ptr))


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


def _allocation_at(ptr: int) -> torch.Tensor:
    found = shmem.find_allocation(ptr)
    if found is None or found[1]:
        raise InputError("an address that shmem_malloc returned and shmem_free has not taken", hex(ptr))
    return found[0].local


shmem_mpi_init = unsupported("shmem.shmem_mpi_init")
shmem_get_unique_id = unsupported("shmem.shmem_get_unique_id")
shmem_init_attr = unsupported("shmem.shmem_init_attr")
shmem_module_init = unsupported("shmem.shmem_module_init")
shmem_barrier_on_stream = unsupported("shmem.shmem_barrier_on_stream")
shmem_ext_malloc_with_flags = unsupported("shmem.shmem_ext_malloc_with_flags")
shmem_buffer_register = unsupported("shmem.shmem_buffer_register")
shmem_buffer_deregister = unsupported("shmem.shmem_buffer_deregister")
shmem_num_qp_per_pe = unsupported("shmem.shmem_num_qp_per_pe")
