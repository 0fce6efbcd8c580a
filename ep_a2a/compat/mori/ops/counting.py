"""Rows per local expert, for calls that our op does not count in."""

from __future__ import annotations

import torch


def count_local_experts(indices: torch.Tensor, first_expert: int, counts: torch.Tensor) -> None:
    """Fills `counts`, on the device and without waiting for it.

    Args:
        indices: int32 [..., K] global ids of received rows; rows without a token have ids below 0.
        first_expert: the id of this rank's first expert.
        counts: int32 [E], overwritten with the rows that name each of this rank's experts.
    """
    num_experts = counts.shape[0]
    slots = indices.flatten().long() - first_expert
    slots = torch.where((slots >= 0) & (slots < num_experts), slots, num_experts)
    # the last one takes everything that is not counted
    found = torch.zeros(num_experts + 1, dtype=torch.int32, device=indices.device)
    found.scatter_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
    counts.copy_(found[:num_experts])
