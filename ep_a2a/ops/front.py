"""The front of every op: the calls and their signatures, in which order they may be made, and sizes from the config.

An op fills in how arguments are checked (`_prepare_dispatch`, `_prepare_combine`) and what moves the rows
(`_run_dispatch`, `_run_combine`). `interface.DispatchCombineOp` is the contract that callers see.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Self, TypeVar

from ep_a2a.errors import AlternationError, ConfigError, EpA2AError, StateError, UnsupportedError
from ep_a2a.kernels.layout import Stage
from ep_a2a.memory.use_order import OwnProcess
from ep_a2a.ops.arguments import RECEIVE, SEND, WHOLE, CombineInputs, StepInputs
from ep_a2a.ops.base import OpSizes, num_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.interface import CombineResult, DispatchResult
    from ep_a2a.memory.use_order import StreamOrder
    from ep_a2a.ops.arguments import Stages

Result = TypeVar("Result")

OWN_LAUNCH = (-1, -1, -1)
"""Launch numbers of a call that leaves them to the op."""
NEXT_CALLS = ("dispatch", "dispatch_recv", "combine", "combine_recv")
"""By Stage."""


class ValidatedOp(OpSizes, abc.ABC):
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
        self._stage = Stage.DISPATCH_SEND
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
    def _prepare_dispatch(self, step: StepInputs) -> None:
        """Checks the arguments of a dispatch and keeps them for `_run_dispatch`. Launches nothing."""

    @abc.abstractmethod
    def _run_dispatch(self, stages: Stages, block_num: int = -1, warp_per_block: int = -1) -> DispatchResult:
        """Launches the prepared dispatch, or one of its halves. A step is open only if this returns."""

    @abc.abstractmethod
    def _prepare_combine(self, given: CombineInputs) -> None:
        """Checks the arguments of a combine and keeps them for `_run_combine`."""

    @abc.abstractmethod
    def _run_combine(self, stages: Stages, block_num: int = -1, warp_per_block: int = -1) -> CombineResult:
        """Launches the prepared combine, or one of its halves."""

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
        self._expect(Stage.DISPATCH_SEND, "dispatch")
        limit = self.config.max_num_inp_token_per_rank if max_num_tokens is None else max_num_tokens
        self._prepare_dispatch(StepInputs(input, weights, scales, indices, limit, pad_id, call_local_expert_count))
        self.streams.follow(self.device)
        return self._launch_dispatch("dispatch", WHOLE, Stage.COMBINE_SEND, block_num, warp_per_block)

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
        self._expect(Stage.DISPATCH_SEND, "dispatch_send")
        limit = self.config.max_num_inp_token_per_rank if max_num_tokens is None else max_num_tokens
        self._prepare_dispatch(StepInputs(input, weights, scales, indices, limit, pad_id, False))
        self.streams.follow(self.device)
        return self._launch_dispatch("dispatch_send", SEND, Stage.DISPATCH_RECEIVE)

    def dispatch_recv(self) -> DispatchResult:
        """The second half of `dispatch`: waits for the rows of all ranks and returns them.

        Raises:
            AlternationError: there is no `dispatch_send` to finish.
        """
        self._expect(Stage.DISPATCH_RECEIVE, "dispatch_recv")
        self.streams.follow(self.device)
        return self._launch_dispatch("dispatch_recv", RECEIVE, Stage.COMBINE_SEND)

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
        self._expect(Stage.COMBINE_SEND, "combine")
        self._prepare_combine(CombineInputs(input, weights, indices, out, (bias_0, bias_1)))
        self.streams.follow(self.device)
        return self._launch_combine("combine", WHOLE, block_num, warp_per_block)

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
        self._expect(Stage.COMBINE_SEND, "combine_send")
        self._prepare_combine(CombineInputs(input, weights, indices, out, (bias_0, bias_1)))
        self.streams.follow(self.device)
        return self._launch_combine("combine_send", SEND)

    def combine_recv(self) -> CombineResult:
        """The second half of `combine`: waits for this rank's rows, adds them and returns what `combine` does.

        Raises:
            AlternationError: there is no `combine_send` to finish.
        """
        self._expect(Stage.COMBINE_RECEIVE, "combine_recv")
        self.streams.follow(self.device)
        return self._launch_combine("combine_recv", RECEIVE)

    def _launch_dispatch(
        self, call: str, stages: Stages, then: Stage, block_num: int = -1, warp_per_block: int = -1
    ) -> DispatchResult:
        """Launches the prepared dispatch and moves on to `then`."""
        result = self._launch(call, self._run_dispatch, stages, block_num, warp_per_block)
        self._stage = then
        self._interrupted = None
        return result

    def _launch_combine(
        self, call: str, stages: Stages, block_num: int = -1, warp_per_block: int = -1
    ) -> CombineResult:
        """Launches the prepared combine; its receiving half ends the step."""
        result = self._launch(call, self._run_combine, stages, block_num, warp_per_block)
        if stages.receive:
            self._end_step()
        else:
            self._stage = Stage.COMBINE_RECEIVE
            self._interrupted = None
        return result

    def _launch(
        self, call: str, run: Callable[[Stages, int, int], Result], stages: Stages, block_num: int, warp_per_block: int
    ) -> Result:
        """Makes the launches of a call. Whatever interrupts them, but an error of this package, leaves the step torn.

        The caller clears `_interrupted` once it has noted where the step stands.
        """
        self._interrupted = call
        try:
            return run(stages, block_num, warp_per_block)
        except EpA2AError:
            self._interrupted = None
            raise

    def _expect(self, stage: Stage, call: str) -> None:
        """Raises what has gone wrong so far, or AlternationError when the step is elsewhere."""
        self._process.require("the op")
        if self._interrupted:
            raise StateError(
                "every call to end",
                f"a {self._interrupted} that Ctrl-C or an exception has interrupted, so that its step is torn",
                "op.reset() on every rank makes the op usable again.",
            )
        self.check()
        if self._stage is not stage:
            raise AlternationError(f"{NEXT_CALLS[self._stage]} next", call)

    def _end_step(self) -> None:
        """Makes dispatch the next call."""
        self._stage = Stage.DISPATCH_SEND
        self._interrupted = None

    @property
    def has_open_step(self) -> bool:
        """Whether a call has begun a step that no call has ended, also one that was interrupted."""
        return self._interrupted is not None or self._stage is not Stage.DISPATCH_SEND

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
