"""The simplest backend: ranks broadcast their tokens in turn, and an all-reduce adds the experts' rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ep_a2a.managers.collective import CollectiveAll2AllManager
from ep_a2a.ops.row_exchange import RowExchange, row_bytes, rows_from_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence


class BroadcastExchange(RowExchange):
    """One broadcast per rank; one all-reduce in float32, whose order of summation is the library's."""

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Returns all ranks' rows, received as one broadcast per rank."""
        own = row_bytes(rows)
        gathered = own.new_empty(sum(counts), own.shape[1])
        group = self.groups.of(rows.device)
        for source, part in enumerate(torch.split(gathered, list(counts))):
            if source == self.rank:
                part.copy_(own)
            if part.numel():
                self.wait(dist.broadcast(part, group=group, group_src=source, async_op=True), part.device)
        return rows_from_bytes(gathered, rows)

    def sum_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Returns this rank's part of an all-reduce over all rows."""
        total = rows.to(torch.float32, copy=True)
        if total.numel():
            group = self.groups.of(total.device)
            self.wait(dist.all_reduce(total, group=group, async_op=True), total.device)
        return torch.split(total, list(counts))[self.rank]


class NaiveAll2AllManager(CollectiveAll2AllManager):
    """Broadcast and all-reduce, on torch.distributed only: for debugging, and as the plainest thing to compare with."""

    backend = "naive"
    exchange_type = BroadcastExchange
