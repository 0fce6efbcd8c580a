"""A rank that comes last to a meeting, without a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from ep_a2a.testing import RankContext


def come_last(context: RankContext, late_rank: int, meeting: str) -> None:
    """Returns on `late_rank` once all others have returned, which go on to the meeting and wait there.

    Args:
        meeting: its name, which no other meeting of these processes has.
    """
    store = dist.PrefixStore(f"late for {meeting}", distributed_c10d._get_process_group_store(context.group))
    names = [str(rank) for rank in range(context.world_size) if rank != late_rank]
    if context.rank != late_rank:
        store.set(str(context.rank), "")
        return
    store.wait(names)
    for name in names:
        store.delete_key(name)
