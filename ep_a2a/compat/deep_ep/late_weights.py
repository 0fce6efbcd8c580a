"""Router weights that are known at combine only, as in DeepEP's low-latency mode.

DeepEP weighs the rows where they come back to, one row per expert. Our ranks weigh and add before they send, one row
per rank, so the weights must reach them first: by a dispatch of a small op, whose rows lie as those of the tokens do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_a2a.compat.deep_ep.ops import OpShape
from ep_a2a.config import Layout
from ep_a2a.kernels.open_step import received_weights

if TYPE_CHECKING:
    from ep_a2a.compat.deep_ep.ops import Ops
    from ep_a2a.kernels.op import EpDispatchCombineOp

CARRIER_HIDDEN_DIM = 8
"""Of bf16: the 16 bytes that a row has at least. Only its weights matter."""


class WeightCarriers:
    """Small ops that bring weights, one for each size.

    Args:
        ops: makes them. index: of memory that no other op uses.
    """

    def __init__(self, ops: Ops, index: int) -> None:
        self._ops, self._index = ops, index
        self._blank: dict[OpShape, torch.Tensor] = {}

    def bring(self, op: EpDispatchCombineOp, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Makes `weights` those that op's open step multiplies by in combine. Collective.

        Args:
            op: of layout expert_major. ids: int32 [T, K], of its open dispatch. weights: float32 [T, K], contiguous.
        """
        config = op.config
        shape = OpShape(
            torch.bfloat16, CARRIER_HIDDEN_DIM, config.topk, config.total_experts, config.max_num_inp_token_per_rank,
            Layout.RANK_MAJOR,
        )  # fmt: skip
        blank = self._blank_rows(shape)  # before the op, as the weights of one are (low_latency.py)
        carrier = self._ops.get(shape, self._index)
        carrier.dispatch(blank[0, : ids.shape[0]], weights, None, ids)
        received_weights(op).copy_(received_weights(carrier))
        carrier.combine(blank, None, None)

    def _blank_rows(self, shape: OpShape) -> torch.Tensor:
        blank = self._blank.get(shape)
        if blank is None:
            sizes = (self._ops.num_ranks, shape.max_num_tokens, shape.hidden_dim)
            blank = self._blank[shape] = torch.zeros(sizes, dtype=shape.dtype, device=self._ops.device)
        return blank
