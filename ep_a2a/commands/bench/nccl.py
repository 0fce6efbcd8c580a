"""Runs torch.distributed's collectives as contenders: NCCL on GPUs, gloo on CPU. Every rank brings T tokens."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a.commands.bench.contenders import Contender
from ep_a2a.commands.bench.layer import CastLayer, Received
from ep_a2a.commands.measure.session import InputsRoundTrip
from ep_a2a.config import FP8_DTYPE, QuantType
from ep_a2a.quantization import quantize
from ep_a2a.routing import destination_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.commands.bench.layer import LayerWorkload
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext

# torch 2.13 renamed the functions and warns on every use of the old names; 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGatherReduceScatter:
    """vLLM's default: all-gather of what a token has; reduce-scatter of rows [W * T, H] in the tokens' dtype.

    Args:
        parts: `[T, n]` each, read at each dispatch.
        result: `[T, H]`, written by each combine.
        context: this rank and its group.

    Attributes:
        gathered: the parts of all ranks, `[W * T, n]` each.
        rows: `[W * T, H]` to sum, as zeros.
    """

    def __init__(self, parts: Sequence[torch.Tensor], result: torch.Tensor, context: RankContext) -> None:
        self._parts, self._result, self._context = parts, result, context
        num_rows = context.world_size * result.shape[0]
        self.gathered = [part.new_empty(num_rows, part.shape[1]) for part in parts]
        self.rows = result.new_zeros(num_rows, result.shape[1])

    def dispatch(self) -> None:
        """Gathers all parts, on a GPU as one group of all-gathers. Collective."""
        context = self._context
        on_cpu = context.device.type == "cpu"
        together: Any = (
            contextlib.nullcontext()
            if on_cpu
            else distributed_c10d._coalescing_manager(group=context.group, device=context.device, async_ops=False)
        )
        with together:
            for whole, part in zip(self.gathered, self._parts, strict=True):
                _all_gather_single(whole, part, group=context.group)

    def combine(self) -> torch.Tensor:
        """Sums the ranks' rows for this rank's tokens. Collective."""
        _reduce_scatter_single(self._result, self.rows, group=self._context.group)
        return self._result


class _CollectiveRoundTrip(InputsRoundTrip):
    """The inputs, cast before the timing. The collectives themselves sum: combine moves unquantised rows."""

    def __init__(self, workload: Workload, context: RankContext) -> None:
        super().__init__(workload, context)
        self._payload = [self._x.view(torch.uint8)]
        if workload.quant_type != QuantType.NONE:
            cast, scales = quantize(self._x, workload.quant_type)
            self._payload = [cast.view(torch.uint8), scales.view(torch.uint8)]
        if workload.combine_quant != QuantType.NONE:
            self.details["combine"] = "unquantised"
        if context.device.type == "cpu":
            self.details["transport"] = "gloo"

    def _received_rows(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns received bytes (tokens, and scales where there is a cast) as rows of the workload's dtype."""
        if len(parts) == 1:
            return parts[0].view(self._workload.dtype)
        return self._rows_of(parts[0].view(FP8_DTYPE), parts[1].view(torch.float32))


class AllGatherRoundTrip(_CollectiveRoundTrip):
    """All-gather of tokens, scales, ids and router weights, and reduce-scatter."""

    def __init__(self, workload: Workload, context: RankContext) -> None:
        super().__init__(workload, context)
        parts = [*self._payload, self._ids, self._weights]
        self._exchange = AllGatherReduceScatter(parts, torch.empty_like(self._x), context)
        self.dispatch()
        rows = self._received_rows(self._exchange.gathered[: len(self._payload)])
        ids = self._exchange.gathered[-2]
        mine = destination_mask(ids, workload.num_experts, workload.world_size)[:, context.rank]
        self._exchange.rows.copy_(torch.where(mine[:, None], rows, torch.zeros_like(rows)))

    def dispatch(self) -> None:
        """Gathers what all ranks' tokens have."""
        self._exchange.dispatch()

    def combine(self, dispatched: None) -> torch.Tensor:
        """Sums the ranks' rows for this rank's tokens."""
        return self._exchange.combine()


class AllGatherLayer(CastLayer):
    """A layer in which every rank gets all tokens and runs its own experts on them."""

    def __init__(self, workload: LayerWorkload, context: RankContext) -> None:
        super().__init__(workload, context)
        gate = self.gate
        scales = [] if self._scales is None else [self._scales]
        # fp8 travels as bytes: NCCL knows no sum of it, and some versions do not know the type.
        tokens = self._tokens if self._scales is None else self._tokens.view(torch.uint8)
        parts = [tokens, gate.ids, gate.weights, *scales]
        self._exchange = AllGatherReduceScatter(parts, torch.empty_like(gate.x), context)

    def dispatch(self) -> Received:
        """Gathers tokens, ids and router weights of all ranks."""
        self._cast()
        self._exchange.dispatch()
        tokens, ids, weights, *scales = self._exchange.gathered
        rows = tokens.view(self._tokens.dtype)
        return Received(rows, scales[0] if scales else None, ids, weights, self._exchange.rows)

    def combine(self) -> torch.Tensor:
        """Brings the experts' rows back, summed."""
        return self._exchange.combine()


class AllToAllRoundTrip(_CollectiveRoundTrip):
    """One all_to_all_single each way, of one row per token and distinct rank.

    The CPU knows the splits: they are computed before the timing, whereas a real step would have to exchange them. The
    parts of a row (the cast row, scales, ids, weights) are packed before the timing, too. Timed are the copies of rows
    into the order of the destinations, and the sums of what comes back.
    """

    def __init__(self, workload: Workload, context: RankContext) -> None:
        super().__init__(workload, context)
        self._group = context.group
        traffic = workload.traffic()
        self._sends, self._receives = traffic[context.rank].tolist(), traffic[:, context.rank].tolist()
        # In the order of destinations, and there of tokens.
        ranks, tokens = destination_mask(self._ids, workload.num_experts, workload.world_size).T.nonzero().unbind(1)
        self._row_tokens = tokens
        # Rows that come back are summed per token: where they lie, token after token.
        self._order = torch.argsort(tokens, stable=True)
        copies = torch.bincount(tokens, minlength=workload.num_tokens)
        self._first_row = torch.cumsum(copies, 0) - copies
        parts = [*self._payload, self._ids.view(torch.uint8), self._weights.view(torch.uint8)]
        self._bytes = torch.cat(parts, dim=1).contiguous()
        self._received = self._bytes.new_empty(sum(self._receives), self._bytes.shape[1])
        self._returned = self._x.new_empty(ranks.numel(), workload.hidden_dim)
        self.dispatch()
        widths = [part.shape[1] for part in self._payload]
        received = torch.split(self._received[:, : sum(widths)], widths, dim=1)
        self._rows = self._received_rows([part.contiguous() for part in received])

    def dispatch(self) -> None:
        """Sends one row of bytes per token and rank: token, scales, ids, weights."""
        rows = self._bytes.index_select(0, self._row_tokens)
        dist.all_to_all_single(self._received, rows, self._receives, self._sends, group=self._group)

    def combine(self, dispatched: None) -> torch.Tensor:
        """Brings the rows back and sums them per token."""
        dist.all_to_all_single(self._returned, self._rows, self._sends, self._receives, group=self._group)
        return torch.nn.functional.embedding_bag(self._order, self._returned, self._first_row, mode="sum")


CONTENDERS = (
    Contender("nccl_agrs", AllGatherRoundTrip, AllGatherLayer),
    Contender("nccl_all_to_all", AllToAllRoundTrip),
)
