"""Chooses the process group that moves a tensor, and bounds the waits for its collectives."""

import functools
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a import clock
from ep_a2a.errors import RankTimeoutError, UnsupportedError
from ep_a2a.memory.agreement import agreed_error
from ep_a2a.memory.gpus import require_own_gpus
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.verdict import GivenUp

_RANK_IS_GONE = ("timed out", "timeout", "closed by peer", "reset by peer", "broken pipe", "no route to host")
"""Parts of gloo's messages, in lower case; gloo has no error class for these failures."""


class DeviceGroups:
    """Process groups by a tensor's device: cpu_group for CPU tensors, an NCCL group for CUDA tensors.

    Args:
        cpu_group: the group itself, with gloo.
        device_group: None, or a group of the same ranks with NCCL. Without one, cpu_group is used where it has NCCL
            too, and otherwise a communicator is made over cpu_group's store when a CUDA tensor first comes.
        rendezvous: where the ranks compare values; None makes one on first use, on every rank in the same order.
    """

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device_group: dist.ProcessGroup | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.cpu_group = cpu_group
        if rendezvous is not None:
            self.rendezvous = rendezvous
        self._device_group = device_group
        self._own: dist.ProcessGroup | None = None
        self._num_waits = 0

    @functools.cached_property
    def rendezvous(self) -> Rendezvous:
        """Meeting place where ranks compare values; made on first use, on every rank in the same order."""
        return Rendezvous(self.cpu_group)

    def wait(self, work: dist.Work, device: torch.device, timeout_secs: float) -> None:
        """Waits for a collective of all ranks: on CPU until it is done, on CUDA by making the current stream wait.

        Args:
            work: the collective's handle.
            device: where its tensors lie.
            timeout_secs: bound on CPU; on CUDA the process group's own timeout holds.

        Raises:
            RankTimeoutError: on CPU, when timeout_secs have passed or the connection to a rank is lost; at most
                PATIENCE_SECS later (memory/agreement.py). A collective does not tell who did not come. So
                missing_ranks are the ranks that are gone, late_ranks the ranks that live and do not give up.
        """
        rank, peers = self.rendezvous.rank, self.rendezvous.peers
        self._num_waits += 1
        start = clock.now()
        try:
            wait_for(work, device, timeout_secs, rank)
        except RankTimeoutError as error:
            call = f"collective {self._num_waits}"
            failure = f"{call} behind meeting {self.rendezvous.last_meeting}"
            others = tuple(other for other in range(peers.world_size) if other != rank)
            given_up = GivenUp(failure, call, others, waited=True, at=clock.now())
            raise agreed_error(error, peers, given_up, timeout_secs, start) from error

    def of(self, device: torch.device) -> dist.ProcessGroup:
        """Returns the group that moves tensors of this device. Collective when a CUDA tensor first comes.

        Raises:
            UnsupportedError: cpu_group cannot move CPU tensors, or ranks share a GPU, which NCCL refuses.
        """
        if device.type == "cpu":
            if "cpu:gloo" not in dist.get_backend_config(self.cpu_group):
                raise UnsupportedError(
                    "cpu_group with gloo",
                    dist.get_backend_config(self.cpu_group),
                    "Create it with backend 'gloo' or 'cpu:gloo,cuda:nccl'.",
                )
            return self.cpu_group
        if self._device_group is None:
            require_own_gpus(self.rendezvous, device)
            has_nccl = "cuda:nccl" in dist.get_backend_config(self.cpu_group)
            self._device_group = self.cpu_group if has_nccl else self._make_nccl_group(device)
        return self._device_group

    def _make_nccl_group(self, device: torch.device) -> dist.ProcessGroup:
        # new_group would need every process of the job; its use_local_synchronization hangs where members belong to
        # different numbers of groups, because the new group's name counts them (torch 2.13).
        rank, world_size = dist.get_rank(self.cpu_group), dist.get_world_size(self.cpu_group)
        store = distributed_c10d._get_process_group_store(self.cpu_group)
        # Two managers of one group each make their own; a number separates their keys.
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
        """Shuts down the communicator that this object made; groups that it was given stay."""
        if self._own is not None:
            self._own.shutdown()
            self._own = self._device_group = None


def is_rank_gone(error: RuntimeError) -> bool:
    """Whether gloo's error means that a rank did not come or lost its connection."""
    return any(text in str(error).lower() for text in _RANK_IS_GONE)


def wait_for(
    work: dist.Work,
    device: torch.device,
    timeout_secs: float,
    rank: int,
    *,
    who: str = "every rank",
    find_missing: Callable[[], tuple[int, ...]] = tuple,
) -> None:
    """Waits for a collective: on CPU until it is done, on CUDA by making the current stream wait.

    Args:
        work: what the collective returned.
        device: where its tensors lie.
        timeout_secs: bound on CPU; on CUDA the process group's own timeout holds.
        rank: this rank's name in errors.
        who: the ranks that take part, for errors.
        find_missing: called after a failure: the ranks that have not come, none where that is not known.

    Raises:
        RankTimeoutError: on CPU, when timeout_secs have passed or the connection to a rank is lost.
    """
    if device.type != "cpu":
        work.wait()
        return
    try:
        work.wait(timedelta(seconds=timeout_secs))
    except RuntimeError as error:
        if not is_rank_gone(error):
            raise
        missing = find_missing()
        names = f" for rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}" if missing else ""
        raise RankTimeoutError(
            f"{who} in the collective within {timeout_secs:g} s",
            f"rank {rank} waited in vain{names}: {error}",
            "Check that all ranks are alive and call dispatch and combine alike; then create a new process group.",
            missing_ranks=missing,
        ) from error
