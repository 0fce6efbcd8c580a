"""Rows of uneven counts moved among the ranks of a group: what the collective backends are made of."""

from __future__ import annotations

import abc
import functools
import math
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a.errors import RankTimeoutError, UnsupportedError
from ep_a2a.memory.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Sequence


class DeviceGroups:
    """The process group for a tensor's device: cpu_group for CPU tensors, an NCCL group for CUDA tensors.

    Args:
        cpu_group: the group itself, with gloo.
        device_group: None, or a group of the same ranks with NCCL. Without one, cpu_group is used where it has NCCL
            too, and otherwise a communicator is made over cpu_group's store when a CUDA tensor first comes.
    """

    def __init__(self, cpu_group: dist.ProcessGroup, device_group: dist.ProcessGroup | None = None) -> None:
        self.cpu_group = cpu_group
        self._device_group = device_group
        self._own: dist.ProcessGroup | None = None

    @functools.cached_property
    def rendezvous(self) -> Rendezvous:
        """Where ranks compare what must be equal; made on first use, on every rank in the same order."""
        return Rendezvous(self.cpu_group)

    def of(self, device: torch.device) -> dist.ProcessGroup:
        """The group that moves tensors of this device; collective where a communicator has to be made.

        Raises:
            UnsupportedError: cpu_group cannot move CPU tensors.
        """
        if device.type == "cpu":
            if "cpu:gloo" not in dist.get_backend_config(self.cpu_group):
                raise UnsupportedError(
                    "cpu_group with gloo", dist.get_backend_config(self.cpu_group),
                    "Create it with backend 'gloo' or 'cpu:gloo,cuda:nccl'.",
                )  # fmt: skip
            return self.cpu_group
        if self._device_group is None:
            has_nccl = "cuda:nccl" in dist.get_backend_config(self.cpu_group)
            self._device_group = self.cpu_group if has_nccl else self._make_nccl_group(device)
        return self._device_group

    def _make_nccl_group(self, device: torch.device) -> dist.ProcessGroup:
        # new_group would need every process of the job; its use_local_synchronization hangs where members belong to
        # different numbers of groups, because the new group's name counts them (torch 2.13).
        rank, world_size = dist.get_rank(self.cpu_group), dist.get_world_size(self.cpu_group)
        store = distributed_c10d._get_process_group_store(self.cpu_group)
        # Two managers of one group each make their own; a number tells their keys apart.
        generation = store.add(f"ep_a2a/nccl/{rank}", 1)
        store = distributed_c10d.PrefixStore(f"ep_a2a/nccl/{generation}", store)
        group = dist.ProcessGroup(store, rank, world_size)
        backend = dist.ProcessGroupNCCL(store, rank, world_size, dist.ProcessGroupNCCL.Options())
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device(device.type), dist.ProcessGroup.BackendType.NCCL, backend)
        self._own = group
        return group

    def close(self) -> None:
        """Shuts down the communicator that was made here; groups that were given stay."""
        if self._own is not None:
            self._own.shutdown()
            self._own = self._device_group = None


class RowExchange(abc.ABC):
    """Gathers and sums rows of which each rank has its own number. Every method is collective.

    Tensors are contiguous, `[rows, ...]`, of any dtype in `gather_rows`; all ranks pass the same dtype and row shape.
    `counts` are the rows of each rank, the same on all ranks.

    Args:
        groups: which process group moves which device's tensors.
        timeout_secs: bound of a wait on CPU; on CUDA the process group's own timeout holds.
    """

    def __init__(self, groups: DeviceGroups, timeout_secs: float) -> None:
        self.groups = groups
        self.timeout_secs = timeout_secs
        self.rank = dist.get_rank(groups.cpu_group)
        self.world_size = dist.get_world_size(groups.cpu_group)

    def exchange_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's numbers, in rank order; goes through the host.

        Raises:
            RankTimeoutError: a rank did not come in time.
            UnsupportedError: a CUDA graph is being captured, which would freeze these numbers.
        """
        # Asking about a capture would create a CUDA context where there is none.
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if in_use and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "no CUDA graph capture around a collective backend's dispatch", "a capture",
                "Run it outside of graphs, or use the ep_a2a backend, which can be captured.",
            )  # fmt: skip
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
            RankTimeoutError: on CPU, when timeout_secs have passed.
        """
        if work is None:
            return
        if device.type != "cpu":
            work.wait()
            return
        try:
            work.wait(timedelta(seconds=self.timeout_secs))
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            raise RankTimeoutError(
                f"every rank in the collective within {self.timeout_secs:g} s",
                f"rank {self.rank} waited in vain: {error}",
                "Check that all ranks are alive and call dispatch and combine alike; then create a new process group.",
            ) from error


def row_bytes(rows: torch.Tensor) -> torch.Tensor:
    """`rows` `[n, ...]` as uint8 `[n, bytes of a row]`: collectives then need not know the dtype (fp8 has none)."""
    flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    return flat.view(torch.uint8)


def rows_from_bytes(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """uint8 `[n, bytes of a row]` as rows of the dtype and row shape of `like`."""
    return data.view(like.dtype).view(data.shape[0], *like.shape[1:])
