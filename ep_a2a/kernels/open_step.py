"""What an op's memory holds while a step is open, for layers that put work of their own between its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.kernels.layout import Region

if TYPE_CHECKING:
    import torch

    from ep_a2a.kernels.op import EpDispatchCombineOp


def received_weights(op: EpDispatchCombineOp) -> torch.Tensor:
    """The router weights of the received rows, float32 [W, max_num_tokens, K], by source as in layout rank_major.

    In layout expert_major combine multiplies by them. Between dispatch and combine no other rank writes here, so that
    weights which become known only then may take the place of those that travelled with the tokens.
    """
    config = op.config
    return op._memory.view(Region.WEIGHTS, (config.world_size, op._max_num_tokens, config.topk))
