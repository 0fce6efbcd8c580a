"""Arguments of a dispatch and a combine: StepInputs and CombineInputs as given, the others as engines take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

MAX_CACHED = 4096
"""Entries that a cache holds at most; it is emptied when it is full."""

T = TypeVar("T")


class Stages(NamedTuple):
    """The halves of a call that a launch does.

    The interpreter runs programs one after another. Where programs wait for rows it needs a launch for each half.
    """

    send: bool
    receive: bool


WHOLE = Stages(True, True)
SEND = Stages(True, False)
RECEIVE = Stages(False, True)


class LaunchWish(NamedTuple):
    """The launch numbers that a call asks for; -1 lets the op choose.

    Attributes:
        block_num: programs.
        warp_per_block: warps of a program.
    """

    block_num: int = -1
    warp_per_block: int = -1


NO_WISH = LaunchWish()

Copies = tuple[tuple["torch.Tensor", "torch.Tensor"], ...]
"""Pairs (target, source) to copy before a launch."""
Biases = tuple["torch.Tensor | None", "torch.Tensor | None"]
"""bias_0 and bias_1 of combine, [num_tokens, H] each."""
NO_BIASES: Biases = (None, None)


class StepInputs(NamedTuple):
    """The arguments of a dispatch. Adapter ops replace tokens and scales by their cast.

    Attributes:
        tokens: [T, H] of data_type, or of wire_dtype after a cast.
        weights: [T, K] float32, or None.
        scales: [T, S], or None.
        ids: [T, K] int32 global expert ids.
        step_tokens: the step's bound, equal on all ranks.
        pad_id: the id of rows without a token.
        counts_experts: whether dispatch fills local_expert_count.
        tag: of the call, equal on all ranks.
    """

    tokens: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    ids: torch.Tensor
    step_tokens: int
    pad_id: int
    counts_experts: bool
    tag: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]


class CombineInputs(NamedTuple):
    """The arguments of a combine; `DispatchCombineOp.combine` in ep_a2a/interface.py has their shapes."""

    rows: torch.Tensor
    weights: torch.Tensor | None
    ids: torch.Tensor | None
    out: torch.Tensor | None
    biases: Biases


class DispatchArguments(NamedTuple):
    """The operands of a dispatch, checked.

    Attributes:
        tokens, scales, weights, ids: as in StepInputs.
        num_tokens: T.
        step_tokens: the step's bound.
        wire_word: the choices that ranks compare.
        pad_id: the id of rows without a token.
        row_limit: R.
    """

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
        """The tensors that are not None."""
        return tuple(each for each in (self.tokens, self.scales, self.weights, self.ids) if each is not None)

    def copied(self) -> DispatchArguments:
        """The same arguments with copies of the tensors."""
        scales, weights = (None if each is None else each.clone() for each in (self.scales, self.weights))
        return self._replace(tokens=self.tokens.clone(), scales=scales, weights=weights, ids=self.ids.clone())


class CombineArguments(NamedTuple):
    """The operands of a combine, checked.

    Attributes:
        rows: [R, H] of combined_dtype: the result of each received row.
        weights: [R, K] float32 in the order of the rows, or None.
        ids: [T, K] int32 to compare with the dispatched ids, or None.
        result: [num_tokens, H]: receives the sums.
        num_tokens: T.
        step_tokens: the step's bound.
        expert_rows: in layout expert_major, [E, W * step_tokens, H]: the rows whose weighted sums are `rows`.
        biases: added to the sums.
        copies: (target, source) pairs to copy first; the targets are among the operands.
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
    """Add an entry, emptying the cache first when it is full; return the value."""
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value
    return value
