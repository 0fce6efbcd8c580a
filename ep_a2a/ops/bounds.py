"""Bounds of a step: the most tokens that each rank brings, in the numbers that launches take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.kernels.layout import Checksum

StepTokens = int | Sequence[int]
"""The most tokens that any rank brings to a step, or by rank the most that each brings."""


class Bounds(NamedTuple):
    """The bounds of a step as launches take them. Calls of equal ones share their launches.

    Attributes:
        step_tokens: the common bound of all ranks; where they differ, their `checksum`, below 0.
        most: the largest bound, 1 at least: what launches and exchanges are sized by.
        own: this rank's bound.
        first_row: the sum of the bounds of the ranks below this one: where its rows begin, but for layout compact.
        num_rows: R, the most rows that a rank receives: the sum of all bounds, in layout compact at most the cap.
    """

    step_tokens: int = 1
    most: int = 1
    own: int = 1
    first_row: int = 0
    num_rows: int = 1

    @classmethod
    def of(cls, config: EpDispatchCombineConfig, step_tokens: StepTokens) -> Bounds:
        """The bounds of a step. A sequence of equal bounds is the same step as their number."""
        rank = config.rank
        bounds = by_rank(config, step_tokens)
        most = max(bounds)
        common = most if min(bounds) == most else checksum(bounds)
        return cls(common, max(1, most), bounds[rank], sum(bounds[:rank]), num_rows(config, bounds))


def by_rank(config: EpDispatchCombineConfig, step_tokens: StepTokens) -> Sequence[int]:
    """The bound of each rank."""
    return (step_tokens,) * config.world_size if isinstance(step_tokens, int) else step_tokens


def num_rows(config: EpDispatchCombineConfig, step_tokens: StepTokens) -> int:
    """R: the most rows that a rank receives in a step with these bounds."""
    return min(sum(by_rank(config, step_tokens)), config.max_num_recv_tokens)


def checksum(bounds: Sequence[int]) -> int:
    """A number below 0 that stands for bounds that differ between ranks: a sum with odd weights, modulo 2**31.

    Kernels compute it from the ranks' wire words, and so compare the ranks' lists without a list in device memory. It
    tells lists apart that differ in one entry. Others pass for equal by chance only, one pair of lists in 2**31. Rows
    lie right even then, since each rank's kernel compares its first row and R with the ranks' bounds exactly.
    """
    total = 0
    for rank, bound in enumerate(bounds):
        mixed = (rank + 1) * Checksum.FACTOR & Checksum.MASK
        total += bound * (mixed ^ mixed >> Checksum.SHIFT | 1)
    return -1 - (total & Checksum.MASK)
