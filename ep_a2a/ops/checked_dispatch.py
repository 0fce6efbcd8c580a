"""Validates a dispatch and caches its result views by argument signature."""

from collections.abc import Hashable
from typing import NamedTuple

import torch

from ep_a2a.config import FP8_DTYPE, Layout
from ep_a2a.interface import DispatchResult
from ep_a2a.kernels.layout import WORD_BYTES, Region
from ep_a2a.ops import inputs
from ep_a2a.ops.arguments import Step, leading_dims
from ep_a2a.ops.bounds import Bounds, StepTokens
from ep_a2a.ops.memory import BoundMemory
from ep_a2a.ops.wire_word import wire_word


class CheckedDispatch(NamedTuple):
    """The facts that all dispatches of one argument signature share: everything but the tensors' addresses.

    Attributes:
        num_tokens: T.
        wire_word: the choices that ranks compare, without a tag.
        bounds: what launches take of step_tokens.
        scales_travel: whether the kernels get the given scales.
        stand_in: an empty tensor to send in place of scales that this rank does not have; None to send none.
        received: dispatch's result, views of the op's memory.
        combines: signatures of the combine arguments that fit this dispatch.
    """

    num_tokens: int
    wire_word: int
    bounds: Bounds
    scales_travel: bool
    stand_in: torch.Tensor | None
    received: DispatchResult
    combines: set[Hashable]


def prepare_dispatch(memory: BoundMemory, device: torch.device, step: Step) -> CheckedDispatch:
    """Validate the arguments of a dispatch and make its result views.

    Args:
        memory: the op's.
        device: where the tensors must lie.
        step: the arguments.

    Raises:
        InputError: an argument does not fit.
    """
    config, step_tokens = memory.config, step.step_tokens
    inputs.check_dispatch(config, device, step)
    bounds = Bounds.of(config, step_tokens)
    scales = inputs.travelling_scales(config, step.tokens, step.scales)
    has_weights, has_scales = step.weights is not None, inputs.scales_travel(config, scales)
    word = wire_word(bounds.own, has_weights, has_scales, config.casts_in_dispatch and step.tokens.dtype != FP8_DTYPE)
    scale_dtype = None
    if has_scales:
        scale_dtype = inputs.SCALE_DTYPES[config.scale_bytes][0] if scales is None else scales.dtype
    received = _result_views(memory, step_tokens, has_weights, scale_dtype)
    travel = scales is not None and scales is step.scales
    stand_in = None if travel else scales
    return CheckedDispatch(step.tokens.shape[0], word, bounds, travel, stand_in, received, set())


def _result_views(
    memory: BoundMemory, step_tokens: StepTokens, has_weights: bool, scale_dtype: torch.dtype | None
) -> DispatchResult:
    config, view = memory.config, memory.view
    lead, expert_lead = leading_dims(config, step_tokens)
    tokens = Region.TOKENS
    weights, weights_shape = Region.WEIGHTS, (*lead, config.topk)
    if config.layout == Layout.EXPERT_MAJOR:
        tokens = Region.EXPERT_ROWS
        weights, weights_shape = Region.EXPERT_WEIGHTS, expert_lead
    return DispatchResult(
        view(tokens, (*expert_lead, config.hidden_dim)),
        view(weights, weights_shape) if has_weights else None,
        None if scale_dtype is None else _scales_view(memory, expert_lead, scale_dtype),
        view(Region.INDICES, (*lead, config.topk)),
        view(Region.TOTAL_RECV),
    )


def _scales_view(memory: BoundMemory, lead: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    config = memory.config
    if not config.column_major_scales:
        region = Region.EXPERT_SCALES if config.layout == Layout.EXPERT_MAJOR else Region.SCALES
        return memory.view(region, (*lead, config.num_scales), dtype)
    num_experts, num_rows = lead
    shape = num_experts, config.num_scales * config.scale_bytes // WORD_BYTES, config.column_rows(num_rows)
    columns = memory.view(Region.EXPERT_SCALES, shape, dtype if dtype.itemsize == WORD_BYTES else torch.int32)
    return columns.transpose(1, 2)[:, :num_rows]


def source_positions(memory: BoundMemory, counts: list[int]) -> torch.Tensor:
    """Source positions of the last dispatch's rows, int32 [sum of counts]; counts: rows received from each source."""
    positions = memory.view(Region.SOURCE_POSITIONS)
    starts = memory.view(Region.RECV_COUNTS).tolist()[1]
    return torch.cat([positions[start : start + count] for start, count in zip(starts, counts)])
