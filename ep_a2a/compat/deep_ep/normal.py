"""DeepEP's normal mode on ops of layout compact: tensors of exactly the received rows, ids of local experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ep_a2a.compat.deep_ep.handles import NormalHandle, Routing
from ep_a2a.compat.deep_ep.layouts import check_num_experts, exchange_counts, rank_ids, routed_ids
from ep_a2a.compat.deep_ep.ops import OpShape
from ep_a2a.compat.deep_ep.steps import Step
from ep_a2a.config import Layout
from ep_a2a.errors import DtypeError, InputError, ShapeError, TooManyTokensError, UnsupportedError
from ep_a2a.routing import destination_mask

if TYPE_CHECKING:
    from ep_a2a.compat.deep_ep.ops import Ops
    from ep_a2a.compat.deep_ep.steps import Steps
    from ep_a2a.interface import DispatchResult
    from ep_a2a.ops.arguments import Biases

Bias = torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | list[torch.Tensor | None] | None


class TokenLayout(NamedTuple):
    """What `dispatch` is told where no handle says it; see Buffer.dispatch."""

    is_token_in_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    expert_alignment: int
    num_worst_tokens: int


class Received(NamedTuple):
    """What `dispatch` returns, but for the event; ids and weights are None without topk_idx."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None


class NormalMode:
    """Dispatch and combine of a buffer's normal mode; streams and events are the buffer's.

    Args:
        ops: makes the ops. steps: the buffer's open dispatches, of both modes.
    """

    def __init__(self, ops: Ops, steps: Steps) -> None:
        self._ops, self._steps = ops, steps

    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, layout: TokenLayout, num_sms: int
    ) -> tuple[Received, list[int], NormalHandle, torch.Tensor]:
        """A dispatch of a new layout. Waits on the host for the ranks' counts, unless num_worst_tokens bounds them.

        Returns:
            What came, tokens per local expert, the handle, and the ids that it keeps.
        """
        topk_idx = layout.topk_idx
        self._check_layout(x, layout)
        num_experts = layout.num_tokens_per_expert.shape[0]
        if topk_idx is None:
            ids, is_sent = rank_ids(layout.is_token_in_rank), layout.is_token_in_rank
        else:
            ids = routed_ids(topk_idx, layout.is_token_in_rank, num_experts)
            is_sent = layout.is_token_in_rank & destination_mask(topk_idx, num_experts, self._ops.num_ranks)
        per_expert: list[int] = []
        prefix_matrix = None
        if layout.num_worst_tokens:
            max_num_tokens, num_recv_tokens = self._worst_case(x.shape[0], layout)
        else:
            counts = exchange_counts(self._ops.groups, self._ops.rank, is_sent, layout.num_tokens_per_expert)
            max_num_tokens, num_recv_tokens = counts.max_num_tokens, counts.num_recv_tokens
            align = layout.expert_alignment
            per_expert = [-(-count // align) * align for count in counts.num_recv_per_expert]
            prefix_matrix = counts.rank_prefix_matrix
        # without topk_idx one expert stands for each rank
        num_routed_experts = self._ops.num_ranks if topk_idx is None else num_experts
        shape = self._shape(x, scales, ids.shape[1], num_routed_experts, max_num_tokens)
        index = self._steps.free_index()
        weights = layout.topk_weights
        routing, got = self._launch(shape, index, x, scales, ids, weights, max_num_tokens, num_recv_tokens, num_sms)
        ids_dtype = None if topk_idx is None else topk_idx.dtype
        handle = NormalHandle.of(routing, prefix_matrix, layout.is_token_in_rank)
        return self._received(routing, got, ids_dtype), per_expert, handle, ids

    def dispatch_again(
        self, x: torch.Tensor, scales: torch.Tensor | None, handle: NormalHandle, num_sms: int
    ) -> Received:
        """A dispatch of other tokens to where a handle's went. Nothing is waited for on the host."""
        routing = handle.routing
        if x.shape[0] != routing.num_tokens:
            raise ShapeError(f"the {routing.num_tokens} tokens of the handle's dispatch", str(x.shape[0]))
        routing.step.displace()
        shape = self._shape(x, scales, routing.ids.shape[1], routing.num_experts, routing.max_num_tokens)
        again, got = self._launch(
            shape, self._steps.free_index(), x, scales, routing.ids, None, routing.max_num_tokens,
            routing.num_recv_tokens, num_sms,
        )  # fmt: skip
        routing.shape, routing.step = again.shape, again.step
        return self._received(routing, got, None)

    def combine(
        self, x: torch.Tensor, handle: NormalHandle, topk_weights: torch.Tensor | None, bias: Bias, num_sms: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sums of this rank's tokens [T, H], plus bias, and of their weights [T, K]."""
        routing = handle.routing
        bias_0, bias_1 = _biases(bias, x, routing.num_tokens)
        if topk_weights is not None and topk_weights.shape[-1] != routing.ids.shape[1]:
            raise UnsupportedError(
                f"topk_weights with the {routing.ids.shape[1]} columns that the handle's dispatch routed by",
                str(tuple(topk_weights.shape)),
                "Pass topk_idx and topk_weights to that dispatch; without them no weights can come back.",
            )
        if not routing.step.is_open:
            self._reopen(routing, num_sms)
        step, op = routing.step, routing.step.op
        self._ops.limit_sms(op, num_sms)
        rows = self._whole("x", x, routing)
        weights = None if topk_weights is None else self._whole("topk_weights", topk_weights, routing)
        out = torch.empty(routing.num_tokens, op.config.hidden_dim, dtype=op.config.combined_dtype, device=x.device)
        _, sums = op.combine(rows, weights, None, out=out, bias_0=bias_0, bias_1=bias_1)
        step.close()
        return out, None if sums is None else sums[: routing.num_tokens].clone()

    def _launch(
        self, shape: OpShape, index: int, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor,
        weights: torch.Tensor | None, max_num_tokens: int, num_recv_tokens: int, num_sms: int,
    ) -> tuple[Routing, DispatchResult]:  # fmt: skip
        op = self._ops.get(shape, index)
        self._ops.limit_sms(op, num_sms)
        scales = None if scales is None else scales.contiguous()
        got = op.dispatch(x, weights, scales, ids, max_num_tokens=max_num_tokens)
        step = Step(op, index, (op.num_rows(max_num_tokens), shape.hidden_dim))
        self._steps.add(step)
        return Routing(ids, shape.num_experts, max_num_tokens, num_recv_tokens, shape, step), got

    def _reopen(self, routing: Routing, num_sms: int) -> None:
        """Makes a handle's dispatch the open step of an op again, by a dispatch of zeros."""
        shape = routing.shape
        zeros = torch.zeros(routing.num_tokens, shape.hidden_dim, dtype=shape.dtype, device=routing.ids.device)
        again, _ = self._launch(
            shape, self._steps.free_index(), zeros, None, routing.ids, None, routing.max_num_tokens,
            routing.num_recv_tokens, num_sms,
        )  # fmt: skip
        routing.step = again.step

    def _shape(
        self, x: torch.Tensor, scales: torch.Tensor | None, topk: int, num_experts: int, max_num_tokens: int
    ) -> OpShape:
        num_scales, scale_bytes = (0, 0) if scales is None else (scales.shape[1], scales.dtype.itemsize)
        most = self._ops.max_tokens_for(max_num_tokens)
        return OpShape(x.dtype, x.shape[1], topk, num_experts, most, Layout.COMPACT, num_scales, scale_bytes)

    def _received(self, routing: Routing, got: DispatchResult, ids_dtype: torch.dtype | None) -> Received:
        """The caller's own tensors of what the op holds: DeepEP's live as long as the caller wishes."""
        tokens, weights, scales, ids, _ = got
        num_rows = routing.num_recv_tokens
        x = _kept(tokens, num_rows, 0)
        kept_scales = None if scales is None else _kept(scales, num_rows, 0)
        if ids_dtype is None or weights is None:
            return Received(x, kept_scales, None, None)
        config = routing.step.op.config
        local = _kept(ids, num_rows, -1) - config.first_expert
        is_local = (local >= 0) & (local < config.num_local_experts)
        local_ids = torch.where(is_local, local, -1).to(ids_dtype)
        return Received(x, kept_scales, local_ids, _kept(weights, num_rows, 0).masked_fill_(~is_local, 0.0))

    def _whole(self, name: str, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        """As many rows as the op's combine takes; those past the received ones may hold anything."""
        if rows.dim() != 2 or rows.shape[0] != routing.num_recv_tokens:
            raise ShapeError(f"{name} with the {routing.num_recv_tokens} rows received", str(tuple(rows.shape)))
        num_rows = routing.step.op.num_rows(routing.max_num_tokens)
        if rows.shape[0] >= num_rows:
            return rows[:num_rows]
        whole = torch.empty(num_rows, rows.shape[1], dtype=rows.dtype, device=rows.device)
        whole[: rows.shape[0]] = rows
        return whole

    def _worst_case(self, num_tokens: int, layout: TokenLayout) -> tuple[int, int]:
        """(max_num_tokens, received rows) where num_worst_tokens says how many can come."""
        most = layout.num_worst_tokens // self._ops.num_ranks
        if num_tokens > most or not most:
            raise TooManyTokensError(
                f"at most {most} tokens on each rank, num_worst_tokens / {self._ops.num_ranks}", str(num_tokens),
                "Pass num_worst_tokens = ranks * the most tokens of any rank, the same on all ranks.",
            )  # fmt: skip
        if layout.topk_idx is None:
            raise InputError("topk_idx and topk_weights with num_worst_tokens, as DeepEP wants them", "none")
        return most, layout.num_worst_tokens

    def _check_layout(self, x: torch.Tensor, layout: TokenLayout) -> None:
        is_sent, num_tokens = layout.is_token_in_rank, x.shape[0]
        if is_sent.dtype != torch.bool:
            raise DtypeError("is_token_in_rank of dtype torch.bool", str(is_sent.dtype))
        if tuple(is_sent.shape) != (num_tokens, self._ops.num_ranks):
            raise ShapeError(
                f"is_token_in_rank of shape {(num_tokens, self._ops.num_ranks)}", str(tuple(is_sent.shape))
            )
        check_num_experts(layout.num_tokens_per_expert.shape[0], self._ops.num_ranks)
        if (layout.topk_idx is None) != (layout.topk_weights is None):
            raise InputError("topk_idx and topk_weights, or neither", "one of them")
        if layout.topk_idx is not None and layout.topk_idx.shape[0] != num_tokens:
            raise ShapeError(f"topk_idx of {num_tokens} tokens", str(tuple(layout.topk_idx.shape)))
        if layout.expert_alignment < 1 or layout.num_worst_tokens < 0:
            raise InputError(
                "expert_alignment >= 1 and num_worst_tokens >= 0",
                f"{layout.expert_alignment} and {layout.num_worst_tokens}",
            )


def _kept(rows: torch.Tensor, num_rows: int, filler: int) -> torch.Tensor:
    """The first num_rows of an op's rows as a tensor of its own, with `filler` behind them where there are fewer."""
    if num_rows <= rows.shape[0]:
        return rows[:num_rows].clone()
    kept = torch.full((num_rows, *rows.shape[1:]), filler, dtype=torch.int32, device=rows.device).to(rows.dtype)
    kept[: rows.shape[0]] = rows
    return kept


def _biases(bias: Bias, x: torch.Tensor, num_tokens: int) -> Biases:
    """The biases, checked."""
    given = [bias] if bias is None or isinstance(bias, torch.Tensor) else list(bias)
    if len(given) > 2:
        raise InputError("one bias or a pair", str(len(given)))
    biases = [each for each in given if each is not None]
    for each in biases:
        if tuple(each.shape) != (num_tokens, x.shape[1]):
            raise ShapeError(f"a bias of shape {(num_tokens, x.shape[1])}", str(tuple(each.shape)))
        if each.dtype != x.dtype:
            raise DtypeError(f"a bias of dtype {x.dtype}", str(each.dtype))
    first, second, *_ = *(each.contiguous() for each in biases), None, None
    return first, second
