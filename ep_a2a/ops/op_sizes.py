"""Sizes of a step's results, which follow from the config and the step's bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ep_a2a.config import Layout

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig


def num_rows(config: EpDispatchCombineConfig, step_tokens: int) -> int:
    """R: the most rows that a rank receives in a step in which no rank brings more than step_tokens tokens."""
    return min(config.world_size * step_tokens, config.max_num_recv_tokens)


class LeadingDims(NamedTuple):
    """Leading dimensions of dispatch's results: of the received ids, and of the rows that experts work on.

    - compact: (R,) for both.
    - rank_major: (W, step_tokens) for both.
    - expert_major: (W, step_tokens) for the ids, (E, R) for the rows.
    """

    ids: tuple[int, ...]
    rows: tuple[int, ...]


def leading_dims(config: EpDispatchCombineConfig, step_tokens: int) -> LeadingDims:
    """Leading dimensions of the results of a dispatch whose ranks bring at most step_tokens tokens each."""
    most_rows = num_rows(config, step_tokens)
    ids = (most_rows,) if config.layout == Layout.COMPACT else (config.world_size, step_tokens)
    return LeadingDims(ids, (config.num_local_experts, most_rows) if config.layout == Layout.EXPERT_MAJOR else ids)
