"""The managers on torch.distributed, and their base: hidden states and ops travel over one RowExchange."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ep_a2a import env
from ep_a2a.config import COMBINE_DTYPES
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import AlternationError, ConfigMismatchError, DeviceError, DtypeError, ShapeError
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.managers.base import All2AllManagerBase
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.ops.collective import CollectiveDispatchCombineOp
from ep_a2a.ops.inputs import address_of
from ep_a2a.ops.row_exchange import RowExchange, row_bytes, rows_from_bytes

# torch 2.13 renamed the function and warns on every use of the old name; 2.11 has only that.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveAll2AllManager(All2AllManagerBase):
    """Exchanges all tokens among all ranks by collectives; a subclass names the RowExchange.

    Each dispatch exchanges token counts and so synchronises the host: CUDA graphs cannot capture it. The manager's
    dispatch and combine alternate; overlapping micro-batches use ops, `get_handle(kwargs, index)`. Sums are in float32.
    """

    capabilities = Capabilities(
        dispatches_tokens=True,
        graph_safe=False,
        host_sync=True,
        local_ids=True,
        packs_rows=True,
        receive_cap=True,
        gpus=("NVIDIA", "AMD"),
        runs_on_cpu=True,
        was_run="CPU; H200s (NCCL)",
        notes=("AMD GPUs: not run",),
    )
    exchange_type: ClassVar[type[RowExchange]]

    def __init__(self, cpu_group: ProcessGroup, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        self._counts: list[int] | None = None

    def _get_handle(self, kwargs: Mapping[str, Any], index: int) -> CollectiveDispatchCombineOp:
        """Returns the op for these handle kwargs, whatever nodes the group spans."""
        self._require_open()
        config = config_from_handle_kwargs(kwargs, topology_internode=False)
        index = checked_integer("index", index, 0)
        refusal = self.capabilities.refusal(self.backend, config, 1, index)
        if refusal is not None:
            raise refusal
        self._device_in_use = True

        def make() -> CollectiveDispatchCombineOp:
            return CollectiveDispatchCombineOp(config, self._exchange(config.timeout), self.device)

        op: CollectiveDispatchCombineOp = self.handle_cache.get_or_create((config, index), make)
        return op

    def _exchange(self, timeout_secs: float) -> RowExchange:
        return self.exchange_type(self.groups, timeout_secs)

    def _dispatch_logits(self, tensors: Sequence[torch.Tensor], tag: int) -> list[torch.Tensor]:
        if self._counts is not None:
            raise AlternationError("combine after dispatch", "dispatch again", f"{AlternationError.remedy} {_RESET}")
        num_tokens = _check_rows(tensors)
        exchange = self._exchange(env.TIMEOUT_SECS.get())
        rows = "; ".join(f"{tensor.dtype} {list(tensor.shape[1:])}" for tensor in tensors)
        description = f"{rows}; tag {tag}"
        everyone = exchange.exchange_numbers([num_tokens, zlib.crc32(description.encode())])
        different = [rank for rank, numbers in enumerate(everyone) if numbers[1] != everyone[self.rank][1]]
        if different:
            raise ConfigMismatchError(
                f"tensors of rows {description} on all ranks, as on rank {self.rank}", f"others on ranks {different}"
            )
        counts = [numbers[0] for numbers in everyone]
        gathered = [exchange.gather_rows(tensor.contiguous(), counts) for tensor in tensors]
        self._counts = counts
        return gathered

    def _dispatch_rows(self, tensors: Sequence[torch.Tensor], handle: Any, tag: int) -> list[torch.Tensor]:
        return self._dispatch_logits(tensors, tag)

    @outside_graphs
    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """Returns this rank's rows `[T_r, H]` of the sum over ranks of hidden_states `[sum T_r, H]`, in float32.

        The manager does not know which experts a rank owns, so it adds every rank's row for every token. A row of a
        token that names no expert of this rank must be zeros, as fused MoE kernels with an expert map leave it.

        Args:
            hidden_states: bf16, fp16 or fp32, results of this rank's experts for the dispatched rows, in their order.
            is_sequence_parallel: without effect.

        Raises:
            AlternationError: there is no dispatch to combine.
            ShapeError, DtypeError: hidden_states does not fit; combine can be repeated.
        """
        return self._sum(hidden_states).to(hidden_states.dtype)

    @outside_graphs
    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """Writes the result of `combine` into `output` `[T_r, H]` of any floating dtype, rounded once from float32."""
        if self._counts is not None and output.shape != (self._counts[self.rank], *hidden_states.shape[1:]):
            raise ShapeError(
                f"output of shape {(self._counts[self.rank], *hidden_states.shape[1:])}", str(tuple(output.shape))
            )
        address_of("output", output)
        output.copy_(self._sum(hidden_states))
        return output

    def _sum(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._counts is None:
            raise AlternationError("dispatch before combine", "combine")
        if hidden_states.dtype not in COMBINE_DTYPES:
            raise DtypeError(f"hidden_states of one of {COMBINE_DTYPES}", str(hidden_states.dtype))
        if hidden_states.dim() == 0 or hidden_states.shape[0] != sum(self._counts):
            raise ShapeError(
                f"hidden_states of {sum(self._counts)} rows, as dispatched", str(tuple(hidden_states.shape))
            )
        address_of("hidden_states", hidden_states)
        counts, self._counts = self._counts, None
        return self._exchange(env.TIMEOUT_SECS.get()).sum_rows(hidden_states.contiguous(), counts)

    def reset(self) -> None:
        """Forgets a dispatch that will not be combined. Local; to be called on every rank."""
        self._require_open()
        self._counts = None

    @classmethod
    def kernel_for(cls, num_nodes: int, max_tokens: int | None = None) -> tuple[str, str]:
        """Returns "torch.distributed", whatever the number of tokens, and the reason. Local."""
        return "torch.distributed", f"{cls.backend} uses collectives only, on {num_nodes} node(s)"


_RESET = "After a step that failed, manager.reset() on every rank."


def _check_rows(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the number of rows that all tensors have."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.dim() == 0 or first.dim() == 0 or tensor.shape[0] != first.shape[0]:
            raise ShapeError("tensors with one row per token", ", ".join(str(tuple(one.shape)) for one in tensors))
        if tensor.device != first.device:
            raise DeviceError(f"all tensors on {first.device}", str(tensor.device))
        address_of("each tensor", tensor)
    return first.shape[0]


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
