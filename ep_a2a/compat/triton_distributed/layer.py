"""EPLowLatencyAllToAllLayer: dispatches tokens to rows by expert, and combines these rows weighted."""

import contextlib
from pathlib import Path

import torch

from ep_a2a.compat.combine_time_weights import LATE_WEIGHTS
from ep_a2a.compat.triton_distributed.contexts import DispatchMetaInfo, PhaseBuffers, create_ep_ll_a2a_ctx
from ep_a2a.errors import AlternationError, DtypeError, InputError, StateError
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.memory.arena import Arena
from ep_a2a.ops.inputs import in_int32
from ep_a2a.telemetry.profiler import StepProfiler

TRACE_FOLDER = "prof"


class EPLowLatencyAllToAllLayer:
    """Sends tokens to the ranks of their experts and back, with Triton-distributed's arguments and shapes.

    Steps use two sets of buffers in turn, so the next dispatch may come before the combine of the last one.
    Construction is collective; all arguments but `rank` must be equal on all ranks.

    Args:
        max_m: M, the most tokens that any rank brings.
        hidden: H, elements of a token.
        topk: K, experts per token.
        online_quant_fp8: dispatch casts tokens to fp8, with a float32 scale per `fp8_gsize` elements. It also takes
            tokens that are cast already, with their scales. Without it tokens travel as they are.
        rank: this rank. num_experts: over all ranks, owned linearly.
        local_world_size: ranks of a node, a divisor of world_size; create_ep_ll_a2a_ctx says more. world_size: W.
        fp8_gsize: elements that share a scale, any divisor of `hidden`. Dispatch's kernel casts in groups of 128 or
            `hidden`; in others torch casts before it, with the same bits.
        dtype: of tokens: bfloat16, float16 or float32; without online_quant_fp8 also float8_e4m3fn, with scales.
            Combine takes and returns this dtype, or bfloat16 for float8_e4m3fn.
        enable_profiling: record spans inside the kernels and on the host, for dump_dispatch_trace and
            dump_combine_trace.
        arena: allocates memory; None takes the symmetric world's, which the first layer makes of all ranks.

    Attributes:
        dispatch_ctx, combine_ctx: the contexts, which know the buffers of the next dispatch and the next combine.

    Raises:
        ConfigError: an argument is impossible. UnsupportedError: an argument is not supported.
        ConfigMismatchError: arguments differ between ranks, or another rank could not come.
        NotInitializedError: no arena is given, and torch.distributed has not been initialised.
        RankTimeoutError: ranks did not come.
    """

    def __init__(
        self,
        max_m: int,
        hidden: int,
        topk: int,
        online_quant_fp8: bool,
        rank: int,
        num_experts: int,
        local_world_size: int,
        world_size: int,
        fp8_gsize: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        enable_profiling: bool = False,
        *,
        arena: Arena | None = None,
    ) -> None:
        self.dispatch_ctx, self.combine_ctx = create_ep_ll_a2a_ctx(
            max_m,
            hidden,
            topk,
            num_experts,
            online_quant_fp8,
            fp8_gsize,
            dtype,
            world_size,
            rank,
            local_world_size=local_world_size,
            arena=arena,
        )
        self.max_m, self.hidden, self.topk, self.rank, self.world_size = max_m, hidden, topk, rank, world_size
        self.num_experts, self.local_world_size = num_experts, local_world_size
        self.num_experts_per_rank = self._phases[0].op.config.num_local_experts
        self.online_quant_fp8, self.fp8_gsize, self.num_groups = online_quant_fp8, fp8_gsize, hidden // fp8_gsize
        self.enable_profiling = enable_profiling
        self._profilers: list[StepProfiler] = []
        if enable_profiling:
            self._phases[0].op.arena.together("recording spans", self._start_profiling)

    def _start_profiling(self) -> None:
        from ep_a2a.telemetry.profiler import StepProfiler

        for number, buffers in enumerate(self._phases):
            self._profilers.append(StepProfiler(buffers.op, f"buffers {number}"))

    def _recorded(self, buffers: PhaseBuffers, phase: str) -> contextlib.AbstractContextManager[None]:
        if not self._profilers:
            return contextlib.nullcontext()
        return self._profilers[self._phases.index(buffers)].call(phase)

    @property
    def _phases(self) -> list[PhaseBuffers]:
        return self.dispatch_ctx.phases

    @outside_graphs
    def dispatch(
        self,
        send_tokens: torch.Tensor,
        send_scales: torch.Tensor | None,
        topk_indices: torch.Tensor,
        *,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, DispatchMetaInfo]:
        """Sends each token to the ranks of its experts, which get a row for each expert that the token names.

        Args:
            send_tokens: [T, H] of dtype, T <= M; with online_quant_fp8 also float8_e4m3fn, on all ranks or on none.
            send_scales: float32 [T, H / fp8_gsize] of fp8 tokens, else None.
            topk_indices: int32 or int64 [T, K] expert ids; ids outside [0, num_experts) are dropped slots.
            topk_weights: not Triton-distributed's. float32 [T, K], or None on all ranks. Weights given here travel with
                the tokens. Combine is then given None, which saves an exchange.

        Returns:
            (recv_token, recv_scale, expert_recv_count, dispatch_meta).

            - recv_token [num_experts_per_rank, W * M, H]: each expert's rows from the front, ascending by source rank
              and token. Rows past expert_recv_count hold anything.
            - recv_scale float32 [num_experts_per_rank, W * M, H / fp8_gsize]; None if tokens have no scales.
            - expert_recv_count int32 [num_experts_per_rank]: rows of each expert.
            - dispatch_meta: an argument of combine.

            The tensors have fixed addresses in each of the two sets of buffers, and are valid until the combine of
            this dispatch.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            AlternationError: the dispatch before the last one has not been combined.
        """
        buffers = self.dispatch_ctx.buffers
        with self._recorded(buffers, "dispatch"):
            rows, scales, meta = buffers.dispatch(send_tokens, send_scales, topk_indices, topk_weights)
        self.dispatch_ctx.update_phase()
        return rows, scales, buffers.op.expert_recv_count, meta

    @outside_graphs
    def combine(
        self,
        send_tokens: torch.Tensor,
        topk_indices: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        dispatch_meta: DispatchMetaInfo,
        zero_copy: bool = False,
    ) -> torch.Tensor:
        """Multiplies the experts' rows by the router's weights and adds them for each of this rank's tokens.

        An expert's rank weighs and adds its rows in float32, in ascending order of a token's slots, and rounds once.
        The token's rank adds these sums in float32, in ascending rank order. Triton-distributed sends a row for each
        expert and weighs them at the token's rank.

        Args:
            send_tokens: [num_experts_per_rank, W * M, H], one row per row that dispatch returned. Rows past
                expert_recv_count have no effect.
            topk_indices: this rank's own ids, compared with those given to dispatch; or None.
            topk_weights: [T, K] of any floating dtype, of this rank's own tokens; None if dispatch was given them.
            dispatch_meta: from the dispatch to combine. Two open dispatches may be combined in either order, the same
                on all ranks.
            zero_copy: take the rows from combine_ctx.send_tokens_comm_buf, and none from send_tokens.

        Returns:
            [T, H], new memory. A token without a valid expert becomes zeros.

        Raises:
            InputError, ForeignIndicesError: an argument does not fit; nothing was launched, combine can be repeated.
            AlternationError: this dispatch has been combined already.
            StateError: dispatch_meta is of another layer.
        """
        buffers = dispatch_meta.buffers
        if buffers not in self._phases:
            raise StateError("dispatch_meta from a dispatch of this layer", "one of another layer", "Pass that one.")
        op = buffers.op
        op.check()
        step = dispatch_meta.step
        if step is None or step is not op.open_step:
            raise AlternationError(
                "a dispatch that waits for its combine",
                "the dispatch_meta of one that has been combined, or reset",
                "Call combine once for each dispatch, with the dispatch_meta that it returned.",
            )
        if topk_weights is None and step.tag == LATE_WEIGHTS:
            raise InputError(
                "topk_weights, which dispatch was not given", "None", "Pass this rank's topk_weights [T, K]."
            )
        rows = self.combine_ctx.filled_comm_buf() if zero_copy else send_tokens
        weights = None if topk_weights is None else _in_float32(topk_weights)
        out = torch.empty(step.num_tokens, self.hidden, dtype=self.combine_ctx.dtype, device=op.device)
        with self._recorded(buffers, "combine"):
            op.combine(rows, weights, None if topk_indices is None else in_int32(topk_indices), out=out)
        self.combine_ctx.update_phase()
        return out

    def reset(self) -> None:
        """Makes the layer usable again after an error or unfinished steps. Collective; open steps are lost."""
        for buffers in self._phases:
            buffers.op.reset()
        # a rank whose last call was refused is behind the others
        self.dispatch_ctx.restart()
        self.combine_ctx.restart()
        for profiler in self._profilers:
            profiler.clear()

    def dump_dispatch_trace(self, folder: str | Path = TRACE_FOLDER) -> Path | None:
        """Writes the spans of the last dispatches to `folder`/ll_dispatch_RANK_<rank>.json, for Perfetto. Local.

        The spans are prepare, quant_and_put, count_put, wait and postprocess; docs/profiling.md describes them. Times
        are those of the host's monotonic clock, so that ranks' files are aligned. Waits for the device.

        Returns:
            The file; None without enable_profiling, when nothing is written.
        """
        return self._dump("dispatch", Path(folder))

    def dump_combine_trace(self, folder: str | Path = TRACE_FOLDER) -> Path | None:
        """Writes the spans of the last combines to `folder`/ll_combine_RANK_<rank>.json, as dump_dispatch_trace.

        The spans are copy_and_put, recv_wait and topk_reduce.

        Returns:
            The file; None without enable_profiling.
        """
        return self._dump("combine", Path(folder))

    def _dump(self, phase: str, folder: Path) -> Path | None:
        from ep_a2a.telemetry.trace import write_trace

        if not self.enable_profiling:
            return None
        path = folder / f"ll_{phase}_RANK_{self.rank}.json"
        spans = [each for profiler in self._profilers for each in profiler.spans() if each.phase == phase]
        write_trace({self.rank: spans}, path)
        return path

    def finalize(self) -> None:
        """Ends the use of the layer. Idempotent. Several layers must end in the same order on all ranks.

        On one node local: the arena keeps the memory for the next layer of this shape. On several nodes the ranks meet,
        and memory of the layer's own is freed.
        """
        self.dispatch_ctx.finalize()
        self.combine_ctx.finalize()


def _in_float32(weights: torch.Tensor) -> torch.Tensor:
    if not isinstance(weights, torch.Tensor) or not weights.is_floating_point():
        got = str(weights.dtype) if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise DtypeError("topk_weights of a floating dtype", got)
    return weights.to(torch.float32).contiguous()
