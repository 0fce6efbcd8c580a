"""DeepEP's low-latency mode, on ops of layout expert_major."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ep_a2a.compat.combine_time_weights import WeightExchange
from ep_a2a.compat.deep_ep.handles import LowLatencyHandle
from ep_a2a.compat.deep_ep.layouts import check_num_experts
from ep_a2a.compat.deep_ep.ops import OpShape
from ep_a2a.compat.deep_ep.steps import Hook, Step
from ep_a2a.config import FP8_GROUP_SIZE, Layout, ScaleFormat
from ep_a2a.errors import DtypeError, InputError, ShapeError, StateError, TooManyTokensError
from ep_a2a.ops import inputs
from ep_a2a.ops.arguments import CombineInputs

if TYPE_CHECKING:
    from ep_a2a.compat.deep_ep.ops import Ops
    from ep_a2a.compat.deep_ep.steps import Steps
    from ep_a2a.interface import DispatchResult
    from ep_a2a.ops.op import EpDispatchCombineOp

PACKED_SCALES = 4
"""UE8M0 bytes in an int32 of DeepEP's packed scales."""


class LowLatencyInput(NamedTuple):
    """The arguments of Buffer.low_latency_dispatch."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    max_num_tokens: int
    num_experts: int
    scale_format: ScaleFormat | None
    recv_stats: torch.Tensor | None


class LowLatencyReceived(NamedTuple):
    """The tensors of a dispatch, which the hook fills: rows [E, W * M, H], scales with DeepEP's strides, counts [E]."""

    x: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor


class LowLatencyMode:
    """Runs dispatch and combine of a buffer's low-latency mode on the current stream.

    Args:
        ops: makes the ops. steps: the buffer's open dispatches, of both modes.
    """

    def __init__(self, ops: Ops, steps: Steps) -> None:
        self._ops, self._steps = ops, steps
        self._exchanges: WeakKeyDictionary[EpDispatchCombineOp, WeightExchange] = WeakKeyDictionary()
        self._ones: dict[tuple[int, int], torch.Tensor] = {}

    def dispatch(
        self, given: LowLatencyInput, in_halves: bool
    ) -> tuple[LowLatencyReceived, LowLatencyHandle, torch.Tensor]:
        """Sends the tokens, and receives. With `in_halves` the hook of the handle's step receives.

        Returns:
            The tensors that are filled, the handle, and the ids that it keeps.
        """
        shape = self._shape(given)
        self._check(given, shape)
        # always a copy: the caller may overwrite its tensor while the handle lives
        ids = given.topk_idx.to(torch.int32, copy=True)
        handle = LowLatencyHandle(shape, ids, given.topk_idx, given.topk_weights is not None)
        weights = self._unit_weights(shape)[: ids.shape[0]] if given.topk_weights is None else given.topk_weights
        step = handle.step = self._step(shape)
        op = step.op
        got = (op.dispatch_send if in_halves else op.dispatch)(given.x, weights, None, ids)
        self._steps.add(step, keeps_rows=True)
        scales = None if got[2] is None else _column_major_like(got[2])
        received = LowLatencyReceived(got[0], scales, op.expert_recv_count)

        def receive() -> None:
            op.dispatch_recv()
            _finish(got, received, given.recv_stats)

        if in_halves:
            step.dispatch_hook = Hook(receive, op.device)
        else:
            _finish(got, received, given.recv_stats)
        return received, handle, ids

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: LowLatencyHandle,
        zero_copy: bool,
        out: torch.Tensor | None,
        in_halves: bool,
    ) -> torch.Tensor:
        """Sends the experts' rows back, weighed, and adds them. With `in_halves` the hook of the step adds.

        Returns:
            [T, H], this rank's tokens.
        """
        if tuple(topk_idx.shape) != tuple(handle.ids.shape):
            raise ShapeError(f"topk_idx of the dispatch, {tuple(handle.ids.shape)}", str(tuple(topk_idx.shape)))
        rows = self.combine_buffer(handle) if zero_copy else x
        # the dispatch's own tensor needs no comparison
        compared = None if topk_idx is handle.topk_idx else topk_idx.to(torch.int32)
        if out is None:
            out = torch.empty(topk_idx.shape[0], x.shape[-1], dtype=x.dtype, device=x.device)
        _check_combine(handle, CombineInputs(rows, None, compared, out, (None, None)))
        step = self._step_with_weights(handle, topk_weights)
        op = step.op
        if not in_halves:
            op.combine(rows, None, compared, out=out)
            step.close()
            return out
        op.combine_send(rows, None, compared, out=out)

        def receive() -> None:
            op.combine_recv()
            step.close()

        step.combine_hook = Hook(receive, op.device)
        return out

    def combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Returns memory [E, W * M, H] of the op that holds, or last held, the handle's dispatch."""
        op = handle.step.op
        dtype = op.config.combined_dtype
        return op.get_registered_combine_input_buffer(dtype).view(*handle.step.rows_shape)

    def _step_with_weights(self, handle: LowLatencyHandle, topk_weights: torch.Tensor | None) -> Step:
        """Returns the handle's step, open, once the experts' ranks have the weights to multiply by."""
        step = handle.step
        if step.is_open and step.dispatch_hook is not None and not step.dispatch_hook.is_done:
            raise StateError("the hook of low_latency_dispatch to be called before combine", "combine", "Call hook().")
        if step.is_open and step.combine_hook is not None:
            step.combine_hook.finish()  # this is a second combine of the same dispatch
        if topk_weights is None and not (handle.has_weights and step.is_open):
            raise InputError("topk_weights", "None", "Pass them here, or to low_latency_dispatch and combine once.")
        if not step.is_open:
            self._steps.expect_rows(step)
            return self._reopen(handle, topk_weights)
        if topk_weights is not None:
            self._exchanges[step.op].run(topk_weights, handle.ids.shape[0], handle.shape.max_num_tokens)
        return step

    def _reopen(self, handle: LowLatencyHandle, topk_weights: torch.Tensor | None) -> Step:
        """Makes a handle's dispatch the open step of an op again, by a dispatch of zeros with the weights."""
        step, shape = self._step(handle.shape), handle.shape
        zeros = torch.zeros(handle.ids.shape[0], shape.hidden_dim, dtype=shape.dtype, device=handle.ids.device)
        step.op.dispatch(zeros, topk_weights, None, handle.ids)
        self._steps.add(step, keeps_rows=True)
        handle.step = step
        return step

    def _step(self, shape: OpShape) -> Step:
        """Returns a new step on an op that has no open one."""
        index = self._steps.free_index()
        op = self._ops.get(shape, index)
        if op not in self._exchanges:
            # DeepEP weighs rows at the token's rank. Our ops weigh at the experts' ranks, so combine's weights travel.
            self._exchanges[op] = WeightExchange(op)
        num_rows = self._ops.num_ranks * shape.max_num_tokens
        return Step(op, index, (op.config.num_local_experts, num_rows, shape.hidden_dim))

    def _unit_weights(self, shape: OpShape) -> torch.Tensor:
        """Returns ones [M, K] in place of weights that are not known yet.

        The first call for a shape comes before the op is made. Making an op synchronises the device and cannot be
        captured, so the ones are valid on all streams and no part of a captured graph.
        """
        key = (shape.max_num_tokens, shape.topk)
        if key not in self._ones:
            self._ones[key] = torch.ones(key, dtype=torch.float32, device=self._ops.device)
        return self._ones[key]

    def _shape(self, given: LowLatencyInput) -> OpShape:
        return OpShape(
            given.x.dtype,
            given.x.shape[-1],
            given.topk_idx.shape[-1],
            given.num_experts,
            given.max_num_tokens,
            Layout.EXPERT_MAJOR,
            scale_format=given.scale_format,
        )

    def _check(self, given: LowLatencyInput, shape: OpShape) -> None:
        check_num_experts(given.num_experts, self._ops.num_ranks)
        if given.x.shape[0] > given.max_num_tokens:
            raise TooManyTokensError(
                f"at most {given.max_num_tokens} tokens (num_max_dispatch_tokens_per_rank)",
                str(given.x.shape[0]),
                "Raise num_max_dispatch_tokens_per_rank on every rank, or split the batch.",
            )
        if given.topk_idx.dtype not in (torch.int64, torch.int32):
            raise DtypeError("topk_idx of dtype torch.int64 or torch.int32", str(given.topk_idx.dtype))
        group = FP8_GROUP_SIZE * (PACKED_SCALES if given.scale_format is ScaleFormat.UE8M0 else 1)
        if given.scale_format is not None and shape.hidden_dim % group:
            raise ShapeError(f"a hidden size that is a multiple of {group} with these scales", str(shape.hidden_dim))
        stats, num_local_experts = given.recv_stats, given.num_experts // self._ops.num_ranks
        if stats is not None and (stats.dtype != torch.int32 or tuple(stats.shape) != (num_local_experts,)):
            raise ShapeError(
                f"cumulative_local_expert_recv_stats int32 [{num_local_experts}]", f"{stats.dtype} {list(stats.shape)}"
            )


def _check_combine(handle: LowLatencyHandle, given: CombineInputs) -> None:
    """Checks a combine's arguments as its op will, before the weights are exchanged."""
    op, num_tokens = handle.step.op, handle.ids.shape[0]
    inputs.check_combine(op.config, op.device, given, handle.step.rows_shape[:2], num_tokens)
    inputs.check_alignment("input", given.rows)
    if given.out is not None:
        inputs.check_out(op.config, op.device, given.out, num_tokens)
        inputs.check_outside(op.memory.dispatch_addresses, out=given.out)
        inputs.check_apart("out", given.out, given.rows, "the rows to be combined")


def _column_major_like(scales: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor for an op's scales [E, R, S], with DeepEP's strides; UE8M0 bytes are four to an int32."""
    num_experts, num_rows, num_scales = scales.shape
    dtype = scales.dtype
    if dtype == torch.uint8:
        num_scales, dtype = num_scales // PACKED_SCALES, torch.int32
    return torch.empty(num_experts, num_scales, num_rows, dtype=dtype, device=scales.device).transpose(1, 2)


def _finish(got: DispatchResult, received: LowLatencyReceived, recv_stats: torch.Tensor | None) -> None:
    """Copies the scales and adds to the statistics, once the rows have come."""
    if received.scales is not None and got[2] is not None:
        received.scales.copy_(got[2].view(received.scales.dtype))
    if recv_stats is not None:
        recv_stats += received.counts
