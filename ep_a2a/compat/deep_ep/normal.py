"""DeepEP's normal mode, on ops of layout compact: returns exactly the received rows, with ids of local experts."""

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
    """The layout of a dispatch without a handle; fields are arguments of Buffer.dispatch."""

    is_token_in_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    expert_alignment: int
    num_worst_tokens: int


class Received(NamedTuple):
    """The received tensors that Buffer.dispatch returns; ids and weights are None without topk_idx."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None


NormalResult = tuple[Received, list[int] | None, NormalHandle | None, torch.Tensor | None]


class NormalMode:
    """Runs dispatch and combine of a buffer's normal mode on the current stream.

    Args:
        ops: makes the ops. steps: the buffer's open dispatches, of both modes.
    """

    def __init__(self, ops: Ops, steps: Steps) -> None:
        self._ops, self._steps = ops, steps

    def dispatch(self, x: torch.Tensor, scales: torch.Tensor | None, layout: TokenLayout, num_sms: int) -> NormalResult:
        """Dispatches by a new layout. The host waits for the ranks' counts, unless num_worst_tokens bounds them.

        Returns:
            The received tensors, tokens per local expert, the handle, and the ids that it keeps.
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
        routing = Routing(ids, num_routed_experts, max_num_tokens, num_recv_tokens)
        got = self._launch(routing, self._shape(routing, x, scales), x, scales, layout.topk_weights, num_sms)
        ids_dtype = None if topk_idx is None else topk_idx.dtype
        handle = NormalHandle.of(routing, prefix_matrix, layout.is_token_in_rank)
        return self._received(routing, got, ids_dtype), per_expert, handle, ids

    def dispatch_again(
        self, x: torch.Tensor, scales: torch.Tensor | None, handle: NormalHandle, num_sms: int
    ) -> NormalResult:
        """Dispatches other tokens by the routing of a handle. The host does not wait. Returns the received tensors."""
        routing = handle.routing
        if x.shape[0] != routing.num_tokens:
            raise ShapeError(f"the {routing.num_tokens} tokens of the handle's dispatch", str(x.shape[0]))
        routing.step.displace()
        got = self._launch(routing, self._shape(routing, x, scales), x, scales, None, num_sms)
        return self._received(routing, got, None), None, None, None

    def combine(
        self, x: torch.Tensor, handle: NormalHandle, topk_weights: torch.Tensor | None, bias: Bias, num_sms: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the sums of this rank's tokens [T, H], plus bias, and of their weights [T, K]."""
        routing = handle.routing
        bias_0, bias_1 = _biases(bias, x, routing.num_tokens)
        if topk_weights is not None and topk_weights.shape[-1] != routing.ids.shape[1]:
            raise UnsupportedError(
                f"topk_weights with the {routing.ids.shape[1]} columns that the handle's dispatch routed by",
                str(tuple(topk_weights.shape)),
                "Pass topk_idx and topk_weights to that dispatch; without them no weights can come back.",
            )
        if not routing.step.is_open:
            # a dispatch of zeros makes this the open step of an op again
            zeros = torch.zeros(
                routing.num_tokens, routing.shape.hidden_dim, dtype=routing.shape.dtype, device=routing.ids.device
            )
            self._launch(routing, routing.shape, zeros, None, None, num_sms)
        step, op = routing.step, routing.step.op
        self._ops.limit_sms(op, num_sms)
        rows = self._whole("x", x, routing)
        weights = None if topk_weights is None else self._whole("topk_weights", topk_weights, routing)
        out = torch.empty(routing.num_tokens, op.config.hidden_dim, dtype=op.config.combined_dtype, device=x.device)
        _, sums = op.combine(rows, weights, None, out=out, bias_0=bias_0, bias_1=bias_1)
        step.close()
        return out, None if sums is None else sums[: routing.num_tokens].clone()

    def _launch(
        self,
        routing: Routing,
        shape: OpShape,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        weights: torch.Tensor | None,
        num_sms: int,
    ) -> DispatchResult:
        """Dispatches by a routing on an op of this shape, and makes that the routing's step."""
        index = self._steps.free_index()
        op = self._ops.get(shape, index)
        self._ops.limit_sms(op, num_sms)
        scales = None if scales is None else scales.contiguous()
        got = op.dispatch(x, weights, scales, routing.ids, max_num_tokens=routing.max_num_tokens)
        step = Step(op, index, (op.num_rows(routing.max_num_tokens), shape.hidden_dim))
        self._steps.add(step, keeps_rows=False)
        routing.shape, routing.step = shape, step
        return got

    def _shape(self, routing: Routing, x: torch.Tensor, scales: torch.Tensor | None) -> OpShape:
        if scales is not None and scales.dim() != 2:
            raise ShapeError("scales of shape [T, S], S per token", str(tuple(scales.shape)))
        num_scales, scale_bytes = (0, 0) if scales is None else (scales.shape[1], scales.dtype.itemsize)
        return OpShape(
            x.dtype,
            x.shape[1],
            routing.ids.shape[1],
            routing.num_experts,
            self._ops.max_tokens_for(routing.max_num_tokens),
            Layout.COMPACT,
            num_scales,
            scale_bytes,
        )

    def _received(self, routing: Routing, got: DispatchResult, ids_dtype: torch.dtype | None) -> Received:
        """Copies the result out of the op's memory, since tensors of DeepEP outlive the step."""
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
        """Returns as many rows as the op's combine takes; those past the received ones may hold anything."""
        if rows.dim() != 2 or rows.shape[0] != routing.num_recv_tokens:
            raise ShapeError(f"{name} with the {routing.num_recv_tokens} rows received", str(tuple(rows.shape)))
        num_rows = routing.step.op.num_rows(routing.max_num_tokens)
        if rows.shape[0] >= num_rows:
            return rows[:num_rows]
        whole = torch.empty(num_rows, rows.shape[1], dtype=rows.dtype, device=rows.device)
        whole[: rows.shape[0]] = rows
        return whole

    def _worst_case(self, num_tokens: int, layout: TokenLayout) -> tuple[int, int]:
        """Returns (max_num_tokens, received rows) of a dispatch with num_worst_tokens."""
        most = layout.num_worst_tokens // self._ops.num_ranks
        if num_tokens > most or not most:
            raise TooManyTokensError(
                f"at most {most} tokens on each rank, num_worst_tokens / {self._ops.num_ranks}",
                str(num_tokens),
                "Pass num_worst_tokens = ranks * the most tokens of any rank, the same on all ranks.",
            )
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
    """Returns a copy of the first num_rows of an op's rows, extended by `filler` if the op has fewer."""
    if num_rows <= rows.shape[0]:
        return rows[:num_rows].clone()
    kept = torch.full((num_rows, *rows.shape[1:]), filler, dtype=torch.int32, device=rows.device).to(rows.dtype)
    kept[: rows.shape[0]] = rows
    return kept


def _biases(bias: Bias, x: torch.Tensor, num_tokens: int) -> Biases:
    """Returns the two biases, contiguous.

    Raises:
        InputError: more than two, or one of another shape or dtype than the result.
    """
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
