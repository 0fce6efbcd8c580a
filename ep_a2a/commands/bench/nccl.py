"""torch.distributed's collectives as contenders: NCCL on GPUs, gloo on CPU. Every rank brings T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a.commands.bench.contender import Contender, Session, check_round_trip
from ep_a2a.config import QuantType
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.routing import destination_mask

if TYPE_CHECKING:
    from ep_a2a.commands.bench.contender import BenchContext
    from ep_a2a.commands.bench.workload import Workload

# torch 2.13 renamed the functions and warns on every use of the old names; 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGatherReduceScatterContender(Contender):
    """vLLM's default: all-gather of tokens, ids and weights; reduce-scatter of [W * T, H] in the tokens' dtype.

    A cast of the dispatch happens before the timing. The sum is the collective's own, so a cast of the combine cannot
    be had: it moves unquantised rows then, and says so.
    """

    name: ClassVar[str] = "nccl_agrs"

    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """Always there."""
        return None

    def prepare(self, workload: Workload, context: BenchContext) -> Session:
        """Allocates what is gathered and summed, and fills in the experts' rows. Collective."""
        return _AllGatherReduceScatterSession(workload, context)


class AllToAllContender(Contender):
    """One all_to_all_single each way, of one row per token and distinct rank.

    The splits are known to the CPU: computed before the timing, which a real step would have to exchange first. What
    belongs to a row (the cast row, scales, ids, weights) is packed before the timing too. Copying rows into the order
    of the destinations, and summing what comes back, are timed. Unquantised rows come back.
    """

    name: ClassVar[str] = "nccl_all_to_all"

    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """Always there."""
        return None

    def prepare(self, workload: Workload, context: BenchContext) -> Session:
        """Works out the splits and fills in the experts' rows. Collective."""
        return _AllToAllSession(workload, context)


class _CollectiveSession(Session):
    """What both have: inputs, cast where asked for."""

    def __init__(self, workload: Workload, context: BenchContext, name: str) -> None:
        super().__init__()
        self._workload, self._context, self._name = workload, context, name
        self._group = context.group
        inputs = workload.inputs(context.rank, context.device)
        self._x, self._ids, self._weights = inputs.x, inputs.ids, inputs.weights
        self._payload = [self._x.view(torch.uint8)]
        if workload.quant_type != QuantType.NONE:
            cast, scales = quantize(self._x, workload.quant_type)
            self._payload = [cast.view(torch.uint8), scales.view(torch.uint8)]
        if workload.combine_quant != QuantType.NONE:
            self.details["combine"] = "unquantised"
        if context.device.type == "cpu":
            self.details["transport"] = "gloo"
        self._all_traffic = workload.traffic()

    def check(self) -> None:
        """A round trip on the rows that will be timed."""
        result = self.combine(self.dispatch())
        copies = self._workload.num_distinct_ranks(self._context.rank)
        check_round_trip(self._name, self._workload, self._x, copies, result)

    def _rows_of(self, payload: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Received bytes as rows of the workload's dtype."""
        if scales is None:
            return payload.view(self._workload.dtype)
        cast = payload.view(torch.float8_e4m3fn)
        return dequantize(cast, scales.view(torch.float32), self._workload.quant_type, self._workload.dtype)


class _AllGatherReduceScatterSession(_CollectiveSession):
    def __init__(self, workload: Workload, context: BenchContext) -> None:
        super().__init__(workload, context, AllGatherReduceScatterContender.name)
        self._sent = [*self._payload, self._ids, self._weights]
        num_rows = workload.world_size * workload.num_tokens
        self._gathered = [part.new_empty(num_rows, part.shape[1]) for part in self._sent]
        self._result = torch.empty_like(self._x)
        self.dispatch()
        rows = self._rows_of(self._gathered[0], self._gathered[1] if len(self._payload) > 1 else None)
        mine = destination_mask(self._gathered[-2], workload.num_experts, workload.world_size)[:, context.rank]
        self._rows = torch.where(mine[:, None], rows, torch.zeros_like(rows))

    def dispatch(self) -> None:
        """Everybody's tokens, scales, ids and weights, as one group of all-gathers."""
        if self._context.device.type == "cpu":
            for gathered, part in zip(self._gathered, self._sent, strict=True):
                _all_gather_single(gathered, part, group=self._group)
            return
        with distributed_c10d._coalescing_manager(group=self._group, device=self._context.device, async_ops=False):
            for gathered, part in zip(self._gathered, self._sent, strict=True):
                _all_gather_single(gathered, part, group=self._group)

    def combine(self, dispatched: None) -> torch.Tensor:
        """The sum over ranks of their rows for this rank's tokens."""
        _reduce_scatter_single(self._result, self._rows, group=self._group)
        return self._result


class _AllToAllSession(_CollectiveSession):
    def __init__(self, workload: Workload, context: BenchContext) -> None:
        super().__init__(workload, context, AllToAllContender.name)
        self._sends = self._all_traffic[context.rank].tolist()
        self._receives = self._all_traffic[:, context.rank].tolist()
        # In the order of destinations, and there of tokens.
        ranks, tokens = destination_mask(self._ids, workload.num_experts, workload.world_size).T.nonzero().unbind(1)
        self._row_tokens = tokens
        # Rows that come back are summed per token: where they lie, token after token.
        self._order = torch.argsort(tokens, stable=True)
        copies = torch.bincount(tokens, minlength=workload.num_tokens)
        self._first_row = torch.cumsum(copies, 0) - copies
        self._bytes = torch.cat(
            [*self._payload, self._ids.view(torch.uint8), self._weights.view(torch.uint8)], dim=1
        ).contiguous()  # fmt: skip
        self._received = self._bytes.new_empty(sum(self._receives), self._bytes.shape[1])
        self._returned = self._x.new_empty(ranks.numel(), workload.hidden_dim)
        self.dispatch()
        widths = [part.shape[1] for part in self._payload]
        parts = torch.split(self._received[:, : sum(widths)], widths, dim=1)
        self._rows = self._rows_of(parts[0].contiguous(), parts[1].contiguous() if len(parts) > 1 else None)

    def dispatch(self) -> None:
        """One row of bytes per token and rank: token, scales, ids, weights."""
        rows = self._bytes.index_select(0, self._row_tokens)
        dist.all_to_all_single(self._received, rows, self._receives, self._sends, group=self._group)

    def combine(self, dispatched: None) -> torch.Tensor:
        """The rows come back and are summed per token."""
        dist.all_to_all_single(self._returned, self._rows, self._sends, self._receives, group=self._group)
        return torch.nn.functional.embedding_bag(self._order, self._returned, self._first_row, mode="sum")
