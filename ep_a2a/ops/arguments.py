"""What a caller gives to one dispatch or combine, and what its launches work on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

MAX_REMEMBERED = 4096
"""Shapes of calls that a cache holds before it starts anew."""

T = TypeVar("T")


class Stages(NamedTuple):
    """What a launch does; the interpreter, which runs programs in turn, cannot do both where programs wait for rows."""

    send: bool
    receive: bool


WHOLE = Stages(True, True)
SEND = Stages(True, False)
RECEIVE = Stages(False, True)


Copies = tuple[tuple["torch.Tensor", "torch.Tensor"], ...]
"""Pairs (target, source) to copy before a launch."""
Biases = tuple["torch.Tensor | None", "torch.Tensor | None"]
"""What combine adds to its sums, [num_tokens, H] each."""
NO_BIASES: Biases = (None, None)


class StepInputs(NamedTuple):
    """What dispatch was given, or what of it travels.

    Attributes:
        tokens: [T, H] of data_type, or of wire_dtype where they have been cast.
        weights: float32 [T, K] or None. scales: [T, S] or None. ids: int32 [T, K].
        max_num_tokens: the step's, equal on all ranks. pad_id: id of rows without a token.
        counts_experts: local_expert_count is asked for.
        biases: what combine adds; known then.
    """

    tokens: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    ids: torch.Tensor
    max_num_tokens: int
    pad_id: int
    counts_experts: bool
    biases: Biases = NO_BIASES

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]


class CombineInputs(NamedTuple):
    """What combine was given; `interface.DispatchCombineOp.combine` says what fits."""

    rows: torch.Tensor
    weights: torch.Tensor | None
    ids: torch.Tensor | None
    out: torch.Tensor | None
    biases: Biases


class DispatchArguments(NamedTuple):
    """What one dispatch launch works on; see bulk_dispatch_kernel for the shapes."""

    x: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    ids: torch.Tensor
    num_tokens: int
    max_num_tokens: int
    wire_word: int
    pad_id: int
    row_limit: int


class CombineArguments(NamedTuple):
    """What one combine works on.

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
    max_num_tokens: int
    expert_rows: torch.Tensor | None = None
    biases: Biases = NO_BIASES
    copies: Copies = ()


def remember(cache: dict[Hashable, T], key: Hashable, value: T) -> T:
    """Adds to a cache, which is emptied first when it is full; returns the value."""
    if len(cache) >= MAX_REMEMBERED:
        cache.clear()
    cache[key] = value
    return value
