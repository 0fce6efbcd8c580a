"""MORI's `mori.shmem`: one symmetric world per process, from which ops without a manager take their memory."""

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from ep_a2a.config.requirements import MAX_BYTES, checked_integer
from ep_a2a.errors import InputError, NotInitializedError, StateError, UnknownNameError
from ep_a2a.memory.arena import Arena, default_device
from ep_a2a.memory.symmetric import SymmetricMemory

DEFAULT_GROUP = "default"

_arena: Arena | None = None
_allocations: dict[int, SymmetricMemory] = {}


def shmem_torch_process_group_init(group_name: str, device: torch.device | str | None = None) -> int:
    """Make the symmetric world from a torch process group. Collective.

    Args:
        group_name: the `group_name` of a torch process group, or "default" for all ranks (where torch knows a group of
            this very name, as MORI's users register one, for that group).
        device: where memory lies; default the current CUDA device, or CPU without one.

    Returns:
        0, as MORI does.

    Raises:
        UnknownNameError: torch knows no process group of that name here.
        StateError: the world exists already.
    """
    global _arena
    if _arena is not None and not _arena.closed:
        raise StateError("no symmetric world yet", "one that is in use", "Call shmem_finalize() first.")
    _arena = Arena(_find_group(group_name), default_device() if device is None else torch.device(device))
    return 0


def _find_group(name: str) -> ProcessGroup:
    try:
        group: ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    except RuntimeError as error:
        if name == DEFAULT_GROUP and distributed_c10d.is_initialized():
            return distributed_c10d._get_default_group()
        remedy = (
            "Pass 'default' for all ranks, after torch.distributed.init_process_group(), or group.group_name of a "
            "group that torch.distributed.new_group returned. ep_a2a.make_op(group, ...) needs no name."
        )
        raise UnknownNameError(f"a process group named {name!r}", str(error), remedy) from error
    return group


def default_arena() -> Arena:
    """The world's arena; NotInitializedError before shmem_torch_process_group_init."""
    if _arena is None or _arena.closed:
        raise NotInitializedError(
            "a symmetric world", "none", "Call ep_a2a.shmem.shmem_torch_process_group_init(name), or pass arena=."
        )
    return _arena


def shmem_finalize() -> int:
    """Give all memory of the world back, and return 0. A second call does nothing.

    The ranks wait for each other for 3 seconds at most.
    """
    global _arena
    if _arena is not None:
        _arena.close()
        _arena = None
    _allocations.clear()
    return 0


def shmem_mype() -> int:
    """This process's rank in the world."""
    return default_arena().rendezvous.rank


def shmem_npes() -> int:
    """The number of ranks of the world."""
    return default_arena().rendezvous.world_size


def shmem_barrier_all() -> None:
    """Wait until all ranks have called this. It does not wait for work that is queued on devices."""
    default_arena().rendezvous.barrier("shmem_barrier_all")


def shmem_malloc(num_bytes: int) -> torch.Tensor:
    """Allocate symmetric memory: uint8 [num_bytes], zeroed, valid until shmem_finalize. Collective.

    MORI returns an address instead of a tensor.

    Raises:
        InputError: num_bytes is not positive.
    """
    checked_integer("num_bytes", num_bytes, 1, MAX_BYTES, InputError)
    memory = default_arena().symmetric_memory(num_bytes)
    _allocations[memory.local.data_ptr()] = memory
    return memory.local


def shmem_free(tensor: torch.Tensor) -> None:
    """Give memory of shmem_malloc back. Local. InputError for any other tensor, and for one that was freed before."""
    _allocation_of(tensor).close()
    del _allocations[tensor.data_ptr()]


def shmem_ptr_p2p(tensor: torch.Tensor, dest_pe: int) -> int:
    """The address at which this process reaches rank dest_pe's part of memory from shmem_malloc.

    Raises:
        InputError: the tensor is not from shmem_malloc, or there is no such rank.
    """
    addresses = _allocation_of(tensor).peer_addresses
    return addresses[checked_integer("dest_pe", dest_pe, 0, len(addresses) - 1, InputError)]


def find_allocation(address: int) -> tuple[SymmetricMemory, int] | None:
    """(memory of shmem_malloc, offset) of an address of this process; None for any other address."""
    for start, memory in _allocations.items():
        if start <= address < start + memory.num_bytes:
            return memory, address - start
    return None


def _allocation_of(tensor: torch.Tensor) -> SymmetricMemory:
    if tensor.data_ptr() not in _allocations:
        raise InputError("a tensor that shmem_malloc returned and shmem_free has not taken", "another tensor")
    return _allocations[tensor.data_ptr()]
