"""Runs torch.distributed's collectives as contenders: NCCL on GPUs, gloo on CPU. Every rank brings T tokens."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a.commands.measure.session import InputsRoundTrip, Received
from ep_a2a.config import QuantType
from ep_a2a.routing import destination_mask

if TYPE_CHECKING:
    from ep_a2a.commands.measure.workload import Inputs, Workload
    from ep_a2a.testing.worker import RankContext

# torch 2.13 renamed the functions and warns on every use of the old names; 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGatherRoundTrip(InputsRoundTrip):
    """vLLM's default: all-gather of what a token has; reduce-scatter of rows `[W * T, H]` in the tokens' dtype."""

    def __init__(self, workload: Workload, context: RankContext, inputs: Inputs | None = None) -> None:
        super().__init__(workload, context, inputs)
        self.details = _details(workload)
        # Tokens travel as bytes: NCCL knows no sum of fp8, and some versions do not know the type.
        scales = [] if self.scales is None else [self.scales]
        self._parts = [self.sent.view(torch.uint8), self._ids, self._weights, *scales]
        num_rows = workload.ranks * workload.tokens
        self._gathered = [part.new_empty(num_rows, part.shape[1]) for part in self._parts]
        self._result = torch.empty_like(self._x)
        self._rows = self._x.new_zeros(num_rows, workload.hidden)

    def dispatch(self) -> Received:
        """Gathers what all ranks' tokens have, on a GPU as one group of all-gathers."""
        group, device = self._context.group, self._context.device
        together: Any = contextlib.nullcontext()
        if device.type != "cpu":
            together = distributed_c10d._coalescing_manager(group=group, device=device, async_ops=False)
        with together:
            for whole, part in zip(self._gathered, self._parts, strict=True):
                _all_gather_single(whole, part, group=group)
        tokens, ids, weights, *scales = self._gathered
        return Received(tokens.view(self.sent.dtype), scales[0] if scales else None, ids, weights, self._rows)

    def combine(self, dispatched: Received) -> torch.Tensor:
        """Sums the ranks' rows for this rank's tokens."""
        _reduce_scatter_single(self._result, self._rows, group=self._context.group)
        return self._result

    def run_identity_experts(self, dispatched: Received) -> None:
        """Leaves the rows of this rank's experts, and zeros for all others."""
        rows = self._rows_of(dispatched.rows, dispatched.scales)
        owned = destination_mask(dispatched.ids, self._workload.experts, self._workload.ranks)
        mine = owned[:, self._context.rank, None]
        self._rows.copy_(torch.where(mine, rows, torch.zeros_like(rows)))

    def received(self, dispatched: Received) -> Received:
        """Returns all ranks' tokens: every rank runs its own experts on them."""
        return dispatched


class AllToAllRoundTrip(InputsRoundTrip):
    """One all_to_all_single each way, of one row per token and distinct rank.

    The CPU knows the splits: they are computed before the timing, whereas a real step would have to exchange them. The
    parts of a row (the cast row, scales, ids, weights) are packed before the timing, too. Timed are the copies of rows
    into the order of the destinations, and the sums of what comes back.
    """

    def __init__(self, workload: Workload, context: RankContext) -> None:
        super().__init__(workload, context)
        self.details = _details(workload)
        self._group = context.group
        traffic = workload.traffic()
        self._sends, self._receives = traffic[context.rank].tolist(), traffic[:, context.rank].tolist()
        # In the order of destinations, and there of tokens.
        ranks, tokens = destination_mask(self._ids, workload.experts, workload.ranks).T.nonzero().unbind(1)
        self._row_tokens = tokens
        # Rows that come back are summed per token: where they lie, token after token.
        self._order = torch.argsort(tokens, stable=True)
        copies = torch.bincount(tokens, minlength=workload.tokens)
        self._first_row = torch.cumsum(copies, 0) - copies
        parts = [self.sent, *([] if self.scales is None else [self.scales]), self._ids, self._weights]
        self._bytes = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
        self._received = self._bytes.new_empty(sum(self._receives), self._bytes.shape[1])
        self._returned = self._x.new_empty(ranks.numel(), workload.hidden)

    def dispatch(self) -> None:
        """Sends one row of bytes per token and rank: token, scales, ids, weights."""
        rows = self._bytes.index_select(0, self._row_tokens)
        dist.all_to_all_single(self._received, rows, self._receives, self._sends, group=self._group)

    def combine(self, dispatched: None) -> torch.Tensor:
        """Brings the rows back and sums them per token."""
        dist.all_to_all_single(self._returned, self._rows, self._sends, self._receives, group=self._group)
        return torch.nn.functional.embedding_bag(self._order, self._returned, self._first_row, mode="sum")

    def run_identity_experts(self, dispatched: None) -> None:
        """Leaves the received rows as the experts'."""
        end, scales = self.sent.shape[1] * self.sent.itemsize, None
        if self.scales is not None:
            num_bytes = self.scales.shape[1] * self.scales.itemsize
            scales = self._received[:, end : end + num_bytes].contiguous().view(self.scales.dtype)
        self._rows = self._rows_of(self._received[:, :end].contiguous().view(self.sent.dtype), scales)


def _details(workload: Workload) -> dict[str, str]:
    """Returns a remark of both: collectives sum rows as they are, so combine has no cast."""
    return {} if workload.combine_quant == QuantType.NONE else {"combine": "unquantised"}
