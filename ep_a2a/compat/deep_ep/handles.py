"""Handles that dispatch returns, for its combine and for further dispatches of the same layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ep_a2a.compat.expert_row_sources import expert_row_sources
from ep_a2a.errors import StateError

if TYPE_CHECKING:
    import torch

    from ep_a2a.compat.deep_ep.ops import OpShape
    from ep_a2a.compat.deep_ep.steps import Step


@dataclass
class Routing:
    """The routing of a normal dispatch, by which it can be repeated.

    Attributes:
        ids: int32 [T, K], the ids that the op routes by.
        num_experts: the range of the ids. step_tokens: of any rank, equal on all.
        num_recv_tokens: rows that the caller sees.
        shape: that of the op that holds, or last held, the dispatch. step: that dispatch. Set by each dispatch.
    """

    ids: torch.Tensor
    num_experts: int
    step_tokens: int
    num_recv_tokens: int
    shape: OpShape = field(init=False)
    step: Step = field(init=False)

    @property
    def num_tokens(self) -> int:
        """T, the tokens of this rank."""
        return self.ids.shape[0]


class NormalHandle(tuple[Any, ...]):
    """Handle of `dispatch`, with DeepEP's six places; on several nodes with the ten of its internode_dispatch.

    On one node rank_prefix_matrix and is_token_in_rank are there, on several is_token_in_rank and
    recv_gbl_rank_prefix_sum. With num_worst_tokens only is_token_in_rank is. Other places, which only DeepEP's kernels
    need, are None.

    Attributes:
        routing: the state that our ops need.
    """

    routing: Routing

    @classmethod
    def of(
        cls,
        routing: Routing,
        rank_prefix_matrix: torch.Tensor | None,
        is_token_in_rank: torch.Tensor,
        rank_between_nodes: int | None,
    ) -> NormalHandle:
        """Returns a handle of this routing; rank_between_nodes: this rank, or None on one node."""
        if rank_between_nodes is None:
            handle = cls((rank_prefix_matrix, None, None, None, is_token_in_rank, None))
        else:
            received = None if rank_prefix_matrix is None else rank_prefix_matrix[:, rank_between_nodes]
            handle = cls((is_token_in_rank, *[None] * 5, received, None, None, None))
        handle.routing = routing
        return handle


class LowLatencyHandle:
    """Handle of `low_latency_dispatch`, with DeepEP's five places: src_info, layout_range,
    num_max_dispatch_tokens_per_rank, hidden, num_experts.

    src_info is int32 [E, W * M]: for each row of a local expert its token at the source rank. layout_range is int64
    [E, W]: for each source rank the position of its first row, shifted by 32 bits, plus the number of its rows. Both
    are computed on the device by the first access, which must come between the dispatch and its combine.

    Args:
        shape: of the op. ids: int32 [T, K], this rank's. topk_idx: as they were given. has_weights: whether router
            weights have travelled with the tokens.
    """

    def __init__(self, shape: OpShape, ids: torch.Tensor, topk_idx: torch.Tensor, has_weights: bool) -> None:
        self.shape, self.ids, self.topk_idx, self.has_weights = shape, ids, topk_idx, has_weights
        self.step: Step
        self._sources: tuple[torch.Tensor, torch.Tensor] | None = None

    def __getitem__(self, place: int | slice) -> Any:
        # an IndexError past the end is what ends a loop, or an unpacking, of the handle
        places = range(len(self))[place]
        return tuple(map(self._at, places)) if isinstance(places, range) else self._at(places)

    def _at(self, place: int) -> Any:
        if place < 2:
            return self._source_tensors()[place]
        return (self.shape.max_tokens, self.shape.hidden_dim, self.shape.num_experts)[place - 2]

    def __len__(self) -> int:
        return 5

    def _source_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sources is None:
            if not self.step.is_open:
                raise StateError(
                    "src_info and layout_range to be read before combine",
                    "a dispatch that is over",
                    "Read handle[0] and handle[1] once between low_latency_dispatch and low_latency_combine.",
                )
            self._sources = expert_row_sources(self.step.op)
        return self._sources
