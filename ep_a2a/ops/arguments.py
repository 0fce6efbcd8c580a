"""The record of a step, the arguments of its combine, its sizes, and the choices of a launch."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from ep_a2a.config import EpDispatchCombineConfig, Layout
from ep_a2a.interface import CombineResult, DispatchResult
from ep_a2a.ops.bounds import Bounds, StepTokens, num_rows

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


@dataclass(slots=True)
class CombineArguments:
    """The operands of a combine: the arguments as given, then what the check makes of them for the engine.

    Attributes:
        rows: the experts' results, combined_dtype, in the shape of dispatch's tokens or flat; in layout expert_major
            for the engine REDUCED_ROWS.
        weights: [R, K] float32 in the order of the rows, or None.
        ids: [T, K] int32 to compare with the dispatched ids, or None.
        out: [T, H], receives the sums. None for the op's own, [M, H], which the check puts there for an engine.
        biases: [bias_0, bias_1], each [T, H] to add to the sums, or None.
        num_tokens: T.
        bounds: the step's.
        expert_rows: in layout expert_major, [E, R, H]: the rows whose weighted sums are `rows`.
        copies: (target, source) pairs to copy first; the targets are among the operands.
    """

    rows: torch.Tensor
    weights: torch.Tensor | None
    ids: torch.Tensor | None
    out: torch.Tensor | None = None
    biases: list[torch.Tensor | None] = field(default_factory=lambda: [None, None])
    num_tokens: int = 0
    bounds: Bounds = Bounds()  # noqa: RUF009 - a tuple of numbers, which cannot change
    expert_rows: torch.Tensor | None = None
    copies: Copies = ()


@dataclass(slots=True)
class Step:
    """One dispatch and its combine: the arguments of the dispatch, and all that is known of the step until it ends.

    The checks and the op fill it. Engines launch a dispatch from it.

    Attributes:
        tokens: [T, H] of data_type, or of wire_dtype after a cast.
        weights: [T, K] float32, or None.
        scales: [T, S], or None.
        ids: [T, K] int32 global expert ids.
        step_tokens: the most tokens of any rank, or by rank the most of each; equal on all ranks.
        pad_id: the id of rows without a token.
        counts_experts: whether dispatch fills local_expert_count.
        tag: of the call, equal on all ranks.
        num_tokens: T.
        bounds: what launches take of step_tokens.
        wire_word: the choices that ranks compare.
        next_call: the call that must come next: "combine", "dispatch_recv" or "combine_recv".
        dispatched: the dispatch's result.
        combines: signatures of the combine arguments that fit this dispatch.
        combining: the operands that combine_recv launches.
        combined: the result of combine_send.
        given_ids: of ops that compare ids on the host: the caller's tensor, and torch's count of writes to it.
        route: what such an op needs to bring the rows back.
    """

    tokens: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    ids: torch.Tensor
    step_tokens: StepTokens
    pad_id: int = -1
    counts_experts: bool = False
    tag: int = 0
    num_tokens: int = 0
    bounds: Bounds = Bounds()  # noqa: RUF009
    wire_word: int = 1
    next_call: str = "combine"
    dispatched: DispatchResult = field(init=False)
    combines: set[Hashable] = field(init=False)
    combining: CombineArguments = field(init=False)
    combined: CombineResult = field(init=False)
    given_ids: tuple[torch.Tensor, int | None] = field(init=False)
    route: Any = field(init=False)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading dimensions of the rows that the experts work on (LeadingDims)."""
        return tuple(self.dispatched.tokens.shape[:-1])

    def copy_inputs(self) -> None:
        """Take copies of the caller's tensors, which the second half of the dispatch reads."""
        self.tokens, self.ids = self.tokens.clone(), self.ids.clone()
        self.weights, self.scales = (None if each is None else each.clone() for each in (self.weights, self.scales))

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the dispatch that are not None."""
        return tuple(each for each in (self.tokens, self.scales, self.weights, self.ids) if each is not None)

    def forget_inputs(self) -> None:
        """Drop the caller's tensors, so that torch can use their memory before the step ends."""
        del self.tokens, self.weights, self.scales, self.ids


class LeadingDims(NamedTuple):
    """Leading dimensions of dispatch's results: of the received ids, and of the rows that experts work on.

    - compact: (R,) for both.
    - rank_major: (W, step_tokens) for both; with bounds by rank (R,).
    - expert_major: as rank_major for the ids, (E, R) for the rows.
    """

    ids: tuple[int, ...]
    rows: tuple[int, ...]


def leading_dims(config: EpDispatchCombineConfig, step_tokens: StepTokens) -> LeadingDims:
    """Leading dimensions of the results of a dispatch with these bounds."""
    most_rows = num_rows(config, step_tokens)
    ids: tuple[int, ...] = (most_rows,)
    if isinstance(step_tokens, int) and config.layout != Layout.COMPACT:
        ids = (config.world_size, step_tokens)
    return LeadingDims(ids, (config.num_local_experts, most_rows) if config.layout == Layout.EXPERT_MAJOR else ids)


def add_to_cache(cache: dict[Hashable, T], key: Hashable, value: T) -> T:
    """Add an entry, emptying the cache first when it is full; return the value."""
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value
    return value
