"""survivors: the group, manager and experts of the ranks that are left after others are gone."""

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a.config.requirements import checked_seconds
from ep_a2a.errors import ConfigError, InputError, RankTimeoutError
from ep_a2a.managers.base import All2AllManagerBase
from ep_a2a.managers.registry import create_manager
from ep_a2a.memory.subgroups import make_subgroup

MEETING_SECS = 60.0
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Survivors:
    """The ranks that are left, and their experts.

    Attributes:
        ranks: their ranks in the former group, ascending; `ranks[i]` is rank i now.
        group: their process group, which moves CPU tensors.
        manager: their manager, of the former one's backend and device.
        experts: the logical expert of each physical one, rank by rank; rank i holds numbers i * S to (i + 1) * S - 1,
            where S is the number of experts per rank. -1 = none.
        lost_experts: logical experts that nobody holds any more, ascending.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    manager: All2AllManagerBase
    experts: tuple[int, ...]
    lost_experts: tuple[int, ...]

    def physical_ids(self, logical_ids: torch.Tensor) -> torch.Tensor:
        """Returns the physical experts that tokens go to; an expert's copies take turns by token.

        Args:
            logical_ids: integers [tokens, topk]; -1 = none.

        Returns:
            Ids of the same shape, dtype and device, below `len(experts)`, and -1 for none, for lost experts and for ids
            that no rank ever held.

        Raises:
            InputError: logical_ids is not two-dimensional, or its dtype cannot hold -1 and all physical ids.
        """
        dtype, most, device = logical_ids.dtype, len(self.experts) - 1, logical_ids.device
        if logical_ids.ndim != 2:
            raise InputError("logical ids [tokens, topk]", f"shape {list(logical_ids.shape)}")
        if dtype not in SIGNED or torch.iinfo(dtype).max < most:
            raise InputError(f"ids of a dtype that holds -1 to {most}", str(dtype))
        # an empty place in front stands for ids that nobody holds; in 64 bits, as a narrow dtype may not hold all
        held, order = torch.tensor([-1, *self.experts], device=device).sort(stable=True)
        ids = logical_ids.long().contiguous()
        first, behind = torch.searchsorted(held, ids), torch.searchsorted(held, ids, right=True)
        is_held = (ids >= 0) & (behind > first)
        turns = torch.arange(len(ids), device=device)[:, None] % (behind - first).clamp(min=1)
        return torch.where(is_held, order[torch.where(is_held, first + turns, 0)] - 1, -1).to(dtype)


def survivors(
    error: RankTimeoutError,
    manager: All2AllManagerBase,
    experts_of_ranks: Sequence[Sequence[int]],
    *,
    store: distributed_c10d.Store | None = None,
    timeout_secs: float = MEETING_SECS,
) -> Survivors:
    """Makes the group and the manager of the ranks that are left. Collective over these ranks.

    Nothing is launched and no device memory is allocated: the first `manager.get_handle` does that. The former manager
    and its ops stay as they are; `manager.destroy()` ends them, and waits for no rank after the failure. Where the
    survivors are on several hosts, not equally many on each, backend ep_a2a takes `gpu_per_node=1` in handle kwargs.

    Args:
        error: of the step that failed. `missing_ranks` must be equal on all survivors, which agree on them on one
            host, and on several while the store answers. Ranks whose errors differ wait for each other in vain.
        manager: of the former group.
        experts_of_ranks: by rank of the former group, the logical expert in each of its places, -1 = none; equally
            many of each rank, and equal on all survivors. A logical expert may be on several ranks. Also a tensor
            of integers [ranks, places].
        store: where the survivors meet; None is the former group's store. Where the process that held that has ended,
            they need another: a TCPStore of one of them, or on one host a FileStore.
        timeout_secs: how long to wait for the last survivor.

    Raises:
        ConfigError: the error names nobody who is gone, or experts_of_ranks does not fit the group.
        RankTimeoutError: survivors did not come; or the former group's store has ended, and another was not given. Its
            missing_ranks are all ranks that are gone now, also those of `error`, so pass it to the next call.
    """
    former = manager.cpu_group
    world_size, own = dist.get_world_size(former), dist.get_rank(former)
    gone = set(error.missing_ranks)
    if not gone or own in gone or not gone <= set(range(world_size)):
        raise ConfigError(
            f"an error of this group of {world_size} ranks that names who is gone, this rank not among them",
            f"missing_ranks {error.missing_ranks}, late_ranks {error.late_ranks}, on rank {own}",
            "Ranks that are only late are still there: raise timeout_secs, and call reset() on all ranks.",
        )
    experts = _checked(experts_of_ranks, world_size)
    left = tuple(rank for rank in range(world_size) if rank not in gone)
    try:
        group = make_subgroup(former, left, checked_seconds("timeout_secs", timeout_secs), store=store)
    except RankTimeoutError as failure:
        failure.missing_ranks = tuple(sorted(gone.union(failure.missing_ranks)))
        raise
    new = create_manager(manager.backend, group)
    new.device = manager.device
    held = tuple(expert for rank in left for expert in experts[rank])
    everywhere = {expert for of_rank in experts for expert in of_rank if expert >= 0}
    return Survivors(left, group, new, held, tuple(sorted(everywhere - set(held))))


def _checked(experts_of_ranks: Sequence[Sequence[int]], world_size: int) -> list[list[int]]:
    """The experts as plain numbers: tensors of one element are not equal to others of the same value in a set."""
    with contextlib.suppress(TypeError):
        experts = [[operator.index(expert) for expert in of_rank] for of_rank in experts_of_ranks]
        if len(experts) == world_size and len(set(map(len, experts))) == 1:
            return experts
    raise ConfigError(
        f"a list of integers of each of {world_size} ranks in experts_of_ranks, equally many",
        str(experts_of_ranks),
        "Give one list for each rank; -1 is an empty place.",
    )
