"""The record of a dispatch, which the layer's combine takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.compat.expert_row_sources import expert_row_sources
from ep_a2a.errors import StateError

if TYPE_CHECKING:
    import torch

    from ep_a2a.compat.triton_distributed.phases import PhaseBuffers


class DispatchMetaInfo:
    """Identifies a dispatch for its combine, and computes the sources of its rows.

    Combine does not need the tensors, so the first access of either computes both. It must come before the combine of
    this dispatch, which gives the op's memory to the next one. Later accesses return the same tensors.

    Args:
        buffers: those of the dispatch's phase.
        step: number of the dispatch among those of its phase.
        has_weights: whether the dispatch was given the router's weights.
    """

    def __init__(self, buffers: PhaseBuffers, step: int, has_weights: bool) -> None:
        self.buffers, self.step, self.has_weights = buffers, step, has_weights
        self._sources: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def recv_token_source_indices(self) -> torch.Tensor:
        """The token at its source rank of each received row: int32 [num_experts_per_rank, world_size * max_m].

        Entries past an expert's rows are -1.

        Raises:
            StateError: the dispatch has been combined.
        """
        return self._computed()[0]

    @property
    def recv_token_source_count_and_start(self) -> torch.Tensor:
        """Position and number of an expert's rows from each source: int64 [num_experts_per_rank, world_size].

        The lower 32 bits are the number of rows, the upper 32 bits the position of the first one.

        Raises:
            StateError: the dispatch has been combined.
        """
        return self._computed()[1]

    def _computed(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sources is None:
            if not self.buffers.is_open(self.step):
                raise StateError(
                    "sources of rows to be asked for before combine",
                    "a dispatch that has been combined",
                    "Read them once between dispatch and combine; they stay then.",
                )
            self._sources = expert_row_sources(self.buffers.op)
        return self._sources
