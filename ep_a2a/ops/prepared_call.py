"""What follows from the arguments of a dispatch, their addresses apart: found out once for all calls like it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ep_a2a.config import FP8_DTYPE, Layout
from ep_a2a.interface import DispatchResult
from ep_a2a.kernels.layout import Region
from ep_a2a.ops import inputs
from ep_a2a.ops.base import leads, num_rows
from ep_a2a.ops.failures import wire_word
from ep_a2a.ops.memo import Remembered

if TYPE_CHECKING:
    from ep_a2a.ops.memory import BoundMemory


class AcceptedDispatch(NamedTuple):
    """What a dispatch comes to.

    Attributes:
        num_tokens: T. max_num_tokens: the step's. wire_word: what the ranks compare. row_limit: R.
        scales_travel: those that were given.
        lead: leading sizes of the rows that the experts work on.
        received: what dispatch returns, views of the op's memory: (tokens, weights, scales, indices, total_recv).
    """

    num_tokens: int
    max_num_tokens: int
    wire_word: int
    row_limit: int
    scales_travel: bool
    lead: tuple[int, ...]
    received: DispatchResult


class Dispatches:
    """The dispatches that an op has accepted.

    Args:
        memory: the op's. device: where its arguments must lie.
    """

    def __init__(self, memory: BoundMemory, device: torch.device) -> None:
        self._memory, self._config, self._device = memory, memory.config, device
        self._accepted: Remembered[AcceptedDispatch] = Remembered()
        self._views: Remembered[DispatchResult] = Remembered()

    def nothing(self) -> AcceptedDispatch:
        """Before the first dispatch."""
        empty, most = torch.empty(0, device="cpu"), self._config.max_num_inp_token_per_rank
        nothing = DispatchResult(empty, None, None, empty, empty)
        return AcceptedDispatch(0, most, 0, 0, False, (), nothing)

    def accept(
        self, tokens: torch.Tensor, weights: torch.Tensor | None, scales: torch.Tensor | None, indices: torch.Tensor,
        max_num_tokens: int, pad_id: int,
    ) -> AcceptedDispatch:  # fmt: skip
        """What these arguments come to, as EpDispatchCombineOp.dispatch takes them.

        Raises:
            InputError: one does not fit.
        """
        key = (max_num_tokens, pad_id, *map(inputs.signature, (tokens, weights, scales, indices)))
        return self._accepted.of(key, lambda: self._check(tokens, weights, scales, indices, max_num_tokens, pad_id))

    def _check(
        self, tokens: torch.Tensor, weights: torch.Tensor | None, scales: torch.Tensor | None, indices: torch.Tensor,
        limit: int, pad_id: int,
    ) -> AcceptedDispatch:  # fmt: skip
        config = self._config
        inputs.check_dispatch(config, self._device, tokens, weights, scales, indices, limit, pad_id)
        scales = inputs.travelling_scales(config, scales)
        has_scales = config.casts_in_dispatch or scales is not None
        word = wire_word(limit, weights is not None, has_scales, config.casts_in_dispatch and tokens.dtype != FP8_DTYPE)
        lead, expert_lead = leads(config, limit)
        shapes = (lead, expert_lead, weights is not None, has_scales, None if scales is None else scales.dtype)
        received = self._views.of(shapes, lambda: self._make_views(*shapes))
        row_limit, travel = num_rows(config, limit), scales is not None
        return AcceptedDispatch(tokens.shape[0], limit, word, row_limit, travel, expert_lead, received)

    def _make_views(
        self,
        lead: tuple[int, ...],
        expert_lead: tuple[int, ...],
        has_weights: bool,
        has_scales: bool,
        scale_dtype: torch.dtype | None,
    ) -> DispatchResult:
        config, view = self._config, self._memory.view
        if scale_dtype is None:
            scale_dtype = torch.float32 if config.scale_bytes == 4 else torch.uint8
        tokens, scales = Region.TOKENS, Region.SCALES
        weights, weights_shape = Region.WEIGHTS, (*lead, config.topk)
        if config.layout == Layout.EXPERT_MAJOR:
            tokens, scales = Region.EXPERT_ROWS, Region.EXPERT_SCALES
            weights, weights_shape = Region.EXPERT_WEIGHTS, expert_lead
        return DispatchResult(
            view(tokens, (*expert_lead, config.hidden_dim)),
            view(weights, weights_shape) if has_weights else None,
            view(scales, (*expert_lead, config.num_scales), scale_dtype) if has_scales else None,
            view(Region.INDICES, (*lead, config.topk)),
            view(Region.TOTAL_RECV),
        )

    def source_positions(self, max_num_tokens: int, counts: list[int]) -> torch.Tensor:
        """Positions of the rows that were received, int32 [sum of counts], in a step of max_num_tokens."""
        positions = self._memory.view(Region.SOURCE_POSITIONS)
        if self._config.layout == Layout.COMPACT:
            return positions[: sum(counts)]
        starts = [source * max_num_tokens for source in range(len(counts))]
        return torch.cat([positions[start : start + count] for start, count in zip(starts, counts)])
