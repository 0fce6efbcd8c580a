"""What dispatch returns: views of an op's memory, made once for each shape to spare host time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.config import Layout
from ep_a2a.kernels.layout import Region

if TYPE_CHECKING:
    from ep_a2a.kernels.arguments import DispatchArguments
    from ep_a2a.kernels.base_op import DispatchResult
    from ep_a2a.kernels.op_memory import BoundMemory

MAX_CACHED_VIEWS = 1024


class DispatchViews:
    """Makes and keeps the tensors that dispatch returns.

    Args:
        memory: the op's.
    """

    def __init__(self, memory: BoundMemory) -> None:
        self._memory = memory
        self._cache: dict[tuple[Any, ...], DispatchResult] = {}

    def of(self, args: DispatchArguments, lead: tuple[int, ...], expert_lead: tuple[int, ...]) -> DispatchResult:
        """(tokens, weights, scales, indices, total_recv) of a step.

        Args:
            args: the step's.
            lead: leading sizes of the received ids. expert_lead: of the rows that the experts work on.
        """
        has_scales = self._memory.config.casts_in_dispatch or args.scales is not None
        scale_dtype = None if args.scales is None else args.scales.dtype
        key = (lead, expert_lead, args.weights is not None, has_scales, scale_dtype)
        views = self._cache.get(key)
        if views is None:
            if len(self._cache) >= MAX_CACHED_VIEWS:
                self._cache.clear()
            views = self._cache[key] = self._make(*key)
        return views

    def _make(
        self,
        lead: tuple[int, ...],
        expert_lead: tuple[int, ...],
        has_weights: bool,
        has_scales: bool,
        scale_dtype: torch.dtype | None,
    ) -> DispatchResult:
        config, view = self._memory.config, self._memory.view
        if scale_dtype is None:
            scale_dtype = torch.float32 if config.scale_bytes == 4 else torch.uint8
        tokens, scales = Region.TOKENS, Region.SCALES
        weights, weights_shape = Region.WEIGHTS, (*lead, config.topk)
        if config.layout == Layout.EXPERT_MAJOR:
            tokens, scales = Region.EXPERT_ROWS, Region.EXPERT_SCALES
            weights, weights_shape = Region.EXPERT_WEIGHTS, expert_lead
        return (
            view(tokens, (*expert_lead, config.hidden_dim)),
            view(weights, weights_shape) if has_weights else None,
            view(scales, (*expert_lead, config.num_scales), scale_dtype) if has_scales else None,
            view(Region.INDICES, (*lead, config.topk)),
            view(Region.TOTAL_RECV),
        )

    def source_positions(self, max_num_tokens: int, counts: list[int]) -> torch.Tensor:
        """Positions of the rows that were received, int32 [sum of counts], in a step of max_num_tokens."""
        positions = self._memory.view(Region.SOURCE_POSITIONS)
        if self._memory.config.layout == Layout.COMPACT:
            return positions[: sum(counts)]
        starts = [source * max_num_tokens for source in range(len(counts))]
        return torch.cat([positions[start : start + count] for start, count in zip(starts, counts)])
