"""DeepEP's low-latency mode, on ops of layout expert_major."""

import functools
from typing import Any

import torch

from ep_a2a.compat.combine_time_weights import LATE_WEIGHTS
from ep_a2a.compat.deep_ep.buffer_base import BufferBase, Tokens
from ep_a2a.compat.deep_ep.layouts import check_num_experts
from ep_a2a.compat.deep_ep.ops import Handle, Hook, OpShape
from ep_a2a.compat.deep_ep.utils import EventOverlap
from ep_a2a.compat.expert_row_sources import expert_row_sources
from ep_a2a.compat.parameters import refused
from ep_a2a.config import FP8_GROUP_SIZE, Layout, ScaleFormat
from ep_a2a.errors import DtypeError, InputError, ShapeError, StateError, TooManyTokensError
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.ops.inputs import address_of

PACKED_SCALES = 4
"""UE8M0 bytes in an int32 of DeepEP's packed scales."""


class LowLatencyHandle(Handle):
    """Handle of `low_latency_dispatch`, with DeepEP's five places: src_info, layout_range,
    num_max_dispatch_tokens_per_rank, hidden, num_experts.

    src_info is int32 [E, W * M]: for each row of a local expert its token at the source rank. layout_range is int64
    [E, W]: for each source rank the position of its first row, shifted by 32 bits, plus the number of its rows. Both
    are computed on the device by the first access, which must come between the dispatch and its combine.

    Args:
        shape: of the op. topk_idx: [T, K], this rank's ids.
    """

    def __init__(self, shape: OpShape, topk_idx: torch.Tensor) -> None:
        self.shape, self.topk_idx, self.step_tokens = shape, topk_idx, shape.max_tokens
        # always a copy: the caller may overwrite its tensor while the handle lives
        self.ids = topk_idx.to(torch.int32, copy=True)

    def __getitem__(self, place: int | slice) -> Any:
        # an IndexError past the end is what ends a loop, or an unpacking, of the handle
        places = range(len(self))[place]
        return tuple(map(self._at, places)) if isinstance(places, range) else self._at(places)

    def _at(self, place: int) -> Any:
        if place < 2:
            return self._sources[place]
        return (self.step_tokens, self.shape.hidden_dim, self.shape.num_experts)[place - 2]

    def __len__(self) -> int:
        return 5

    @functools.cached_property
    def _sources(self) -> tuple[torch.Tensor, torch.Tensor]:
        return expert_row_sources(self.step.op, self.step.record)


class LowLatencyMode(BufferBase):
    """The calls of a buffer's low-latency mode."""

    @outside_graphs
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[Tokens, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Sends each token to its experts' ranks, where every expert gets rows of its own. The host does not wait.

        Args:
            x: [T, H] bf16 (also fp16, fp32), T <= num_max_dispatch_tokens_per_rank.
            topk_idx: [T, K] int64 or int32 expert ids; -1 selects nothing. An id may not be repeated in a row.
            num_max_dispatch_tokens_per_rank: M, equal on all ranks.
            num_experts: over all ranks, a multiple of their number.
            cumulative_local_expert_recv_stats: int32 [E], to which this step's counts are added.
            dispatch_wait_recv_cost_stats: not supported.
            use_fp8: cast rows to fp8 with a scale per 128 elements; H a multiple of 128.
            round_scale: round scales up to powers of two.
            use_ue8m0: with round_scale, pack the scales' exponents, four to an int32; H a multiple of 512.
            async_finish: run on the communication stream; the returned event marks the end.
            return_recv_hook: only send; the hook receives, on the stream of this call.
            topk_weights: not DeepEP's. float32 [T, K], to travel with the tokens. low_latency_combine may then be given
                None, which saves a small exchange.

        Returns:
            (recv_x, counts, handle, event, hook or None).

            - recv_x [E, W * M, H]; with use_fp8 (fp8 rows, scales). Scales are [E, W * M, H / 128] float32, or
              [E, W * M, H / 512] int32; the strides of their last two dimensions are exchanged.
            - counts int32 [E]: rows of each expert, which ascend by source rank and token. Rows past them hold
              anything.

            Rows and counts lie in the op's memory. They are valid until the combine of this dispatch, or until
            max_open_steps further dispatches, if they come before. A combine whose dispatch is over counts as one.

        Raises:
            InputError: an argument does not fit.
        """
        self._require_open()
        _one_of(async_finish, return_recv_hook)
        if dispatch_wait_recv_cost_stats is not None:
            raise refused("deep_ep", "Buffer.low_latency_dispatch", "dispatch_wait_recv_cost_stats")
        shape = OpShape(
            x.dtype,
            x.shape[-1],
            topk_idx.shape[-1],
            num_experts,
            num_max_dispatch_tokens_per_rank,
            Layout.EXPERT_MAJOR,
            scale_format=_scale_format(round_scale, use_ue8m0) if use_fp8 else None,
        )
        stats = cumulative_local_expert_recv_stats
        self._check_dispatch(x, topk_idx, shape, stats)
        handle = LowLatencyHandle(shape, topk_idx)
        (rows, counts), event = self._stream.run(
            lambda: self._send_tokens(handle, x, topk_weights, stats, return_recv_hook),
            (x, handle.ids, topk_weights, stats),
            None,
            async_finish,
        )
        return rows, counts, handle, event, handle.step.dispatch_hook

    @outside_graphs
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Adds, for each of this rank's tokens, its experts' rows, each multiplied by its weight.

        The experts' ranks multiply and add in float32, and send one row per token. Unless the dispatch was given the
        weights, a small exchange brings them to these ranks first.

        Args:
            x: [E, W * M, H], the experts' rows in the order of low_latency_dispatch.
            topk_idx: [T, K], as given to the dispatch; other ids are an error.
            topk_weights: float32 [T, K]; None, or without effect, if low_latency_dispatch was given them.
            handle: of the dispatch. If it has been combined before, a dispatch of zeros repeats it first.
            use_logfmt, combine_wait_recv_cost_stats: not supported.
            zero_copy: take the rows from get_next_low_latency_combine_buffer(handle) instead of x. Saves no time: no
                combine copies its input.
            async_finish: run on the communication stream; the returned event marks the end.
            return_recv_hook: only send rows (and exchange weights); the hook receives, on the stream of this call.
            out: [T, H] to write to.

        Returns:
            ([T, H] of x's dtype, or `out`; event; hook or None).

        Raises:
            InputError, ForeignIndicesError: an argument does not fit.
            StateError: the hook of low_latency_dispatch has not been called. Or a later dispatch has overwritten the
                rows of this one; that is an error also where the experts had read them before.
            UnsupportedError: use_logfmt, or statistics of waits.
        """
        self._require_open()
        _one_of(async_finish, return_recv_hook)
        if combine_wait_recv_cost_stats is not None:
            raise refused("deep_ep", "Buffer.low_latency_combine", "combine_wait_recv_cost_stats")
        if use_logfmt:
            raise refused("deep_ep", "Buffer.low_latency_combine", "use_logfmt")
        if tuple(topk_idx.shape) != tuple(handle.ids.shape):
            raise ShapeError(f"topk_idx of the dispatch, {tuple(handle.ids.shape)}", str(tuple(topk_idx.shape)))
        address_of("topk_idx", topk_idx)
        rows = _combine_buffer(handle) if zero_copy else x
        # the dispatch's own tensor needs no comparison
        ids = None if topk_idx is handle.topk_idx else topk_idx.to(torch.int32)
        result = torch.empty(len(topk_idx), x.shape[-1], dtype=x.dtype, device=x.device) if out is None else out

        def send() -> torch.Tensor:
            weights = self._late_weights(handle, topk_weights)
            step, op = handle.step, handle.step.op
            if return_recv_hook:
                op.combine_send(rows, weights, ids, out=result)
                step.combine_hook = Hook(op.combine_recv, op.device)
            else:
                op.combine(rows, weights, ids, out=result)
            return result

        given = (x, ids, topk_weights, result, handle.ids)
        combined, event = self._stream.run(send, given, None, async_finish)
        return combined, event, handle.step.combine_hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Returns memory [E, W * M, H] for the rows of a combine with zero_copy, of the dtype of dispatch's tokens."""
        self._require_open()
        return _combine_buffer(handle)

    def _send_tokens(
        self,
        handle: LowLatencyHandle,
        tokens: torch.Tensor,
        weights: torch.Tensor | None,
        recv_stats: torch.Tensor | None,
        in_halves: bool,
    ) -> tuple[Tokens, torch.Tensor]:
        """Sends the tokens, and receives. With `in_halves` the hook of the handle's step receives.

        Returns:
            The rows, with their scales if they have any; counts by expert.
        """
        rows, _, scales, _, _ = self._launch(handle, tokens, weights, in_halves=in_halves)
        step, op = handle.step, handle.step.op
        # the op hands out one object for many steps, and SGLang empties what its experts have read (`Tensor.set_`)
        rows, counts = rows.view_as(rows), op.expert_recv_count

        def receive() -> None:
            if in_halves:
                op.dispatch_recv()
            if recv_stats is not None:
                recv_stats.add_(counts)

        if in_halves:
            step.dispatch_hook = Hook(receive, op.device)
        else:
            receive()
        return rows if scales is None else (rows, scales.view_as(scales)), counts

    def _late_weights(self, handle: LowLatencyHandle, topk_weights: torch.Tensor | None) -> torch.Tensor | None:
        """Makes the handle's dispatch the open step of its op. Returns the weights that combine must bring there."""
        step = handle.step
        if step.is_open and step.dispatch_hook is not None and not step.dispatch_hook.is_done:
            raise StateError("the hook of low_latency_dispatch to be called before combine", "combine", "Call hook().")
        if step.is_open and step.combine_hook is not None:
            step.combine_hook.finish()  # this is a second combine of the same dispatch
        if step.is_open and step.record.tag != LATE_WEIGHTS:
            return None
        if topk_weights is None:
            raise InputError("topk_weights", "None", "Pass them here, or to low_latency_dispatch and combine once.")
        if step.is_open:
            return topk_weights
        self._steps.expect_rows(step)
        self._reopen(handle, topk_weights)
        return None

    def _check_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, shape: OpShape, recv_stats: torch.Tensor | None
    ) -> None:
        check_num_experts(shape.num_experts, self._ops.world_size)
        if x.shape[0] > shape.max_tokens:
            raise TooManyTokensError(
                f"at most {shape.max_tokens} tokens (num_max_dispatch_tokens_per_rank)",
                str(x.shape[0]),
                "Raise num_max_dispatch_tokens_per_rank on every rank, or split the batch.",
            )
        if topk_idx.dtype not in (torch.int64, torch.int32):
            raise DtypeError("topk_idx of dtype torch.int64 or torch.int32", str(topk_idx.dtype))
        address_of("topk_idx", topk_idx)  # torch would read it
        group = FP8_GROUP_SIZE * (PACKED_SCALES if shape.scale_format is ScaleFormat.UE8M0 else 1)
        if shape.scale_format is not None and shape.hidden_dim % group:
            raise ShapeError(f"a hidden size that is a multiple of {group} with these scales", str(shape.hidden_dim))
        expected = (shape.num_experts // self._ops.world_size,)
        if recv_stats is not None and (recv_stats.dtype != torch.int32 or tuple(recv_stats.shape) != expected):
            raise ShapeError(
                f"cumulative_local_expert_recv_stats int32 {list(expected)}",
                f"{recv_stats.dtype} {list(recv_stats.shape)}",
            )


def _combine_buffer(handle: LowLatencyHandle) -> torch.Tensor:
    """Returns memory [E, W * M, H] of the op that holds, or last held, the handle's dispatch."""
    op = handle.step.op
    return op.get_registered_combine_input_buffer(op.config.combined_dtype).view(*handle.step.rows_shape)


def _scale_format(round_scale: bool, use_ue8m0: bool) -> ScaleFormat:
    if use_ue8m0 and not round_scale:
        raise InputError("round_scale with use_ue8m0, whose scales are powers of two", "use_ue8m0 alone")
    if use_ue8m0:
        return ScaleFormat.UE8M0
    return ScaleFormat.FLOAT32_POWER_OF_TWO if round_scale else ScaleFormat.FLOAT32


def _one_of(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise InputError("async_finish or return_recv_hook", "both")
