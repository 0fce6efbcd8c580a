"""The arguments of a dispatch or combine: as the caller gives them, and as launches take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

MAX_CACHED = 4096
"""Shapes of calls that a cache holds before it starts anew."""

T = TypeVar("T")


class Stages(NamedTuple):
    """The halves of a call that a launch does.

    The interpreter runs programs in turn, so that it takes two launches where programs wait for rows.
    """

    send: bool
    receive: bool


WHOLE = Stages(True, True)
SEND = Stages(True, False)
RECEIVE = Stages(False, True)


Copies = tuple[tuple["torch.Tensor", "torch.Tensor"], ...]
"""Pairs (target, source) to copy before a launch."""
Biases = tuple["torch.Tensor | None", "torch.Tensor | None"]
"""bias_0 and bias_1 of combine, [num_tokens, H] each."""
NO_BIASES: Biases = (None, None)


class StepInputs(NamedTuple):
    """The arguments of a dispatch, and after the checks those that travel.

    Attributes:
        tokens: [T, H] of data_type, or of wire_dtype where they have been cast.
        weights: float32 [T, K] or None. scales: [T, S] or None. ids: int32 [T, K].
        step_tokens: the step's, equal on all ranks. pad_id: id of rows without a token.
        counts_experts: local_expert_count is asked for.
        biases: what combine adds; known then.
    """

    tokens: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    ids: torch.Tensor
    step_tokens: int
    pad_id: int
    counts_experts: bool
    biases: Biases = NO_BIASES

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]


class CombineInputs(NamedTuple):
    """The arguments of a combine; `interface.DispatchCombineOp.combine` has their shapes."""

    rows: torch.Tensor
    weights: torch.Tensor | None
    ids: torch.Tensor | None
    out: torch.Tensor | None
    biases: Biases


class DispatchArguments(NamedTuple):
    """The operands of one dispatch launch; bulk_dispatch_kernel has their shapes."""

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    ids: torch.Tensor
    num_tokens: int
    step_tokens: int
    wire_word: int
    pad_id: int
    row_limit: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that are given."""
        return tuple(each for each in (self.tokens, self.scales, self.weights, self.ids) if each is not None)

    def copied(self) -> DispatchArguments:
        """The same with copies of the tensors."""
        scales, weights = (None if each is None else each.clone() for each in (self.scales, self.weights))
        return self._replace(tokens=self.tokens.clone(), scales=scales, weights=weights, ids=self.ids.clone())


class CombineArguments(NamedTuple):
    """The operands of one combine.

    Attributes:
        rows: received rows' results, [R, H] of combined_dtype in received order.
        weights: [R, K] in received-row order, or None.
        ids: ids to compare with those dispatched, or None.
        result: [num_tokens, H], where the sums go.
        expert_rows: in layout expert_major, the rows [E, W * max_num_tokens, H] that `rows` are made from.
        biases: to be added to the sums.
        copies: (target, source) to copy first; the targets are among the above.
    """

    rows: torch.Tensor
    weights: torch.Tensor | None
    ids: torch.Tensor | None
    result: torch.Tensor
    num_tokens: int
    step_tokens: int
    expert_rows: torch.Tensor | None = None
    biases: Biases = NO_BIASES
    copies: Copies = ()


def add_to_cache(cache: dict[Hashable, T], key: Hashable, value: T) -> T:
    """Adds to a cache, which is emptied first when it is full; returns the value."""
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value
    return value
