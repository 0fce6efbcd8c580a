"""The contract of every op that `make_op` or `manager.get_handle` returns, whatever moves the tokens.

An op moves the tokens of one MoE layer between the W ranks of a group. Each step has two calls:

1. `dispatch` sends each token of a rank once to every distinct rank that owns one of the token's experts.
2. `combine` sends the experts' results back and adds them for each token.

.. code-block:: python

    received = op.dispatch(x, topk_weights, None, topk_ids)  # of [T, H], [T, K], [T, K]: rows [R, H], their ids, ...
    results = experts(received)  # [R, H]: of each row the weighted sum over this rank's experts
    sums = op.combine(results, None, None).tokens[:T]  # [T, H]

The letters in shapes:

- W: ranks of the group.
- T: tokens of this rank in this step, at most its bound in step_tokens.
- M: the most tokens that a rank may bring to any step, `config.max_num_inp_token_per_rank`.
- H: elements of a token (hidden size).
- K: experts that each token names (top-k).
- E: experts that this rank owns.
- S: scales of a token whose elements are quantised.
- R: rows that a rank may receive in this step: the sum of all ranks' bounds, which is W * step_tokens where step_tokens
  is one number; in layout compact at most the config's cap.

Every call runs on the caller's current stream, after the op's previous call, and returns without waiting for the GPU.
Work that is launched later on that stream may overwrite the call's inputs. A feature that a backend lacks raises
UnsupportedError; the `capabilities` of its manager list the features.
"""
# ruff: noqa: A002  MORI's names

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.arguments import Step


class DispatchResult(NamedTuple):
    """The rows that this rank's experts work on, ascending by (source rank, source token).

    The tensors keep their addresses for the life of the op, and are valid until this rank calls `combine`. Their
    leading dimensions depend on the layout:

    - compact: [R], the received rows first.
    - rank_major: [W, step_tokens], each source's rows first. With a bound for each rank [R]: the rows from rank r begin
      at the sum of the bounds of the ranks below r.
    - expert_major: [E, R], each expert's rows first; indices as in rank_major.

    Attributes:
        tokens: [..., H] of data_type, or fp8 after a cast. Rows without a token hold arbitrary values.
        weights: [..., K] float32, in expert_major [E, R]. None if dispatch was given none. With the config's local_ids
            0 in slots of other ranks' experts.
        scales: [..., S], float32, uint8 (ue8m0) or the dtype that was given. None without scales and with fp8_static.
            With the config's column_major_scales by columns, those of a byte as int32 [E, R, S / 4].
        indices: [..., K] int32: all K global expert ids of the row's token. With the config's local_ids those of this
            rank's experts, which count from 0, and -1 in the other slots. pad_id in rows without a token.
        total_recv: [1] int32: the rows received from all sources.
    """

    tokens: Tensor
    weights: Tensor | None
    scales: Tensor | None
    indices: Tensor
    total_recv: Tensor


class CombineResult(NamedTuple):
    """The sums for this rank's own tokens. The op's own tensors keep their addresses; the next combine overwrites them.

    Attributes:
        tokens: [M, H] of combine_dtype, of which the first T rows belong to this step; or the `out` that was given.
        weights: [M, K] float32: the sums of combine's weights. None if combine was given none.
    """

    tokens: Tensor
    weights: Tensor | None


class DispatchCombineOp(Protocol):
    """Dispatch and combine of one layer. The calls alternate, and all ranks make the same ones, whole or in halves.

    InputError and AlternationError are raised before anything is sent, so the call can be repeated. An error that only
    the device can see (a late rank, ranks that disagree, too many rows) is raised by a later call. `reset` on every
    rank then makes the op usable again.

    Calls record no gradients: while torch records them, a tensor that requires grad raises InputError. So does a tensor
    without memory, as torch.func and FakeTensorMode make them.

    Attributes:
        config: shapes and choices.
        device: where the op's tensors live.
        open_step: the step between its calls; None where a dispatch comes next.
    """

    config: EpDispatchCombineConfig
    device: torch.device
    open_step: Step | None

    def dispatch(
        self,
        input: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        step_tokens: int | Sequence[int] | None = None,
        max_num_tokens: int | Sequence[int] | None = None,
        pad_id: int = -1,
        tag: int = 0,
    ) -> DispatchResult:
        """Send each token once to every distinct rank that owns one of its experts; return the rows received.

        Args:
            input: [T, H] of data_type, or fp8 that is cast already where dispatch casts.
            weights: [T, K] float32, or None on all ranks. They travel with the tokens. Layout expert_major requires
                them, and its combine multiplies by them.
            scales: [T, S] of tokens that are quantised already, or None on all ranks. With quant_type fp8_static the
                cast's scale, float32 of one element from 2**-126 to 2**126, also on a rank without tokens: rows are
                tokens / scale, undefined for other scales. A graph's replay reads it anew. It does not travel and is
                not compared, so give the same on all ranks.
            indices: [T, K] int32 global expert ids. An id outside [0, num_experts) is a dropped slot.
            block_num, warp_per_block: programs and warps of the launch; -1 lets the op choose.
            rdma_block_num: without effect.
            call_local_expert_count: also fill `local_expert_count`.
            step_tokens: the most tokens that any rank brings to this step, from 1 to M; None is M. Or a list of W
                integers from 0 to M, the most tokens that each rank brings: two ranks with [40, 1] get 41 rows, where
                they get 80 with 40. Equal on all ranks; a list of W equal numbers is the same step as the number.
            max_num_tokens: the older name of step_tokens, which it replaces.
            pad_id: the id in the returned indices of rows without a token.
            tag: a number of this call, at least 0, equal on all ranks, such as its layer's. Ranks whose tags differ get
                ConfigMismatchError instead of rows of another layer. It travels modulo 2**(28 - n), where M has n bits
                (16384 for M = 8192). Other libraries' backends ignore it.

        Raises:
            InputError: an argument does not fit; nothing was sent.
            AlternationError: the step before has not been combined.
            ConfigMismatchError, CapacityError, RankTimeoutError: by an op that waits on the host, where ranks disagree,
                one would receive more rows than the cap, or one did not come.
        """

    def dispatch_send(
        self,
        input: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        *,
        step_tokens: int | Sequence[int] | None = None,
        max_num_tokens: int | Sequence[int] | None = None,
        pad_id: int = -1,
        tag: int = 0,
    ) -> DispatchResult:
        """Begin a dispatch: send the tokens. Arguments and errors are those of `dispatch`.

        Returns the tensors that dispatch_recv fills. A backend without halves does all of the dispatch here.
        """

    def dispatch_recv(self) -> DispatchResult:
        """End a dispatch: wait on the GPU for the rows of all ranks."""

    def combine(
        self,
        input: Tensor,
        weights: Tensor | None,
        indices: Tensor | None,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        out: Tensor | None = None,
        bias_0: Tensor | None = None,
        bias_1: Tensor | None = None,
    ) -> CombineResult:
        """Add the rows that the distinct ranks return for each token, in float32, and round once.

        A token without a valid expert becomes zeros, or the sum of its biases.

        Args:
            input: the experts' results, combine_dtype, in the shape and order of DispatchResult.tokens: of each row
                the weighted sum over this rank's experts, in layout expert_major one expert's result without weights.
                Rows without a token may hold anything.
            weights: None, or in the shape and order of DispatchResult.weights, to be summed per token; None in layout
                expert_major.
            indices: None, or the ids that this rank gave to dispatch; others are an error.
            block_num, warp_per_block: programs and warps of the launch; -1 lets the op choose.
            rdma_block_num, use_external_inp_buf, call_reset: MORI's arguments, without effect.
            out: [T, H] of combine_dtype to write the sums to. It may be a bias, and else overlaps no argument.
            bias_0, bias_1: [T, H] of combine_dtype, added in this order before rounding.

        Raises:
            InputError, ForeignIndicesError: an argument does not fit; nothing was sent.
            AlternationError: there is no dispatch to combine.
            RankTimeoutError: by an op that waits on the host, where a rank did not come.
        """

    def combine_send(
        self,
        input: Tensor,
        weights: Tensor | None = None,
        indices: Tensor | None = None,
        *,
        out: Tensor | None = None,
        bias_0: Tensor | None = None,
        bias_1: Tensor | None = None,
    ) -> CombineResult:
        """Begin a combine: send the rows back. Arguments and errors are those of `combine`.

        Later work on the stream may overwrite `input` and `weights`; `out` and the biases only after combine_recv.
        """

    def combine_recv(self) -> CombineResult:
        """End a combine: wait on the GPU for this rank's rows and add them."""

    @property
    def recv_counts(self) -> Tensor:
        """[W] int32, the rows received from each source in the last dispatch."""

    @property
    def local_expert_count(self) -> Tensor:
        """[E] int32, the received slots per expert of this rank, after dispatch(call_local_expert_count=True)."""

    @property
    def expert_recv_count(self) -> Tensor:
        """[E] int32, the rows per expert of this rank, in layout expert_major."""

    @property
    def has_open_step(self) -> bool:
        """Whether a step has begun and not ended; also one whose call was interrupted."""

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> Tensor:
        """Memory for combine's input: [R, H] of combine_dtype, in expert_major [E * R, H], with R for M tokens."""

    def get_dispatch_src_token_pos(self) -> Tensor:
        """[total_recv] int32: source rank * (W * M) + source token of each received row. The host waits for the GPU."""

    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]:
        """(programs, those that exchange chunks between nodes, warps per program) of a call with M tokens."""

    def set_max_sms(self, max_sms: int, *, shares_sm: bool = False) -> None:
        """Bound the multiprocessors that the op's launches use; 0 = all. Must be equal on all ranks.

        shares_sm: whether products run on the same multiprocessors meanwhile.
        """

    def set_timeout(self, timeout_secs: float) -> None:
        """Bound the waits of calls and of graph replays from now on."""

    def active_ranks(self) -> tuple[int, ...]:
        """The ranks that are not masked, ascending; with on_rank_loss="fail" all of them."""

    def step_fault(self) -> Tensor:
        """A bool [1] on the device: whether ranks were masked since the last call; their part of a step may lack."""

    def warmup_split(self) -> None:
        """Compile the kernels of split calls, so that a graph can capture them."""

    def check(self) -> None:
        """Raise the first error that the kernels have recorded; never blocks."""

    def reset(self) -> None:
        """Drop the open step and make the op usable again after an error. Collective."""

    def close(self) -> None:
        """End the use of the op; a second call does nothing. Close an op that owns its memory on every rank."""
