"""The arguments of one launch of dispatch or combine."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Stages(NamedTuple):
    """What a launch does; the interpreter, which runs programs in turn, cannot do both where programs wait for rows."""

    send: bool
    receive: bool


WHOLE = Stages(True, True)
SEND = Stages(True, False)
RECEIVE = Stages(False, True)


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


Biases = tuple["torch.Tensor | None", "torch.Tensor | None"]
"""What combine adds to its sums, [num_tokens, H] each."""
NO_BIASES: Biases = (None, None)


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
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @property
    def given_biases(self) -> tuple[bool, bool]:
        """Which of the biases there are: another kernel for each."""
        return self.biases[0] is not None, self.biases[1] is not None
