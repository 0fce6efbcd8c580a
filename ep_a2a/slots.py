"""Slots of tokens, in plain torch with gradients: received rows by expert, and sums of slots in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ep_a2a.errors import ShapeError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from ep_a2a.autograd import Received
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.base_op import BaseOp


class Groups(NamedTuple):
    """Received rows by expert, as grouped products take them. N is R * K, or with `exact` no more than there are slots.

    Attributes:
        rows: [N, H], a row for each slot of this rank's experts, ascending by expert, then as received. Zeros behind
            them.
        ends: [E] int32, for each expert of this rank the end of its rows: `offs` of torch's grouped products.
        order: [N] int64, the received slot of each row.
        valid: [N] bool, which rows have one of this rank's experts.
    """

    rows: Tensor
    ends: Tensor
    order: Tensor
    valid: Tensor


def group(op: BaseOp, received: Received, *, exact: bool = False) -> Groups:
    """Sort received rows by expert, a row for each slot. Has gradients in `received.rows`.

    Args:
        op: that of the dispatch.
        received: of the dispatch.
        exact: let the host wait for the number of slots, and make one row for each, at least one. Else the host waits
            for nothing, and a graph can hold the call.
    """
    num_experts, topk = op.config.num_local_experts, received.ids.shape[1]
    local = received.ids - op.config.first_expert
    own = (local >= 0) & (local < num_experts)
    experts, order = torch.where(own, local, num_experts).flatten().sort(stable=True)
    numbers = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    num_rows = max(1, int(own.sum())) if exact else len(order)
    valid, order = experts[:num_rows] < num_experts, order[:num_rows]
    # behind the last row grouped products leave anything, in results and gradients
    rows = torch.where(valid[:, None], received.rows[order // topk], 0)
    return Groups(rows, ends, order, valid)


def ungroup(results: Tensor, groups: Groups, received: Received) -> Tensor:
    """Add the experts' results for each received row, as combine takes them. Has gradients in results and weights.

    A result times its weight is rounded to the results' dtype. A row's products are added in float32, in ascending
    slots, and rounded once.

    Args:
        results: [N, H], the expert's result for each row of `groups`. Rows behind the last may hold anything.
        groups: of the same dispatch.
        received: of the dispatch; without weights results are added as they are.

    Returns:
        [R, H] of the results' dtype.
    """
    order, valid = groups.order, groups.valid
    if received.weights is not None:
        weights = torch.where(valid, received.weights.flatten()[order], 0)
        results = (results * weights[:, None]).to(results.dtype)
    shape, num_rows = received.ids.shape, len(order)
    numbers = torch.arange(received.ids.numel(), device=order.device)
    own = torch.zeros_like(numbers, dtype=torch.bool).scatter(0, order, valid).view(shape)
    # slots without a row read any, but each another: the gradients of one row are added in turn
    places = (numbers % max(1, num_rows)).scatter(0, order, numbers[:num_rows]).view(shape)
    slots = zip(own.unbind(1), places.unbind(1), strict=True)
    return sum_slots(torch.where(valid[:, None], results[place], 0) for valid, place in slots)


def by_slot(
    config: EpDispatchCombineConfig, tokens: Tensor, weights: Tensor | None, ids: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, int]:
    """Each slot as a token of one expert, and their number. Gradients of a token's slots are added in float32."""
    if config.topk != 1:
        raise UnsupportedError(
            'an op of topk 1 for reduction="slots"',
            f"topk {config.topk}",
            "Make one whose max_tokens is the most tokens of a rank times their slots.",
        )
    if ids.dim() != 2:
        raise ShapeError("ids of shape [T, K]", str(tuple(ids.shape)))
    # one cast for each slot: so backward adds the slots' gradients in float32
    wide, num_slots = tokens.float(), ids.shape[1]
    copies = torch.stack([wide.to(tokens.dtype) for _ in range(num_slots)], 1).flatten(0, 1)
    return copies, None if weights is None else weights.reshape(-1, 1), ids.reshape(-1, 1), num_slots


def sum_slots(rows: Iterable[Tensor]) -> Tensor:
    """The sum of a token's slots, in float32 and in their order, rounded once."""
    first, *others = rows
    total = first.float()
    for each in others:
        total = total + each.float()
    return total.to(first.dtype)
