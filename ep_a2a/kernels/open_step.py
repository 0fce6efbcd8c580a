"""What an op's memory holds while a step is open, for layers that put work of their own between its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.rings import Rings

if TYPE_CHECKING:
    from ep_a2a.kernels.op import EpDispatchCombineOp


def received_weights(op: EpDispatchCombineOp) -> torch.Tensor:
    """The router weights of the received rows, float32 [W, max_num_tokens, K], by source as in layout rank_major.

    In layout expert_major combine multiplies by them. Between dispatch and combine no other rank writes here, so that
    weights which become known only then may take the place of those that travelled with the tokens.
    """
    config = op.config
    return op._memory.view(Region.WEIGHTS, (config.world_size, op._max_num_tokens, config.topk))


def rows_from_other_nodes(op: EpDispatchCombineOp, num_tokens: int) -> int:
    """Tokens that came to this rank from other nodes in the last step, through its rings, to be forwarded.

    Args:
        op: one whose kernels use rings, with its last kernel awaited.
        num_tokens: the most that any rank brought. No rank may have brought more of its own in an earlier step.
    """
    rings = Rings.of(op.config)
    num_chunks = -(-num_tokens // rings.chunk_tokens)
    rows = op._memory.view(Region.FORWARDED_ROWS).view(rings.num_nodes, -1, rings.chunk_tokens, rings.gpus_per_node)
    lines = op._memory.view(Region.FORWARDED_LINES)[:, :num_chunks]
    is_line = torch.arange(rings.chunk_tokens, device=lines.device) < lines[:, :, None]
    came = (rows[:, :num_chunks] >= 0).any(3) & is_line
    came[op.config.rank // rings.gpus_per_node] = False
    return int(came.sum())
