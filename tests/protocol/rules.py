"""What of IntraNode's protocol is explored, and what mutants of it change."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

EMPTY, READ = 0, 255
FULL = 64
"""Marks the side word of a row that was written in full (WRITTEN_IN_FULL)."""
EPOCHS = 8
"""Values of an epoch word: 32 bits in the kernels, 3 here, so that few steps wrap."""


class Path(enum.StrEnum):
    """Which dispatch a step takes (policy.dispatch_phase)."""

    COUNTED = "bulk dispatch"
    FLAGGED = "low-latency dispatch"


class Calls(enum.StrEnum):
    """Whole calls, or halves."""

    WHOLE = "whole calls"
    SPLIT = "halves"


class Choice(NamedTuple):
    """What a rank does in a step."""

    path: Path
    calls: Calls
    routes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path}, {self.calls}, rows for {list(self.routes) or 'nobody'}"


def wrapping_late(flag: int, epoch: int) -> bool:
    """late_lanes: the difference, wrapped to the words' width, is negative."""
    return (flag - epoch) % EPOCHS >= EPOCHS // 2


def differs(flag: int, epoch: int) -> bool:
    """A mutant."""
    return flag != epoch


def plainly_less(flag: int, epoch: int) -> bool:
    """A mutant: compares signed words."""
    return (flag ^ EPOCHS // 2) < (epoch ^ EPOCHS // 2)


@dataclass(frozen=True)
class Rules:
    """What is explored, and what mutants change.

    Attributes:
        num_ranks, num_steps: sizes.
        is_reduced: see machine.Model.
        first_epoch: of the first step. From 6 on the steps' epochs are 6, 7, 1; from 3 on 3, 4, 5, of which the
            last two are negative.
        paths, calls: what each step may choose; the path is agreed, calls are each rank's own.
        routes: whom a step's rows may be for, as sets of distances from the sending rank; None for all sets of peers.
        compact: layout compact, whose senders or receivers wait for all counts first.
        pads: rows that no token fills are padded.
        weights: combine brings weights, so that its flags order.
        written_in_full: flagged rows contain EMPTY.
        late: how flags are compared with epochs.
        dispatch_waits, poster_waits, combine_waits: the bulk dispatch, the low-latency dispatch and combine wait
            for their flags.
        releases: flags that order are posted behind a fence.
        launches_drain: a launch ends when its stores have come to where they belong ("What is physical").
        waits_for_all: combine also waits for ranks with which this one has exchanged no rows.
        flag_behind_experts: combine's flag is posted when the experts have read, not when dispatch has ended.
        num_copies: copies of counts, flagged rows and what travels beside them, used in turn.
        num_ops: ops of one index, used in turn, that share TOKENS and COMBINE_ROWS.
        shared_staging: the bulk dispatch brings its rows in the flagged rows' slots.
        tags_are_compared: a word with an epoch is accepted for the step's epoch only.
        readers_empty: readers leave EMPTY behind.
    """

    num_ranks: int = 2
    num_steps: int = 3
    first_epoch: int = 6
    paths: tuple[Path, ...] = (Path.COUNTED, Path.FLAGGED)
    calls: tuple[Calls, ...] = (Calls.WHOLE,)
    routes: tuple[tuple[int, ...], ...] | None = None
    compact: bool = False
    pads: bool = True
    weights: bool = False
    written_in_full: bool = False
    is_reduced: bool = False
    late: Callable[[int, int], bool] = wrapping_late
    dispatch_waits: bool = True
    poster_waits: bool = True
    combine_waits: bool = True
    releases: bool = True
    launches_drain: bool = True
    waits_for_all: bool = True
    flag_behind_experts: bool = True
    num_copies: int = 1
    num_ops: int = 1
    shared_staging: bool = False
    tags_are_compared: bool = True
    readers_empty: bool = True
