"""What a dispatch of the layer tells its combine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.errors import StateError
from ep_a2a.ops.expert_sources import expert_row_sources

if TYPE_CHECKING:
    import torch

    from ep_a2a.compat.triton_distributed.phases import PhaseBuffers


class DispatchMetaInfo:
    """Which dispatch a combine belongs to, and where that dispatch's rows come from.

    The tensors are computed when they are first asked for, since combine does not need them here: before the combine
    of this dispatch, after which the op's memory belongs to the next one. What was asked for stays.

    Args:
        buffers: those of the dispatch's phase.
        step: number of the dispatch among those of its phase.
    """

    def __init__(self, buffers: PhaseBuffers, step: int) -> None:
        self.buffers, self.step = buffers, step
        self._sources: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def recv_token_source_indices(self) -> torch.Tensor:
        """int32 [num_experts_per_rank, world_size * max_m]: which token of its source rank each received row is.

        -1 past an expert's rows.

        Raises:
            StateError: the dispatch has been combined.
        """
        return self._computed()[0]

    @property
    def recv_token_source_count_and_start(self) -> torch.Tensor:
        """int64 [num_experts_per_rank, world_size]: an expert's rows from each source, packed.

        Their number is in the lower 32 bits, the first of them, as a row of the expert, in the upper ones.

        Raises:
            StateError: the dispatch has been combined.
        """
        return self._computed()[1]

    def _computed(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sources is None:
            if not self.buffers.is_open(self.step):
                raise StateError(
                    "sources of rows to be asked for before combine", "a dispatch that has been combined",
                    "Read them once between dispatch and combine; they stay then.",
                )  # fmt: skip
            self._sources = expert_row_sources(self.buffers.op)
        return self._sources
