"""The front of every op: the calls and their signatures, in which order they may be made, and sizes from the config.

An op fills in how arguments are checked (`_prepare_dispatch`, `_prepare_combine`) and what moves the rows
(`_run_dispatch`, `_run_combine`). `interface.DispatchCombineOp` is the contract that callers see.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from ep_a2a.errors import AlternationError, ConfigError, EpA2AError, StateError, UnsupportedError
from ep_a2a.memory.use_order import OwnProcess
from ep_a2a.ops.arguments import SEND, WHOLE, CombineInputs, StepInputs
from ep_a2a.ops.base import OpSizes, num_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.interface import CombineResult, DispatchResult
    from ep_a2a.memory.use_order import StreamOrder
    from ep_a2a.ops.arguments import Stages

DispatchCall = TypeVar("DispatchCall")
"""A checked dispatch, ready to be launched."""
CombineCall = TypeVar("CombineCall")
"""A checked combine, ready to be launched."""
Facts = TypeVar("Facts")
"""What combine needs to know of the dispatch."""

OWN_LAUNCH = (-1, -1, -1)
"""Launch numbers of a call that leaves them to the op."""


def _nothing_to_finish() -> None:
    """The second half of a call whose first half has done all of it."""


@dataclass(slots=True)
class OpenStep(Generic[Facts]):
    """All that an op keeps of a step between two calls.

    Attributes:
        facts: what combine needs to know of the dispatch.
        dispatched: the dispatch's result.
        next_call: "combine", or the second half of a split call: "dispatch_recv" or "combine_recv".
        finish: launches that second half.
        combined: what combine_send has returned; not set before.
    """

    facts: Facts
    dispatched: DispatchResult
    next_call: str = "combine"
    finish: Callable[[], None] = _nothing_to_finish
    combined: CombineResult = field(init=False)


class BaseOp(OpSizes, abc.ABC, Generic[DispatchCall, Facts, CombineCall]):
    """Base of the ops: a config, a device, and what follows from them. Usable as a context manager that closes it.

    Args:
        config: shapes and choices. W, M, K, E, H are as in EpDispatchCombineConfig.
        device: where the op's tensors live.
        streams: orders the op's calls behind each other, whatever streams they are made on.
    """

    def __init__(self, config: EpDispatchCombineConfig, device: torch.device, streams: StreamOrder) -> None:
        self.config = config
        self.device = device
        self.streams = streams
        self._step: OpenStep[Facts] | None = None
        self._process = OwnProcess()
        self._interrupted: str | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` has ended the use of this op."""
        return self._closed

    @abc.abstractmethod
    def check(self) -> None:
        """Raises what has gone wrong so far, without waiting; every call begins with it.

        Raises:
            ClosedError: the op has been closed.
        """

    @abc.abstractmethod
    def _check_launch(self, block_num: int, rdma_block_num: int, warp_per_block: int) -> None:
        """Raises where launch numbers cannot be used, or warns that they have no effect."""

    @abc.abstractmethod
    def _prepare_dispatch(self, step: StepInputs) -> DispatchCall:
        """Checks the arguments of a dispatch. Launches nothing."""

    @abc.abstractmethod
    def _run_dispatch(
        self, call: DispatchCall, stages: Stages, block_num: int = -1, warp_per_block: int = -1
    ) -> OpenStep[Facts]:
        """Launches a dispatch, or its first half, and returns the step that it opens."""

    @abc.abstractmethod
    def _prepare_combine(self, step: OpenStep[Facts], given: CombineInputs) -> CombineCall:
        """Checks the arguments of a combine of the open step. Launches nothing of the combine itself."""

    @abc.abstractmethod
    def _run_combine(
        self, step: OpenStep[Facts], call: CombineCall, stages: Stages, block_num: int = -1, warp_per_block: int = -1
    ) -> CombineResult:
        """Launches a combine; or its first half, and sets the step's `finish`."""

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
            block_num, warp_per_block: launch numbers when > 0. rdma_block_num has no effect: see the config. Where a
                library launches, none has an effect, and a warning says so once.
            call_local_expert_count: also fill `local_expert_count`.
            max_num_tokens: bound on every rank's T this step, equal on all ranks; default M. Sets R and the strides.
            pad_id: id that rows without a token carry in the returned indices.

        Returns:
            (tokens, weights or None, scales or None, indices, total_recv). Layout compact: [R, ·], rows dense in
            (source rank, source token) order, R = W * max_num_tokens or the cap. rank_major: [W, max_num_tokens, ·].
            expert_major: tokens [E, R, H], weights [E, R], scales [E, R, S], one row for each token that names the
            expert, `expert_recv_count` rows of each; indices as in rank_major, [W, max_num_tokens, K].
            total_recv is int32 [1]; `recv_counts` [W] has the rows per source. Indices are global ids, all K of the
            token. Everything has a fixed address and is valid until this rank calls combine. What another project's
            library does not return, its backend's capabilities say.

        Raises:
            InputError: an argument does not fit; nothing was launched.
            AlternationError: the step before has not been combined.
            ConfigMismatchError, CapacityError, RankTimeoutError: where the op finds out on the host: ranks disagree, a
                rank would receive too much, a rank did not come.
        """
        # before the step begins: a call that is refused must not hold the memory against other ops
        if (block_num, rdma_block_num, warp_per_block) != OWN_LAUNCH:
            self._check_launch(block_num, rdma_block_num, warp_per_block)
        limit = self.config.max_num_inp_token_per_rank if max_num_tokens is None else max_num_tokens
        step = StepInputs(input, weights, scales, indices, limit, pad_id, call_local_expert_count)
        return self._dispatch("dispatch", step, WHOLE, block_num, warp_per_block)

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
        """The first half of `dispatch`: sends, and waits for no rank (with layout compact and a
        max_num_tokens above config.flagged_tokens, for the other ranks' counts). Arguments and errors are those of
        `dispatch`.

        Ranks may mix whole and split calls. The halves are compiled when first used: use them before a capture.
        Returns what dispatch_recv will; before it, nothing in these tensors means anything. An op whose steps cannot be
        halved does all of it here.
        """
        limit = self.config.max_num_inp_token_per_rank if max_num_tokens is None else max_num_tokens
        return self._dispatch("dispatch_send", StepInputs(input, weights, scales, indices, limit, pad_id, False), SEND)

    def dispatch_recv(self) -> DispatchResult:
        """The second half of `dispatch`: waits for the rows of all ranks and returns them.

        Raises:
            AlternationError: there is no `dispatch_send` to finish.
        """
        step = self._expect("dispatch_recv", "dispatch_recv")
        self._finish("dispatch_recv", step)
        step.next_call, step.finish = "combine", _nothing_to_finish
        self._interrupted = None
        return step.dispatched

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
    ) -> CombineResult:
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
            bias_0, bias_1: [T, H] of combine_dtype to be added to the sums, in this order, before they are rounded;
                with other projects' libraries, to sums that have been rounded.

        Returns:
            (result [M, H], of which the first T rows are this step's, or `out`; weight sums [M, K] or None). A token
            without a valid expert becomes zeros, or its biases. The op's own result is valid until the next combine.

        Raises:
            InputError, ForeignIndicesError: an argument does not fit; nothing was launched, combine can be repeated.
            AlternationError: there is no dispatch to combine.
            RankTimeoutError: where the op finds out on the host: a rank did not come.
        """
        if (block_num, rdma_block_num, warp_per_block) != OWN_LAUNCH:
            self._check_launch(block_num, rdma_block_num, warp_per_block)
        given = CombineInputs(input, weights, indices, out, (bias_0, bias_1))
        return self._combine("combine", given, WHOLE, block_num, warp_per_block)

    def combine_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        bias_0: torch.Tensor | None = None,
        bias_1: torch.Tensor | None = None,
    ) -> CombineResult:
        """The first half of `combine`: sends the rows back and waits for no rank. Arguments are those of `combine`.

        `input` and `weights` may be overwritten by work that is launched after this, biases and `out` after
        combine_recv. Returns what combine_recv will.
        """
        return self._combine("combine_send", CombineInputs(input, weights, indices, out, (bias_0, bias_1)), SEND)

    def combine_recv(self) -> CombineResult:
        """The second half of `combine`: waits for this rank's rows, adds them and returns what `combine` does.

        Raises:
            AlternationError: there is no `combine_send` to finish.
        """
        step = self._expect("combine_recv", "combine_recv")
        self._finish("combine_recv", step)
        self._end_step()
        return step.combined

    def _dispatch(
        self, name: str, given: StepInputs, stages: Stages, block_num: int = -1, warp_per_block: int = -1
    ) -> DispatchResult:
        """Checks and launches a dispatch, or its first half; opens a step."""
        self._require_ready()
        if self._step is not None:
            raise AlternationError(f"{self._step.next_call} next", name)
        call = self._prepare_dispatch(given)
        self.streams.follow(self.device)
        self._interrupted = name
        try:
            self._step = self._run_dispatch(call, stages, block_num, warp_per_block)
        except EpA2AError:
            self._interrupted = None
            raise
        self._interrupted = None
        return self._step.dispatched

    def _combine(
        self, name: str, given: CombineInputs, stages: Stages, block_num: int = -1, warp_per_block: int = -1
    ) -> CombineResult:
        """Checks and launches a combine, which ends the step, or its first half."""
        step = self._expect("combine", name)
        call = self._prepare_combine(step, given)
        self.streams.follow(self.device)
        self._interrupted = name
        try:
            combined = self._run_combine(step, call, stages, block_num, warp_per_block)
        except EpA2AError:
            self._interrupted = None
            raise
        if stages.receive:
            self._end_step()
        else:
            step.next_call, step.combined = "combine_recv", combined
            self._step, self._interrupted = step, None
        return combined

    def _finish(self, name: str, step: OpenStep[Facts]) -> None:
        """Launches the second half of a split call. The caller clears `_interrupted` once it has noted that."""
        self.streams.follow(self.device)
        self._interrupted = name
        try:
            step.finish()
        except EpA2AError:
            self._interrupted = None
            raise

    def _require_ready(self) -> None:
        """Raises what has gone wrong so far.

        `_interrupted` names a call that something else than an error of this package has broken off.
        """
        self._process.require("the op")
        if self._interrupted:
            raise StateError(
                "every call to end",
                f"a {self._interrupted} that Ctrl-C or an exception has interrupted, so that its step is torn",
                "op.reset() on every rank makes the op usable again.",
            )
        self.check()

    def _expect(self, next_call: str, name: str) -> OpenStep[Facts]:
        """The open step, which must wait for `next_call`; else raises what has gone wrong, or AlternationError."""
        self._require_ready()
        step = self._step
        if step is None or step.next_call != next_call:
            raise AlternationError(f"{'dispatch' if step is None else step.next_call} next", name)
        return step

    def _end_step(self) -> None:
        """Makes dispatch the next call."""
        self._step = None
        self._interrupted = None

    @property
    def has_open_step(self) -> bool:
        """Whether a call has begun a step that no call has ended, also one that was interrupted."""
        return self._interrupted is not None or self._step is not None

    def num_rows(self, max_num_tokens: int) -> int:
        """R, rows that dispatch returns for a step's max_num_tokens."""
        return num_rows(self.config, max_num_tokens)

    @property
    def num_own_bytes(self) -> int:
        """Bytes of the op's buffers on its device that are not an arena's."""
        return 0

    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]:
        """(programs, those of channels between nodes, warps per program) that a full-sized call would use.

        Raises:
            UnsupportedError: something else than our kernels moves the rows.
        """
        raise UnsupportedError(
            "an op that chooses launches",
            f"{type(self).__name__}, whose launches another library chooses",
            "Use the backend 'ep_a2a'.",
        )

    def set_max_sms(self, max_sms: int) -> None:
        """Bounds the multiprocessors of launches from now on; 0 = all. Without effect where a library launches."""

    def warmup_split(self) -> None:
        """Compiles the split calls, so that they can be captured. Without effect where nothing is left to compile."""

    def record_spans(self) -> None:
        """Takes kernels that note times from now on; UnsupportedError where there are none."""
        raise UnsupportedError(
            "an op whose kernels can note times", f"{type(self).__name__}, which has none", "Trace an op of one node."
        )

    def close(self) -> None:
        """Ends the use of the op; local and idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_buffer_request(self, dtype: torch.dtype, hidden_dim: int) -> None:
        if dtype != self.config.combined_dtype or hidden_dim not in (-1, self.config.hidden_dim):
            raise ConfigError(
                f"{self.config.combined_dtype} and hidden size {self.config.hidden_dim}", f"{dtype} and {hidden_dim}"
            )
