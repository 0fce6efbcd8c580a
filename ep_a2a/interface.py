"""The contract of every op: what `manager.get_handle` returns, whichever backend, transport or number of nodes.

An op moves the tokens of one MoE layer between W ranks. A rank brings T tokens of H elements, 0 <= T <= M; each token
names K of the W * E experts. `dispatch` sends a token once to every distinct rank that owns one of its experts.
`combine` brings the experts' results back and adds them. Calls run on the caller's current stream, after the op's
previous call, and return at once; later work on that stream may overwrite inputs. What a backend leaves out raises
UnsupportedError; its manager's `capabilities` list it.
"""
# ruff: noqa: A002  MORI's names

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ep_a2a.config import EpDispatchCombineConfig


class DispatchResult(NamedTuple):
    """Rows for this rank's experts, ascending by (source rank, source token), at fixed addresses until `combine`.

    R = W * max_num_tokens, with layout compact at most the cap; S scales per token. *rows is [R] in compact (dense),
    [W, max_num_tokens] in rank_major (dense per source), [E, R] in expert_major (dense per expert).
    """

    tokens: Tensor  # [*rows, H] of data_type, or fp8 after a cast; rows without a token hold anything
    weights: Tensor | None  # [*rows, K] float32, expert_major [E, R]; None if dispatch was given none
    scales: Tensor | None  # [*rows, S] float32, uint8 (ue8m0) or the dtype given; None without scales
    indices: Tensor  # int32 global ids, all K of a token, pad_id in rows without: compact [R, K], else [W, R / W, K]
    total_recv: Tensor  # [1] int32, rows received from all sources


class CombineResult(NamedTuple):
    """Sums for this rank's own tokens, at fixed addresses until the next combine."""

    tokens: Tensor  # [M, H] of combine_dtype, the first T rows count; or `out`
    weights: Tensor | None  # [M, K] float32, sums of combine's weights; None if it was given none


class DispatchCombineOp(Protocol):
    """One layer's dispatch and combine, which alternate. All ranks make the same calls, whole or split.

    InputError and AlternationError come before anything is sent; the call can be repeated. What only the device sees
    (a late rank, ranks that disagree, too many rows) is raised by a later call; then `reset` mends the op.
    """

    config: EpDispatchCombineConfig
    device: torch.device

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
        max_num_tokens: int | None = None,
        pad_id: int = -1,
    ) -> DispatchResult:
        """Sends input [T, H] with weights [T, K] float32, scales [T, S] and indices [T, K] int32, ids of experts.

        Other ids are dropped slots. Weights and scales come from all ranks or from none. max_num_tokens, default M and
        equal on all ranks, bounds every rank's T in this step. The op chooses launch numbers that are -1."""

    def dispatch_send(
        self,
        input: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        *,
        max_num_tokens: int | None = None,
        pad_id: int = -1,
    ) -> DispatchResult:
        """The first half: sends. dispatch_recv fills the tensors that it returns."""

    def dispatch_recv(self) -> DispatchResult:
        """The second half: waits for the rows of all ranks."""

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
        """Adds the rows that distinct ranks return for a token, in float32; a token without an expert becomes zeros.

        input: the experts' results, combine_dtype, in shape and order of DispatchResult.tokens, weighed by the router
        (expert_major: combine weighs). weights: [*rows, K] to sum. indices: None, or this rank's own. out: [T, H] to
        write to. bias_0, bias_1: [T, H], added before rounding. The other arguments are MORI's."""

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
        """The first half: sends rows back. Later work may overwrite `input`, but no bias."""

    def combine_recv(self) -> CombineResult:
        """The second half: waits for this rank's rows and adds them."""

    @property
    def recv_counts(self) -> Tensor:
        """[W] int32, rows received per source in the last dispatch."""

    @property
    def local_expert_count(self) -> Tensor:
        """[E] int32, received slots per expert, where dispatch was asked for it."""

    @property
    def expert_recv_count(self) -> Tensor:
        """[E] int32, rows per expert in layout expert_major."""

    @property
    def has_open_step(self) -> bool:
        """Whether a call has begun a step that no call has ended."""

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> Tensor:
        """Memory for combine's input, [R, H] for M tokens, expert_major [E * R, H]."""

    def get_dispatch_src_token_pos(self) -> Tensor:
        """[total_recv] int32: source rank * (W * M) + token. Host waits."""

    def get_launch_config(
        self,
        is_dispatch: bool = True,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
    ) -> tuple[int, int, int]:
        """(programs, those between nodes, warps per program) of a call with M tokens."""

    def set_max_sms(self, max_sms: int) -> None:
        """Bounds multiprocessors; 0 = all; equal on all ranks."""

    def set_timeout(self, timeout_secs: float) -> None:
        """Bounds waits from now on, of replayed graphs, too."""

    def warmup_split(self) -> None:
        """Makes the split calls ready to be captured in a graph."""

    def check(self) -> None:
        """Raises what has gone wrong so far, without waiting."""

    def reset(self) -> None:
        """Drops the open step and mends the op after an error. Collective."""

    def close(self) -> None:
        """Ends the use of the op; idempotent."""
