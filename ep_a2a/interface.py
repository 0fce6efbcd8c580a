"""The contract of every op: what `manager.get_handle` returns, whichever backend, transport or number of nodes.

An op moves the tokens of one MoE layer between W ranks. A rank brings T tokens of H elements, 0 <= T <= M; each token
names K of the W * E experts. `dispatch` sends a token once to every distinct rank that owns one of its experts.
`combine` brings the experts' results back and adds them. Calls run on the caller's current stream, after the op's
previous call, and return at once. Inputs may be overwritten by later work on that stream.
What a backend leaves out raises UnsupportedError; its manager's `capabilities` list it.
"""
# ruff: noqa: A002, D102  MORI's names; comments in place of docstrings keep the contract on one screen

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ep_a2a.config import EpDispatchCombineConfig


class DispatchResult(NamedTuple):
    """Rows for this rank's experts, ascending by (source rank, source token), at fixed addresses until `combine`.

    The layout gives [R, .]. compact: dense, R = W * max_num_tokens or the cap. rank_major: [W, max_num_tokens, .],
    dense per source. expert_major: [E, W * max_num_tokens, .], dense per expert; its indices are as in rank_major.
    """

    tokens: Tensor  # [R, H] of data_type or fp8; rows without a token hold anything
    weights: Tensor | None  # [R, K] float32, expert_major [E, R]; None if dispatch was given none
    scales: Tensor | None  # [R, S] of quantised tokens, else None
    indices: Tensor  # [R, K] int32 global ids, all K of the token; pad_id in rows without a token
    total_recv: Tensor  # [1] int32, rows received from all sources


class CombineResult(NamedTuple):
    """Sums for this rank's own tokens, at fixed addresses until the next combine."""

    tokens: Tensor  # [M, H] of combine_dtype, the first T rows count; or `out`
    weights: Tensor | None  # [M, K] float32, sums of combine's weights; None if it was given none


class DispatchCombineOp(Protocol):
    """One layer's dispatch and combine. All ranks make the same calls, whole or split; the two alternate.

    InputError and AlternationError are raised before anything is sent; the call can be repeated. What only the device
    sees (a late rank, ranks that disagree, too many rows) is raised by a later call; then `reset` mends the op.
    """

    config: EpDispatchCombineConfig
    device: torch.device

    # input [T, H], weights [T, K] float32 or None, scales [T, S] or None, indices [T, K] int32. An id that is no
    # expert's is a dropped slot. Weights and scales: from all ranks or from none. max_num_tokens bounds every rank's T
    # in this step, is equal on all ranks, and defaults to M. Launch numbers of -1 are chosen by the op.
    def dispatch(
        self, input: Tensor, weights: Tensor | None, scales: Tensor | None, indices: Tensor, block_num: int = -1,
        rdma_block_num: int = -1, warp_per_block: int = -1, call_local_expert_count: bool = False, *,
        max_num_tokens: int | None = None, pad_id: int = -1,
    ) -> DispatchResult: ...  # fmt: skip
    def dispatch_send(  # the first half: sends; the tensors that it returns are filled by dispatch_recv
        self, input: Tensor, weights: Tensor | None, scales: Tensor | None, indices: Tensor, *,
        max_num_tokens: int | None = None, pad_id: int = -1,
    ) -> DispatchResult: ...  # fmt: skip
    def dispatch_recv(self) -> DispatchResult: ...  # the second half: waits for all ranks' rows

    # input: experts' results in the shape and order of DispatchResult.tokens, of combine_dtype, weighed by the router
    # (expert_major: not weighed, combine does it). Rows of distinct ranks are added in float32; a token without an
    # expert becomes zeros. weights: [R, K] to be summed, or None. indices: None, or this rank's own, as dispatched.
    # out: [T, H] to write to. bias_0, bias_1: [T, H], added before rounding. The other arguments are MORI's.
    def combine(
        self, input: Tensor, weights: Tensor | None, indices: Tensor | None, block_num: int = -1,
        rdma_block_num: int = -1, warp_per_block: int = -1, use_external_inp_buf: int = -1, call_reset: bool = False, *,
        out: Tensor | None = None, bias_0: Tensor | None = None, bias_1: Tensor | None = None,
    ) -> CombineResult: ...  # fmt: skip
    def combine_send(
        self, input: Tensor, weights: Tensor | None = None, indices: Tensor | None = None, *,
        out: Tensor | None = None, bias_0: Tensor | None = None, bias_1: Tensor | None = None,
    ) -> CombineResult: ...  # fmt: skip
    def combine_recv(self) -> CombineResult: ...

    @property
    def recv_counts(self) -> Tensor: ...  # [W] int32, rows received per source
    @property
    def local_expert_count(self) -> Tensor: ...  # [E] int32, received slots per expert, if dispatch was asked to count
    @property
    def expert_recv_count(self) -> Tensor: ...  # [E] int32, rows per expert in layout expert_major
    @property
    def has_open_step(self) -> bool: ...  # whether a call has begun a step that no call has ended
    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> Tensor: ...
    def get_dispatch_src_token_pos(self) -> Tensor: ...  # [total_recv] int32, source rank * (W * M) + token; host waits
    def get_launch_config(  # (programs, those between nodes, warps per program) of a call with M tokens
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]: ...
    def set_max_sms(self, max_sms: int) -> None: ...  # bounds multiprocessors from now on; 0 = all; equal on all ranks
    def set_timeout(self, timeout_secs: float) -> None: ...  # bounds waits from now on, in replayed graphs, too
    def warmup_split(self) -> None: ...  # makes the split calls ready to be captured in a graph
    def check(self) -> None: ...  # raises what has gone wrong so far; does not wait
    def reset(self) -> None: ...  # collective: drops the open step and mends the op after an error
    def close(self) -> None: ...  # ends the use of the op; idempotent
