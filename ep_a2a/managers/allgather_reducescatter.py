"""vLLM's default exchange: all-gather the tokens, reduce and scatter the experts' rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ep_a2a.managers.collective import CollectiveAll2AllManager
from ep_a2a.ops.row_exchange import RowExchange, row_bytes, rows_from_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

# torch 2.13 renamed the function and warns on every use of the old name; 2.11 has only that.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AllGatherExchange(RowExchange):
    """All-gather padded to the longest rank; reduce-scatter as an all-to-all and a sum on the receiving rank.

    The reduction is not `reduce_scatter`: that needs equal counts, and adds in the dtype it moves. Here rows travel
    in their own dtype with uneven splits, the same bytes as a ring, and each rank adds what it receives in float32
    in ascending rank order, so that the result is accurate and the same in every run.
    """

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Returns all ranks' rows by one all-gather; where counts differ, padding rows are cut out afterwards."""
        own, longest = row_bytes(rows), max(counts)
        even = min(counts) == longest
        sent = own
        if not even:
            sent = own.new_empty(longest, own.shape[1])
            sent[: own.shape[0]] = own
        gathered = own.new_empty(self.world_size * longest, own.shape[1])
        if gathered.numel():
            group = self.groups.of(rows.device)
            self.wait(_all_gather_single(gathered, sent, group=group, async_op=True), rows.device)
        if not even:
            gathered = torch.cat([block[:count] for block, count in zip(torch.split(gathered, longest), counts)])
        return rows_from_bytes(gathered, rows)

    def sum_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Returns this rank's rows from every rank by one all-to-all, added in float32 in ascending rank order."""
        own_count, data = counts[self.rank], row_bytes(rows)
        received = data.new_empty(self.world_size * own_count, data.shape[1])
        if data.numel():
            work = dist.all_to_all_single(
                received,
                data,
                [own_count] * self.world_size,
                list(counts),
                group=self.groups.of(rows.device),
                async_op=True,
            )
            self.wait(work, rows.device)
        total = torch.zeros(own_count, *rows.shape[1:], dtype=torch.float32, device=rows.device)
        for part in rows_from_bytes(received, rows).view(self.world_size, *total.shape):
            total += part
        return total


class AllGatherReduceScatterAll2AllManager(CollectiveAll2AllManager):
    """All-gather and reduce-scatter on torch.distributed only: every rank sees every token, on any number of nodes."""

    backend = "allgather_reducescatter"
    exchange_type = AllGatherExchange
