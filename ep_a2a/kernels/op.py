"""EpDispatchCombineOp: MORI's op interface on our kernels."""

from __future__ import annotations

import functools
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.config import EpDispatchCombineKernelType, Layout
from ep_a2a.errors import AlternationError, ClosedError, EpA2AError, StateError, UnsupportedError
from ep_a2a.kernels.base_op import DispatchCombineBase, DispatchResult, agree_on_config
from ep_a2a.kernels.failures import Failure, wire_word
from ep_a2a.kernels.inputs import check_apart, check_combine, check_dispatch, check_launch, check_out
from ep_a2a.kernels.intra_node import CombineArguments, DispatchArguments, IntraNodeKernels
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.op_memory import BoundMemory
from ep_a2a.policy import Launch, Phase, choose_launch

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.arena import Arena

MAX_CACHED_VIEWS = 1024


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
        agree_on_config(config, arena.rendezvous, self.index, _own_error(config, arena, self.index))
        self._memory = BoundMemory(config, arena, self.index)
        self._memory.memory.user = weakref.ref(self)
        self._kernels = IntraNodeKernels(config, self._memory.table, arena.device)
        self._num_tokens: int | None = None
        self._max_num_tokens = config.max_num_inp_token_per_rank
        self._view_cache: dict[tuple[Any, ...], DispatchResult] = {}
        self._meet("initialising the op", self._initialize)

    def _initialize(self) -> None:
        self._memory.initialize(self.config.timeout)
        self._kernels.compile()

    def _meet(self, label: str, work: Any) -> None:
        """All ranks stop using the memory, do `work` on their own part, and go on together; or all raise."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.arena.rendezvous.barrier(f"{label}: start")
        try:
            work()
        except Exception as error:
            self.arena.rendezvous.agree(label, error)
            raise
        self.arena.rendezvous.agree(label, None)

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
            weights: [T, K] float32, or None on all ranks. They travel; nothing multiplies by them.
            scales: [T, S] of scale_type_size bytes for tokens that are quantised already, else None.
            indices: [T, K] int32 global expert ids; ids outside [0, num_experts) are dropped slots.
            block_num, warp_per_block: launch numbers when > 0. rdma_block_num is for inter-node kernels.
            call_local_expert_count: also fill `local_expert_count`.
            max_num_tokens: bound on every rank's T this step, equal on all ranks; default M. Sets R and the strides.
            pad_id: id that rows without a token carry in the returned indices.

        Returns:
            (tokens, weights or None, scales or None, indices, total_recv). Layout compact: [R, ·], rows dense in
            (source rank, source token) order, R = W * max_num_tokens or the cap. rank_major: [W, max_num_tokens, ·].
            total_recv is int32 [1]; `recv_counts` [W] has the rows per source. Indices are global ids, all K of the
            token. Everything has a fixed address and is valid until this rank calls combine.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            AlternationError: the step before has not been combined.
        """
        self.check()
        if self._num_tokens is not None:
            raise AlternationError("combine after dispatch", "dispatch again")
        limit = self.config.max_num_inp_token_per_rank if max_num_tokens is None else max_num_tokens
        check_dispatch(self.config, self.device, input, weights, scales, indices, limit, pad_id)
        check_launch(block_num, warp_per_block)
        self._memory.memory.slot.enter(self)
        self._order_streams()
        has_scales = self.config.casts_in_dispatch or bool(scales is not None and self.config.num_scales)
        has_weights = weights is not None
        self._kernels.dispatch(
            DispatchArguments(
                input, scales if scales is not None and scales.numel() else None, weights, indices,
                input.shape[0], limit, wire_word(limit, has_weights, has_scales), pad_id, self.num_rows(limit),
            ),
            block_num, warp_per_block,
        )  # fmt: skip
        self._num_tokens, self._max_num_tokens = input.shape[0], limit
        if call_local_expert_count:
            first = _first_expert(self.config)
            self._kernels.count_local_experts(self.local_expert_count, first, limit)
        scale_dtype = scales.dtype if scales is not None and scales.numel() else None
        return self._views(limit, has_weights, has_scales, scale_dtype)

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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums, for each of this rank's tokens, the rows of the distinct ranks it went to, unweighted, in float32.

        Args:
            input: one row per row that dispatch returned, of combine_dtype, in the same order: the sum of this
                rank's experts for that row, already multiplied by the router's weights. Rows past the received ones
                are not read. When it is the registered buffer nothing is copied.
            weights: None, or [R, K] float32 in the order of the received rows; their sums are returned as well.
            indices: None, or this rank's own ids as given to dispatch; others are an error.
            block_num, warp_per_block: launch numbers when > 0.
            use_external_inp_buf, call_reset: accepted for MORI's sake; the address decides about zero copy, and
                kernels reset themselves.
            out: [T, H] of combine_dtype to write into instead of the op's own result.

        Returns:
            (result [M, H], of which the first T rows are this step's, or `out`; weight sums [M, K] or None). A token
            without a valid expert becomes zeros. The op's own result is valid until the next combine.

        Raises:
            InputError, ForeignIndicesError: an argument does not fit; nothing was launched, combine can be repeated.
            AlternationError: there is no dispatch to combine.
        """
        self.check()
        if self._num_tokens is None:
            raise AlternationError("dispatch before combine", "combine")
        check_launch(block_num, warp_per_block)
        num_tokens, lead = self._num_tokens, self._lead(self._max_num_tokens)
        if isinstance(weights, torch.Tensor) and weights.numel() == 0:
            weights = None
        zero_copy = isinstance(input, torch.Tensor) and input.data_ptr() == self._combine_buffer.data_ptr()
        if zero_copy and input.dim() == 2:
            input = input[: math.prod(lead)]  # noqa: A001  the whole registered buffer may be passed
        check_combine(self.config, self.device, input, weights, indices, lead, num_tokens)
        if not zero_copy:
            check_apart("input", input, self._combine_buffer, "the registered buffer, but for its start")
        result = self._memory.view(Region.RESULT)
        if out is not None:
            check_out(self.config, self.device, out, num_tokens)
            check_apart("out", out, self._combine_buffer, "the registered buffer")
            check_apart("out", out, self._memory.view(Region.TOKENS), "the received rows")
            result = out
        self._order_streams()
        self._kernels.combine(
            CombineArguments(None if zero_copy else input, weights, indices, result, num_tokens, self._max_num_tokens),
            block_num, warp_per_block,
        )  # fmt: skip
        self._num_tokens = None
        self._memory.memory.slot.leave(self)
        return result, None if weights is None else self._memory.view(Region.RESULT_WEIGHTS)

    def _views(
        self, max_num_tokens: int, has_weights: bool, has_scales: bool, scale_dtype: torch.dtype | None
    ) -> DispatchResult:
        """What dispatch returns, made once for each shape: every call costs host time otherwise."""
        key = (max_num_tokens, has_weights, has_scales, scale_dtype)
        if key not in self._view_cache:
            if len(self._view_cache) >= MAX_CACHED_VIEWS:
                self._view_cache.clear()
            self._view_cache[key] = self._make_views(*key)
        return self._view_cache[key]

    def _make_views(
        self, max_num_tokens: int, has_weights: bool, has_scales: bool, scale_dtype: torch.dtype | None
    ) -> DispatchResult:
        config, view, lead = self.config, self._memory.view, self._lead(max_num_tokens)
        if scale_dtype is None:
            scale_dtype = torch.float32 if config.scale_bytes == 4 else torch.uint8
        return (
            view(Region.TOKENS, (*lead, config.hidden_dim)),
            view(Region.WEIGHTS, (*lead, config.topk)) if has_weights else None,
            view(Region.SCALES, (*lead, config.num_scales), scale_dtype) if has_scales else None,
            view(Region.INDICES, (*lead, config.topk)),
            view(Region.TOTAL_RECV),
        )

    @functools.cached_property
    def recv_counts(self) -> torch.Tensor:
        """Rows received from each source in the last dispatch, int32 [W], fixed address."""
        return self._memory.view(Region.RECV_COUNTS)

    @functools.cached_property
    def local_expert_count(self) -> torch.Tensor:
        """Received rows per local expert, int32 [E], filled by dispatch(call_local_expert_count=True)."""
        return self._memory.view(Region.EXPERT_COUNTS)[: self.config.num_local_experts]

    @functools.cached_property
    def _combine_buffer(self) -> torch.Tensor:
        return self._memory.view(Region.COMBINE_ROWS)

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """The rows that peers read in combine, [R at max_num_tokens = M, H]; experts that write there save a copy."""
        self._check_buffer_request(dtype, hidden_dim)
        return self._combine_buffer

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """Where each received row comes from: int32 [total_recv], source rank * (W * M) + token. Synchronises."""
        positions = self._memory.view(Region.SOURCE_POSITIONS)
        counts = self.recv_counts.tolist()
        if self.config.layout == Layout.COMPACT:
            return positions[: sum(counts)]
        starts = [source * self._max_num_tokens for source in range(self.config.world_size)]
        return torch.cat([positions[start : start + count] for start, count in zip(starts, counts)])

    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]:
        """(programs, inter-node programs, warps per program) that a full-sized call would use."""
        launch = self._launch(Phase.DISPATCH if is_dispatch else Phase.COMBINE, block_num, warp_per_block)
        return launch.num_programs, max(0, rdma_block_num), launch.num_warps

    def _launch(self, phase: Phase, block_num: int = -1, warp_per_block: int = -1) -> Launch:
        tokens = self.config.max_num_inp_token_per_rank
        return choose_launch(self.config, phase, tokens, self._kernels.num_sms, block_num, warp_per_block)

    def set_max_sms(self, max_sms: int) -> None:
        """Bounds the multiprocessors of launches from now on; 0 = all. Local; captured graphs keep theirs."""
        self._kernels.limit_sms(max_sms)

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
            raise failure.exception(self.config.rank, self.config.timeout)

    def reset(self) -> None:
        """Makes the op usable again after an error or an unfinished step. Collective; the step in progress is lost."""
        if self._closed or self.arena.closed:
            raise ClosedError("an open op", "a closed one")
        self._num_tokens = None
        self._memory.memory.slot.leave(self)
        self._meet("resetting the op", lambda: self._memory.initialize(self.config.timeout))

    def close(self) -> None:
        """Ends the use of the op; local and idempotent. Its memory stays with the arena for the next op of its kind."""
        if not self._closed:
            self._closed = True
            self._memory.memory.slot.leave(self)
            self._memory.memory.user = None
            self.arena.give_back(self.index)


def _own_error(config: EpDispatchCombineConfig, arena: Arena, index: int) -> EpA2AError | None:
    """Why this rank cannot build the op, or None."""
    if arena.closed:
        return ClosedError("an open arena", "a closed one")
    if config.kernel_type is not EpDispatchCombineKernelType.IntraNode:
        return UnsupportedError(
            "kernel_type IntraNode", f"{config.kernel_type.name}, which this version does not have",
            "Use kernel_type=IntraNode on one node, or the allgather_reducescatter backend across nodes.",
        )  # fmt: skip
    if arena.in_use(config.digest(), index):
        return StateError(
            f"no living op of this config and index {index} in the arena", "one that has not been closed",
            "Use that op, close it first, or give this one another index.",
        )  # fmt: skip
    return None


def _first_expert(config: EpDispatchCombineConfig) -> int:
    small, num_large = divmod(config.total_experts, config.world_size)
    return config.rank * small + min(config.rank, num_large)
