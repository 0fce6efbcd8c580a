"""DeepEP's `Buffer` on this package's ops: names, arguments and results of V1 (commit 567632d)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.compat.deep_ep.buffer_base import BufferBase
from ep_a2a.compat.deep_ep.layouts import dispatch_layout
from ep_a2a.compat.deep_ep.low_latency import LowLatencyInput
from ep_a2a.compat.deep_ep.normal import TokenLayout
from ep_a2a.compat.parameters import remedy_of
from ep_a2a.config import ScaleFormat
from ep_a2a.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from ep_a2a.compat.deep_ep.config import Config
    from ep_a2a.compat.deep_ep.handles import LowLatencyHandle, NormalHandle
    from ep_a2a.compat.deep_ep.normal import Bias
    from ep_a2a.compat.deep_ep.steps import Hook
    from ep_a2a.compat.deep_ep.utils import EventOverlap

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Buffer(BufferBase):
    """Expert-parallel all-to-all with DeepEP's interface, inside one node.

    All ranks make the same calls in the same order. Construction is collective, as is the first call of each shape,
    which makes an op. Ops allocate their memory themselves, and `destroy` frees it; the numbers of bytes have no
    effect. docs/deepep.md lists the differences from DeepEP.

    Args:
        group: the ranks; any backend of torch.distributed.
        num_nvl_bytes, num_rdma_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric:
            DeepEP's, without effect. A warning names once those that were given.
        low_latency_mode: DeepEP's, without effect: both modes can always be called.
        explicitly_destroy: only `destroy` frees memory. Without it, garbage collection of the buffer does, too.
        enable_shrink, comm: not supported.
        device: not DeepEP's. Where tokens are; None = the current CUDA device, or CPU without one.
        max_num_tokens_per_rank: not DeepEP's. The most tokens that any rank brings in normal mode, equal on all ranks.
            One op of this size is made. With 0, larger ops are made as batches grow.
        max_open_steps: not DeepEP's. The most dispatches that wait for their combine at a time. Each beyond the first
            allocates memory when it is first needed.

    Attributes:
        rank, group_size, group: this rank, their number, the group.
        num_sms: multiprocessors of `get_dispatch_config` and `get_combine_config`.

    Raises:
        UnsupportedError: the ranks are on several nodes, or an argument is not supported.
    """

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts this rank's tokens by rank and by expert. Local; by torch operations.

        Args:
            topk_idx: [T, K] int64 or int32 expert ids; -1 selects nothing.
            num_experts: over all ranks, a multiple of their number.
            previous_event, async_finish, allocate_on_comm_stream: see `dispatch`.

        Returns:
            num_tokens_per_rank int32 [W], num_tokens_per_rdma_rank None, num_tokens_per_expert int32 [num_experts],
            is_token_in_rank bool [T, W], event.
        """
        layout, event = self._stream.run(
            lambda: dispatch_layout(topk_idx, num_experts, self.group_size), topk_idx, previous_event, async_finish
        )
        return (*layout, event)

    def dispatch(
        self,
        x: Tokens,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, list[int] | None, NormalHandle | None, EventOverlap]:
        """Sends each token once to each rank that owns one of its experts.

        Args:
            x: [T, H] bf16 (also fp16, fp32), or (fp8 [T, H], scales [T, S] float32 or int32).
            handle: of an earlier dispatch of T tokens, whose routing is repeated; the host does not wait. topk_idx and
                topk_weights must be None, and the layout tensors have no effect.
            is_token_in_rank, num_tokens_per_expert: of get_dispatch_layout. A token goes to each marked rank; with
                topk_idx only if the rank also owns one of its experts.
            num_tokens_per_rank: required without a handle, without effect. num_tokens_per_rdma_rank: without effect.
            topk_idx, topk_weights: [T, K], float32 weights; or None, both and on all ranks.
            expert_alignment: the list's counts per expert are rounded up to a multiple of this.
            num_worst_tokens: ranks times the most tokens of any rank, equal on all ranks. The host does not wait, and
                this number of rows is returned. 0: the host waits for the counts of all ranks.
            config: only its num_sms has an effect.
            previous_event: with async_finish, the event to wait for in place of the current stream's work.
            async_finish: run on the communication stream; the returned event marks the end.
            allocate_on_comm_stream: without effect; results may be used on both streams.

        Returns:
            (recv_x, recv_topk_idx, recv_topk_weights, tokens per local expert, handle, event).

            - recv_x: as x; rows ascend by source rank and token.
            - recv_topk_idx [N, K]: ids of this rank's experts, counted from 0; -1 for other experts.
            - recv_topk_weights [N, K]: 0 where the id is -1.
            - tokens per local expert: a list, empty with num_worst_tokens.

            Rows past the received ones hold anything; their ids are -1. With a handle the middle four are None.

        Raises:
            InputError: an argument does not fit.
            TooManyTokensError: more tokens than max_num_tokens_per_rank or num_worst_tokens allow.
        """
        self._require_open()
        tokens, scales = x if isinstance(x, tuple) else (x, None)
        num_sms = self._num_sms(config)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise InputError("neither topk_idx nor topk_weights with a handle", "at least one of them")
            work = functools.partial(self._normal.dispatch_again, tokens, scales, handle, num_sms)
            inputs: Any = (tokens, scales, handle.routing.ids)
        else:
            if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
                raise InputError("num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert, or a handle", "less")
            layout = TokenLayout(
                is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens
            )
            work = functools.partial(self._normal.dispatch, tokens, scales, layout, num_sms)
            inputs = (tokens, scales, layout)
        (received, per_expert, made, _), event = self._stream.run(work, inputs, previous_event, async_finish)
        rows = _pair(received.x, received.scales)
        return rows, received.topk_idx, received.topk_weights, per_expert, made, event

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Adds, for each of this rank's tokens, the rows of the ranks that it went to, unweighted.

        If the handle's step is over, a dispatch of zeros repeats it first: correct, and slower. Up to max_open_steps
        dispatches can wait for their combine without that.

        Args:
            x: [N, H], a row for each row that dispatch returned; bf16 after a dispatch of fp8 rows.
            handle: of that dispatch; it may be combined again.
            topk_weights: None, or float32 [N, K] in the order of these rows, to sum as well.
            bias: None, one or two [T, H] to add before the sums are rounded.
            config, previous_event, async_finish, allocate_on_comm_stream: see `dispatch`.

        Returns:
            combined_x [T, H], combined_topk_weights [T, K] or None, event.

        Raises:
            InputError: an argument does not fit.
            UnsupportedError: topk_weights of another number of columns than the dispatch's topk_idx, or after none.
        """
        self._require_open()
        num_sms = self._num_sms(config)
        (combined, weights), event = self._stream.run(
            lambda: self._normal.combine(x, handle, topk_weights, bias, num_sms),
            (x, topk_weights, bias, handle.routing.ids),
            previous_event,
            async_finish,
        )
        return combined, weights, event

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
        _refuse_wait_stats(dispatch_wait_recv_cost_stats)
        given = LowLatencyInput(
            x,
            topk_idx,
            topk_weights,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            _scale_format(round_scale, use_ue8m0) if use_fp8 else None,
            cumulative_local_expert_recv_stats,
        )
        (received, handle, _), event = self._stream.run(
            lambda: self._low_latency.dispatch(given, return_recv_hook), given, None, async_finish
        )
        return _pair(received.x, received.scales), received.counts, handle, event, handle.step.dispatch_hook

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
            topk_weights: float32 [T, K]; None if low_latency_dispatch was given them.
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
        _refuse_wait_stats(combine_wait_recv_cost_stats)
        if use_logfmt:
            remedy = remedy_of("deep_ep", "Buffer.low_latency_combine", "use_logfmt")
            raise UnsupportedError("rows of bf16 in combine", "use_logfmt", remedy)
        combined, event = self._stream.run(
            lambda: self._low_latency.combine(x, topk_idx, topk_weights, handle, zero_copy, out, return_recv_hook),
            (x, topk_idx, topk_weights, out, handle.ids),
            None,
            async_finish,
        )
        return combined, event, handle.step.combine_hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Returns memory [E, W * M, H] for the rows of a combine with zero_copy, of the dtype of dispatch's tokens."""
        self._require_open()
        return self._low_latency.combine_buffer(handle)


def _pair(x: torch.Tensor, scales: torch.Tensor | None) -> Tokens:
    return x if scales is None else (x, scales)


def _scale_format(round_scale: bool, use_ue8m0: bool) -> ScaleFormat:
    if use_ue8m0 and not round_scale:
        raise InputError("round_scale with use_ue8m0, whose scales are powers of two", "use_ue8m0 alone")
    if use_ue8m0:
        return ScaleFormat.UE8M0
    return ScaleFormat.FLOAT32_POWER_OF_TWO if round_scale else ScaleFormat.FLOAT32


def _one_of(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise InputError("async_finish or return_recv_hook", "both")


def _refuse_wait_stats(stats: torch.Tensor | None) -> None:
    if stats is not None:
        raise UnsupportedError(
            "no statistics of waits by source rank",
            "a tensor for them",
            remedy_of("deep_ep", "Buffer.low_latency_combine", "combine_wait_recv_cost_stats"),
        )
