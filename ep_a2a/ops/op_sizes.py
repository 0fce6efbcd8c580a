"""Sizes of a step's results, which follow from the config and the step's bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ep_a2a.config import Layout

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig


def num_rows(config: EpDispatchCombineConfig, step_tokens: int) -> int:
    """R: the most rows that a rank receives in a step in which no rank brings more than step_tokens tokens."""
    return min(config.world_size * step_tokens, config.max_num_recv_tokens)


class OpSizes:
    """MORI's names for the sizes of an op's steps."""

    config: EpDispatchCombineConfig

    def decode_send_flat_idx(self, flat_idx: int) -> tuple[int, int]:
        """(source rank, source token) of an element of get_dispatch_src_token_pos."""
        return divmod(int(flat_idx), self.max_num_tokens_to_send())

    def max_num_tokens_to_send_per_rank(self) -> int:
        """M: the most tokens that a rank dispatches."""
        return self.config.max_num_inp_token_per_rank

    def max_num_tokens_to_send(self) -> int:
        """W * M: the most tokens that all ranks dispatch together."""
        return self.config.world_size * self.config.max_num_inp_token_per_rank

    def max_num_tokens_to_recv_per_rank(self) -> int:
        """The most received rows divided by W."""
        return self.config.max_num_recv_tokens_per_rank

    def max_num_tokens_to_recv(self) -> int:
        """R for M tokens: the most rows that a rank ever receives."""
        return self.config.max_num_recv_tokens


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
