"""RowExchange: gathers and sums rows of which each rank has another number, for the collective backends."""

import abc
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ep_a2a.errors import UnsupportedError
from ep_a2a.memory.device_groups import DeviceGroups


class RowExchange(abc.ABC):
    """Gathers and sums rows of which each rank has another number. Every method is collective.

    Tensors are contiguous, `[rows, ...]`, of any dtype in `gather_rows`; all ranks pass the same dtype and row shape.
    `counts` are the rows of each rank, the same on all ranks.

    Args:
        groups: the process groups that move tensors of each device.
        timeout_secs: bound of a wait on CPU. On CUDA the process group's own time-out holds.
    """

    def __init__(self, groups: DeviceGroups, timeout_secs: float) -> None:
        self.groups = groups
        self.timeout_secs = timeout_secs
        self.rank = dist.get_rank(groups.cpu_group)
        self.world_size = dist.get_world_size(groups.cpu_group)

    def exchange_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's numbers, in rank order. The host waits.

        Raises:
            RankTimeoutError: a rank did not come in time.
            UnsupportedError: a CUDA graph is being captured, which would freeze these numbers.
        """
        # Asking about a capture would create a CUDA context where there is none.
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if in_use and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "no CUDA graph capture around a collective backend's dispatch",
                "a capture",
                "Run it outside of graphs, or use the ep_a2a backend, which can be captured.",
            )
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        group = self.groups.of(own.device)
        self.wait(dist.all_gather(gathered, own, group=group, async_op=True), own.device)
        return [tuple(int(number) for number in part) for part in gathered]

    @abc.abstractmethod
    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """All ranks' rows `[sum(counts), ...]`, in rank order, bit for bit."""

    @abc.abstractmethod
    def sum_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """This rank's part `[counts[rank], ...]` of the sum over ranks of `rows` `[sum(counts), ...]`, in float32."""

    def wait(self, work: dist.Work | None, device: torch.device) -> None:
        """Waits for a collective: on CPU until it is done, on CUDA by making the current stream wait.

        Raises:
            RankTimeoutError: on CPU, when timeout_secs have passed; see DeviceGroups.wait.
        """
        if work is not None:
            self.groups.wait(work, device, self.timeout_secs)


def row_bytes(rows: torch.Tensor) -> torch.Tensor:
    """`rows` `[n, ...]` as uint8 `[n, bytes of a row]`: collectives then need not know the dtype (fp8 has none)."""
    width = math.prod(rows.shape[1:])
    if rows.shape[0] == 0:
        # torch takes an empty tensor of any strides for contiguous, and refuses to view some as bytes
        return rows.new_empty((0, width * rows.itemsize), dtype=torch.uint8)
    flat = rows.reshape(rows.shape[0], width)
    return flat.resolve_neg().view(torch.uint8)


def rows_from_bytes(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """uint8 `[n, bytes of a row]` as rows of the dtype and row shape of `like`."""
    return data.view(like.dtype).view(data.shape[0], *like.shape[1:])
