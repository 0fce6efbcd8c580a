"""EpDispatchCombineOp: MORI's op interface on our kernels."""

from __future__ import annotations

import functools
import math
import weakref
from typing import TYPE_CHECKING, cast

import torch

from ep_a2a.config import Layout
from ep_a2a.errors import AlternationError, ClosedError
from ep_a2a.kernels.layout import Region, Stage
from ep_a2a.ops import inputs
from ep_a2a.ops.arguments import NO_BIASES, RECEIVE, SEND, CombineArguments, DispatchArguments
from ep_a2a.ops.base import DispatchCombineBase, DispatchResult, agree_on_config
from ep_a2a.ops.engines import kernels_of
from ep_a2a.ops.failures import Failure
from ep_a2a.ops.memo import Remembered
from ep_a2a.ops.memory import BoundMemory
from ep_a2a.ops.prepared_call import Dispatches
from ep_a2a.ops.timeouts import WaitBounds

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.arena import Arena
    from ep_a2a.ops.arguments import Biases

NEXT_CALLS = ("dispatch", "dispatch_recv", "combine", "combine_recv")
"""By Stage."""


class EpDispatchCombineOp(DispatchCombineBase):
    """Dispatch and combine of one MoE layer's tokens among the ranks of a group.

    Construction is collective: all ranks build the op with an equal config at the same time. dispatch and combine
    alternate. W, M, K, E, H as in EpDispatchCombineConfig.

    Args:
        config: shapes and choices.
        arena: where memory comes from; None takes the one that shmem_torch_process_group_init made.
        index: ops of one arena whose steps overlap (micro-batches) need different indices; ops of equal index share
            memory. None gives this op memory of its own.

    Raises:
        ConfigMismatchError: configs differ between ranks; the error names the field and the ranks.
        RankTimeoutError: ranks did not come to build the op.
        UnsupportedError: the kernel type is not available.
    """

    def __init__(
        self, config: EpDispatchCombineConfig, *, arena: Arena | None = None, index: int | None = None
    ) -> None:
        if arena is None:
            from ep_a2a.shmem import default_arena

            arena = default_arena()
        super().__init__(config, arena.device)
        self.arena = arena
        self.index = arena.unshared_index() if index is None else index
        self._closed = False
        agree_on_config(config, arena.rendezvous, self.index, inputs.construction_error(config, arena, self.index))
        self._bounds = WaitBounds.of(config)
        self._memory = BoundMemory(config, arena, self.index)
        self._memory.memory.user = weakref.ref(self)
        self._streams = self._memory.memory.slot.streams
        self._kernels = kernels_of(config, self._memory, arena)
        self._combines: Remembered[None] = Remembered()
        self._stage = Stage.DISPATCH_SEND
        self._sent: DispatchArguments | CombineArguments | None = None
        self._dispatches = Dispatches(self._memory, self.device)
        self._accepted = self._dispatches.nothing()
        self._result, self._result_weights = map(self._memory.view, (Region.RESULT, Region.RESULT_WEIGHTS))
        self._reduced_rows = self._memory.view(Region.REDUCED_ROWS)
        self.arena.together("initialising the op", self._initialize)

    def _initialize(self) -> None:
        self._memory.initialize(self._bounds, refill=False)
        self._kernels.compile()

    def dispatch(
        self,
        input: torch.Tensor,  # noqa: A002  MORI's name
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        max_num_tokens: int | None = None,
        pad_id: int = -1,
    ) -> DispatchResult:
        """Sends each token once to every distinct rank that owns one of its experts.

        Args:
            input: [T, H] of data_type, T <= max_num_tokens; or, with a fused cast, fp8 tokens that are cast already.
            weights: [T, K] float32, or None on all ranks. They travel; nothing multiplies by them, but for combine in
                layout expert_major, which needs them.
            scales: [T, S] of scale_type_size bytes for tokens that are quantised already, else None.
            indices: [T, K] int32 global expert ids; ids outside [0, num_experts) are dropped slots.
            block_num, warp_per_block: launch numbers when > 0. rdma_block_num has no effect: see the config.
            call_local_expert_count: also fill `local_expert_count`.
            max_num_tokens: bound on every rank's T this step, equal on all ranks; default M. Sets R and the strides.
            pad_id: id that rows without a token carry in the returned indices.

        Returns:
            (tokens, weights or None, scales or None, indices, total_recv). Layout compact: [R, ·], rows dense in
            (source rank, source token) order, R = W * max_num_tokens or the cap. rank_major: [W, max_num_tokens, ·].
            expert_major: tokens [E, R, H], weights [E, R], scales [E, R, S], one row for each token that names the
            expert, `expert_recv_count` rows of each; indices as in rank_major, [W, max_num_tokens, K].
            total_recv is int32 [1]; `recv_counts` [W] has the rows per source. Indices are global ids, all K of the
            token. Everything has a fixed address and is valid until this rank calls combine.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            AlternationError: the step before has not been combined.
        """
        # before the step begins: a call that is refused must not hold the memory against other ops
        inputs.check_launch(block_num, warp_per_block)
        args = self._dispatch_arguments(input, weights, scales, indices, max_num_tokens, pad_id, "dispatch")
        self._streams.follow(self.device)
        self._kernels.dispatch(args, block_num, warp_per_block)
        self._stage = Stage.COMBINE_SEND
        if call_local_expert_count:
            self._kernels.count_local_experts(self.local_expert_count, self.config.first_expert, args.max_num_tokens)
        return self._accepted.received

    def dispatch_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        *,
        max_num_tokens: int | None = None,
        pad_id: int = -1,
    ) -> DispatchResult:
        """The first half of `dispatch`: sends, and waits for nobody (with layout compact and more than
        flagged_max_tokens, for the other ranks' counts). Arguments and errors are those of `dispatch`.

        Ranks may mix whole and split calls. The halves are compiled when first used: use them before a capture.
        Returns what dispatch_recv will; before it, nothing in these tensors means anything.
        """
        args = self._dispatch_arguments(input, weights, scales, indices, max_num_tokens, pad_id, "dispatch_send")
        self._streams.follow(self.device)
        self._kernels.dispatch(args, stages=SEND)
        self._sent = args
        self._stage = Stage.DISPATCH_RECEIVE
        return self._accepted.received

    def dispatch_recv(self) -> DispatchResult:
        """The second half of `dispatch`: waits for the rows of all ranks and returns them.

        Raises:
            AlternationError: there is no `dispatch_send` to finish.
        """
        self._expect(Stage.DISPATCH_RECEIVE, "dispatch_recv")
        args = cast("DispatchArguments", self._sent)
        self._streams.follow(self.device)
        self._kernels.dispatch(args, stages=RECEIVE)
        self._sent = None
        self._stage = Stage.COMBINE_SEND
        return self._accepted.received

    def _dispatch_arguments(
        self, tokens: torch.Tensor, weights: torch.Tensor | None, scales: torch.Tensor | None, indices: torch.Tensor,
        max_num_tokens: int | None, pad_id: int, call: str,
    ) -> DispatchArguments:  # fmt: skip
        """Checks a dispatch and begins its step."""
        self._expect(Stage.DISPATCH_SEND, call)
        limit = self.config.max_num_inp_token_per_rank if max_num_tokens is None else max_num_tokens
        accepted = self._dispatches.accept(tokens, weights, scales, indices, limit, pad_id)
        inputs.check_dispatch_addresses(tokens, scales)
        self._memory.memory.slot.enter(self)
        self._accepted = accepted
        return DispatchArguments(
            tokens, scales if accepted.scales_travel else None, weights, indices, accepted.num_tokens, limit,
            accepted.wire_word, pad_id, accepted.row_limit,
        )  # fmt: skip

    def combine(
        self,
        input: torch.Tensor,  # noqa: A002  MORI's name
        weights: torch.Tensor | None,
        indices: torch.Tensor | None,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        out: torch.Tensor | None = None,
        bias_0: torch.Tensor | None = None,
        bias_1: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums, for each of this rank's tokens, the rows of the distinct ranks it went to, unweighted, in float32.

        Args:
            input: one row per row that dispatch returned, of combine_dtype, in the same order: the sum of this
                rank's experts for that row, already multiplied by the router's weights; what rows past the received
                ones hold has no effect. It is sent from where it lies. With a combine quant_type rows are cast to fp8:
                fp8_blockwise with a scale per 128 elements, fp8_direct_cast without, saturating at 448.
                Layout expert_major: [E, R, H], each expert's rows as they are; they are multiplied by the dispatched
                weights and added in ascending order of a token's ids here, before they travel.
            weights: None, or [R, K] float32 in the order of the received rows; their sums are returned as well. None in
                layout expert_major.
            indices: None, or this rank's own ids as given to dispatch; others are an error.
            block_num, warp_per_block: launch numbers when > 0.
            use_external_inp_buf, call_reset: MORI's, without effect: only what dispatch returned is copied.
            out: [T, H] of combine_dtype to write into instead of the op's own result.
            bias_0, bias_1: [T, H] of combine_dtype to be added to the sums, in this order, before they are rounded.

        Returns:
            (result [M, H], of which the first T rows are this step's, or `out`; weight sums [M, K] or None). A token
            without a valid expert becomes zeros, or its biases. The op's own result is valid until the next combine.

        Raises:
            InputError, ForeignIndicesError: an argument does not fit; nothing was launched, combine can be repeated.
            AlternationError: there is no dispatch to combine.
        """
        inputs.check_launch(block_num, warp_per_block)
        args = self._combine_arguments(input, weights, indices, out, "combine", (bias_0, bias_1))
        self._streams.follow(self.device)
        self._kernels.combine(args, block_num, warp_per_block)
        self._end_step()
        return self._combine_result(args)

    def combine_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        bias_0: torch.Tensor | None = None,
        bias_1: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The first half of `combine`: sends the rows back and waits for nobody. Arguments are those of `combine`.

        `input` and `weights` may be overwritten by work that is launched after this. Returns what combine_recv will.
        """
        args = self._combine_arguments(input, weights, indices, out, "combine_send", (bias_0, bias_1))
        self._streams.follow(self.device)
        self._kernels.combine(args, stages=SEND)
        self._sent = args
        self._stage = Stage.COMBINE_RECEIVE
        return self._combine_result(args)

    def combine_recv(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The second half of `combine`: waits for this rank's rows, adds them and returns what `combine` does.

        Raises:
            AlternationError: there is no `combine_send` to finish.
        """
        self._expect(Stage.COMBINE_RECEIVE, "combine_recv")
        args = cast("CombineArguments", self._sent)
        self._streams.follow(self.device)
        self._kernels.combine(args, stages=RECEIVE)
        self._end_step()
        return self._combine_result(args)

    def _combine_arguments(
        self, rows: torch.Tensor, weights: torch.Tensor | None, indices: torch.Tensor | None,
        out: torch.Tensor | None, call: str, biases: Biases = NO_BIASES,
    ) -> CombineArguments:  # fmt: skip
        """Checks a combine."""
        self._expect(Stage.COMBINE_SEND, call)
        num_tokens, lead = self._accepted.num_tokens, self._accepted.lead
        if isinstance(weights, torch.Tensor) and weights.numel() == 0:
            weights = None
        if isinstance(rows, torch.Tensor) and rows.dim() == 2 and rows.shape[0] == self.config.max_num_expert_rows:
            rows = rows[: math.prod(lead)]  # the whole registered buffer may be passed
        self._combines.of(
            (lead, num_tokens, *map(inputs.signature, (rows, weights, indices))),
            lambda: inputs.check_combine(self.config, self.device, rows, weights, indices, lead, num_tokens),
        )
        inputs.check_alignment("input", rows)
        result = self._result
        if out is not None:
            inputs.check_out(self.config, self.device, out, num_tokens)
            result = out
        inputs.check_biases(self.config, self.device, biases, num_tokens)
        inputs.check_apart("out", result, rows, "the rows to be combined")
        rows, copies = self._memory.out_of_reach(rows, "combine_rows")
        if weights is not None:
            inputs.check_apart("weights", weights, self._result_weights, "the weight sums that combine returns")
            weights, more = self._memory.out_of_reach(weights, "combine_weights")
            copies += more
        by_expert = self.config.layout == Layout.EXPERT_MAJOR
        return CombineArguments(
            self._reduced_rows if by_expert else rows, weights, indices, result, num_tokens,
            self._accepted.max_num_tokens, rows if by_expert else None, biases, copies,
        )  # fmt: skip

    def _combine_result(self, args: CombineArguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        return args.result, None if args.weights is None else self._result_weights

    def _expect(self, stage: Stage, call: str) -> None:
        """Raises what the kernels have recorded, or AlternationError when the step is elsewhere."""
        self.check()
        if self._stage is not stage:
            raise AlternationError(f"{NEXT_CALLS[self._stage]} next", call)

    @functools.cached_property
    def recv_counts(self) -> torch.Tensor:
        """Rows received from each source in the last dispatch, int32 [W], fixed address."""
        return self._memory.view(Region.RECV_COUNTS)

    @functools.cached_property
    def local_expert_count(self) -> torch.Tensor:
        """Received rows per local expert, int32 [E], filled by dispatch(call_local_expert_count=True)."""
        return self._memory.view(Region.EXPERT_COUNTS)[: self.config.num_local_experts]

    @functools.cached_property
    def expert_recv_count(self) -> torch.Tensor:
        """Rows of each local expert in the last dispatch of layout expert_major, int32 [E], fixed address."""
        return self._memory.view(Region.EXPERT_RECV_COUNT)[: self.config.num_local_experts]

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """Memory for combine's `input`, made when first asked for: [R, H], or expert_major's [E * R, H], R at M tokens.
        It saves no copy, since combine takes rows from any memory."""
        self._check_buffer_request(dtype, hidden_dim)
        return self._memory.combine_input()

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """Where each received row comes from: int32 [total_recv], source rank * (W * M) + token. Synchronises."""
        return self._dispatches.source_positions(self._accepted.max_num_tokens, self.recv_counts.tolist())

    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]:
        """(programs, those of channels between nodes, warps per program) that a full-sized call would use."""
        return self._kernels.full_sized_launch(is_dispatch, block_num, warp_per_block)

    def set_max_sms(self, max_sms: int) -> None:
        """Bounds the multiprocessors of launches from now on; 0 = all. Local, but one number for all ranks of rings."""
        self._kernels.limit_sms(max_sms)

    def compile_halves(self) -> None:
        """Compiles the split calls, now and whenever launches change; see the base class. Local."""
        self._kernels.compile_halves()

    def record_spans(self) -> None:
        """Takes kernels that note times from now on; called by SpanRecorder, which reads them. Local."""
        self._kernels.record_spans()

    def set_timeout(self, timeout_secs: float) -> None:
        """Bounds the waits of calls and of graph replays from now on, those of a first step included. Local."""
        self._bounds = WaitBounds.same(timeout_secs)
        self._streams.follow(self.device)
        self._memory.set_bounds(self._bounds)

    def check(self) -> None:
        """Raises what the kernels have recorded; does not wait for kernels that still run.

        Raises:
            ClosedError: the op or its arena has been closed.
            RankTimeoutError, AlternationError, ConfigMismatchError, CapacityError, ForeignIndicesError: as recorded.
        """
        if self._closed or self.arena.closed:
            raise ClosedError("an open op", "a closed one")
        if self._memory.failed:
            failure = Failure.from_record(self._memory.record_words(), self.config.world_size)
            raise failure.exception(self.config.rank, self._bounds, self._memory.epochs_seen(failure.phase))

    @property
    def has_open_step(self) -> bool:
        """Whether a call has begun a step that no call has ended."""
        return self._stage is not Stage.DISPATCH_SEND

    def reset(self) -> None:
        """Makes the op usable again after an error or an unfinished step. Collective; the step in progress is lost."""
        if self._closed or self.arena.closed:
            raise ClosedError("an open op", "a closed one")
        self._kernels.quiet()
        self._end_step()
        self.arena.together("resetting the op", lambda: self._memory.initialize(self._bounds, refill=True))

    def _end_step(self) -> None:
        self._stage, self._sent = Stage.DISPATCH_SEND, None
        self._memory.memory.slot.leave(self)

    def close(self) -> None:
        """Ends the use of the op; local and idempotent. Its memory stays with the arena for the next op of its kind."""
        if not self._closed:
            self._closed = True
            if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(self.device)  # what still runs may yet fail
            if self.has_open_step or (not self.arena.closed and (self._memory.failed or self._memory.poisoned)):
                self._memory.memory.slot.spoil()
            self._end_step()
            self._memory.memory.user = None
            self.arena.give_back(self.index)
