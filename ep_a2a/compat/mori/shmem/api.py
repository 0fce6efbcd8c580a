"""`mori.shmem.api`: MORI's functions, which speak of addresses, on ep_a2a.shmem, which speaks of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a import shmem
from ep_a2a.compat.mori.shmem_context import close_world
from ep_a2a.compat.mori.unsupported import refused
from ep_a2a.errors import InputError
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

_BY_GROUP = "Make a torch.distributed group, register it, and call shmem_torch_process_group_init(name)."
_BY_MALLOC = "Use shmem_malloc or mori_shmem_create_tensor, and copy."
_BY_PEERS = "Peers are written to by kernels over shmem_ptr_p2p's addresses; there is no network library to set up."
ALLOCATION_ALIGNMENT_BYTES = 256
"""Every kind of memory that shmem_malloc gives starts at a multiple of this."""


def shmem_torch_process_group_init(group_name: str, *, device: torch.device | str | None = None) -> int:
    """Sets the world up from a process group registered under `group_name`. Collective.

    Args:
        group_name: name given to torch._C._distributed_c10d._register_process_group.
        device: this package's addition: where memory lies; None is the current CUDA device, or CPU without one.

    Returns:
        0.

    Raises:
        UnknownNameError: no process group of that name is registered.
        StateError: there is a world already.
    """
    return shmem.shmem_torch_process_group_init(group_name, device)


def shmem_finalize() -> int:
    """Gives all memory of the world back, that of its ops too; to be called on every rank. Returns 0."""
    close_world()
    return shmem.shmem_finalize()


def shmem_malloc(size: int) -> int:
    """Symmetric memory of `size` bytes, zeroed: its address here. Collective; lives as long as the world."""
    return shmem.shmem_malloc(size).data_ptr()


def shmem_malloc_align(alignment: int, size: int) -> int:
    """shmem_malloc at a multiple of `alignment` bytes, a power of two up to 256.

    Raises:
        InputError: alignment is no power of two. UnsupportedError: it is more than 256.
    """
    if alignment < 1 or alignment & (alignment - 1):
        raise InputError("alignment to be a power of two", str(alignment))
    if alignment > ALLOCATION_ALIGNMENT_BYTES:
        raise refused(
            f"shmem_malloc_align({alignment})",
            f"Align within a larger allocation; {ALLOCATION_ALIGNMENT_BYTES} it has.",
        )
    return shmem_malloc(size)


def shmem_free(ptr: int) -> None:
    """Gives memory of shmem_malloc back; local. InputError for any other address."""
    shmem.shmem_free(_allocation_at(ptr))


def shmem_ptr_p2p(dest_ptr: int, my_pe: int, dest_pe: int) -> int:
    """Address at which this process reaches rank dest_pe's byte for `dest_ptr`; 0 for an address of no allocation.

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


def shmem_mpi_init() -> int:
    """A world over MPI: not here."""
    raise refused("shmem_mpi_init", _BY_GROUP)


def shmem_get_unique_id() -> bytes:
    """A world without torch.distributed: not here."""
    raise refused("shmem_get_unique_id", _BY_GROUP)


def shmem_init_attr(flags: int, rank: int, nranks: int, unique_id: bytes) -> int:
    """A world without torch.distributed: not here."""
    raise refused("shmem_init_attr", _BY_GROUP)


def shmem_module_init(hip_module: int) -> int:
    """MORI's symbols in a compiled kernel: not here."""
    raise refused("shmem_module_init", _BY_PEERS)


def shmem_barrier_on_stream(stream: Any = None) -> None:
    """A barrier on the device: not here."""
    raise refused("shmem_barrier_on_stream", "Synchronise the stream and call shmem_barrier_all().")


def shmem_ext_malloc_with_flags(size: int, flags: int) -> int:
    """HIP's kinds of memory: not here."""
    raise refused("shmem_ext_malloc_with_flags", "Use shmem_malloc(size).")


def shmem_buffer_register(ptr: int, size: int) -> int:
    """Existing memory for RDMA: not here."""
    raise refused("shmem_buffer_register", _BY_MALLOC)


def shmem_buffer_deregister(ptr: int, size: int) -> int:
    """Existing memory for RDMA: not here."""
    raise refused("shmem_buffer_deregister", _BY_MALLOC)


def shmem_num_qp_per_pe() -> int:
    """Queue pairs: there are none here."""
    raise refused("shmem_num_qp_per_pe", "Nodes are joined by torch.distributed, whose library has its own settings.")
