"""`triton_dist.utils`: how programs join the other ranks, allocate symmetric memory and leave."""

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a import env, shmem
from ep_a2a.compat.mori.shmem import mori_shmem_create_tensor as nvshmem_create_tensor
from ep_a2a.compat.mori.shmem import mori_shmem_free_tensor as nvshmem_free_tensor_sync
from ep_a2a.errors import NotInitializedError
from ep_a2a.memory.arena import Arena
from ep_a2a.parallel.state import destroy_dist_env, get_ep_group, init_dist_env

__all__ = [
    "dist_print",
    "finalize_distributed",
    "init_nvshmem_by_torch_process_group",
    "initialize_distributed",
    "is_shmem_initialized",
    "nvshmem_barrier_all_on_stream",
    "nvshmem_create_tensor",
    "nvshmem_free_tensor_sync",
]

FIRST_SEED = 3


def initialize_distributed(seed: int | None = None, initialize_shmem: bool = True) -> dist.ProcessGroup:
    """Joins the ranks that torchrun has started, on this rank's GPU, or on the CPU without one. Collective.

    Args:
        seed: of the random numbers of torch and Python on this rank; None takes the rank.
        initialize_shmem: also make the symmetric world of the group.

    Returns:
        The group of all ranks.

    Raises:
        ConfigError: a launcher's variable is impossible. StateError: there is a symmetric world already.
    """
    rank, world_size = (int(env.other_variable(name) or default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    init_dist_env(1, 0, data_parallel_size=world_size, data_parallel_rank=rank)
    group = get_ep_group().device_group
    first = FIRST_SEED + (rank if seed is None else seed)
    torch.manual_seed(first)
    random.seed(first)
    if initialize_shmem:
        init_nvshmem_by_torch_process_group(group)
    return group


def init_nvshmem_by_torch_process_group(pg: dist.ProcessGroup) -> None:
    """Makes the symmetric world of a group. Collective; allocates nothing. Raises StateError if there is one."""
    shmem.shmem_torch_process_group_init(pg.group_name)


def is_shmem_initialized() -> bool:
    """Whether there is a symmetric world."""
    try:
        shmem.default_arena()
    except NotInitializedError:
        return False
    return True


def world_arena() -> Arena:
    """Returns the arena of the symmetric world, which the first layer makes of all ranks. Not Triton-distributed's.

    Raises:
        NotInitializedError: torch.distributed has not been initialised.
    """
    if not is_shmem_initialized():
        if not dist.is_initialized():
            raise NotInitializedError(
                "the other ranks", "none", "Call triton_dist.utils.initialize_distributed() first, or pass arena=."
            )
        shmem.shmem_torch_process_group_init(shmem.DEFAULT_GROUP)
    return shmem.default_arena()


def finalize_distributed() -> None:
    """Frees all memory of the symmetric world and leaves the group. Must be called on every rank."""
    shmem.shmem_finalize()
    destroy_dist_env()
    if dist.is_initialized():
        dist.destroy_process_group()


def nvshmem_barrier_all_on_stream(stream: torch.cuda.Stream | None = None) -> None:
    """Waits until all ranks have come here with their work on this stream done. The host waits, too."""
    if torch.cuda.is_available():
        (stream or torch.cuda.current_stream()).synchronize()
    shmem.shmem_barrier_all()


def dist_print(
    *values: Any,
    allowed_ranks: Sequence[int] | str = (0,),
    prefix: bool = False,
    need_sync: bool = False,
    **kwargs: Any,
) -> None:
    """Prints on some ranks, one after the other with need_sync.

    Args:
        values, kwargs: as for print.
        allowed_ranks: the ranks that print, or "all".
        prefix: print "[rank:0]" before the values.
        need_sync: the ranks wait for each other before each prints; collective.
    """
    for rank in range(dist.get_world_size()) if allowed_ranks == "all" else allowed_ranks:
        if need_sync:
            dist.barrier()
        if rank == dist.get_rank():
            print(*([f"[rank:{rank}]"] if prefix else []), *values, **kwargs)  # noqa: T201
