"""What an op's memory tells of its last step, for those who look between its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.ring_shape import Rings

if TYPE_CHECKING:
    from ep_a2a.ops.op import EpDispatchCombineOp


def rows_from_other_nodes(op: EpDispatchCombineOp, num_tokens: int) -> int:
    """Tokens that came to this rank from other nodes in the last step, through its rings, to be forwarded.

    Args:
        op: one whose kernels use rings, with its last kernel awaited.
        num_tokens: the most that any rank brought. No rank may have brought more of its own in an earlier step.
    """
    rings = Rings.of(op.config)
    num_chunks = -(-num_tokens // rings.chunk_tokens)
    rows = op.memory.view(Region.FORWARDED_ROWS).view(rings.num_nodes, -1, rings.chunk_tokens, rings.gpus_per_node)
    lines = op.memory.view(Region.FORWARDED_LINES)[:, :num_chunks]
    is_line = torch.arange(rings.chunk_tokens, device=lines.device) < lines[:, :, None]
    came = (rows[:, :num_chunks] >= 0).any(3) & is_line
    came[op.config.rank // rings.gpus_per_node] = False
    return int(came.sum())
