"""`mori.ops.local_expert_count`: rows per local expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.compat.mori.unsupported import refused
from ep_a2a.routing import count_ids

if TYPE_CHECKING:
    import torch


def launch_local_expert_count(
    config: Any,
    indices_ptr: int,
    total_recv_token_num_ptr: int,
    local_expert_count_ptr: int,
    block_num: int = -1,
    warp_per_block: int = -1,
    stream: int = 0,
) -> None:
    """MORI's kernel on raw pointers. Not supported.

    Raises:
        UnsupportedError: always.
    """
    raise refused("ops.launch_local_expert_count")


def count_local_experts(indices: torch.Tensor, first_expert: int, counts: torch.Tensor) -> None:
    """Counts received rows per local expert, on the device; launches only.

    Args:
        indices: int32 [..., K] global ids of received rows; rows without a token have ids below 0.
        first_expert: the id of this rank's first expert.
        counts: int32 [E], overwritten with the rows that name each of this rank's experts.
    """
    counts.copy_(count_ids(indices, first_expert, counts.shape[0]))
