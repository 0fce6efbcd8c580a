"""GroupCoordinator, one group of ranks with its process groups and communicator, and the rule that forms the groups."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.errors import ConfigError
from ep_a2a.parallel.communicator import DeviceCommunicator


@dataclass(frozen=True)
class GroupRanks:
    """Global ranks of every tensor-, data- and expert-parallel group. Each rank is in one group of each kind."""

    tp: list[list[int]]
    dp: list[list[int]]
    ep: list[list[int]]


def group_ranks(
    tensor_parallel_size: int,
    data_parallel_size: int,
    *,
    pipeline_parallel_size: int = 1,
    prefill_context_parallel_size: int = 1,
) -> GroupRanks:
    """Returns the groups of a world of DP * PP * PCP * TP ranks, numbered in that order, TP fastest, as AITER does.

    An expert-parallel group merges all DP, PCP and TP ranks of one pipeline stage.
    """
    dp, tp, pcp = data_parallel_size, tensor_parallel_size, prefill_context_parallel_size
    all_ranks = torch.arange(dp * pipeline_parallel_size * pcp * tp, device="cpu")
    all_ranks = all_ranks.reshape(1, dp, pipeline_parallel_size, pcp, tp)
    return GroupRanks(
        tp=all_ranks.reshape(-1, tp).tolist(),
        dp=all_ranks.transpose(1, 4).reshape(-1, dp).tolist(),
        ep=all_ranks.transpose(1, 2).reshape(-1, dp * pcp * tp).tolist(),
    )


class GroupCoordinator:
    """Group of one kind that this rank is in, with vLLM's and AITER's attribute names.

    Making one is collective over the whole world, because torch makes groups that way; all ranks pass the same
    arguments, except `device`.

    Args:
        groups: global ranks of every group of this kind; each rank of the world is in exactly one. The
            order within a group does not matter: ranks of a group ascend with the global ranks.
        name: the kind: "tp", "dp" or "ep".
        device: where this rank's tensors live.
        device_backend: backend string for tensors on `device`; the gloo group serves CPU tensors too.
        all2all_backend: backend of an expert-parallel group's manager.
        communicator: class of `device_communicator`.

    Attributes:
        unique_name: "kind:number of the group".
        ranks: global ranks of the group, ascending.
        rank: this process's global rank.
        rank_in_group: its rank in the group.
        world_size: ranks of the group.
        cpu_group: gloo group.
        device_group: group for tensors on `device`; the same object as `cpu_group` on CPU.
        device: where this rank's tensors live.
        device_communicator: holds `all2all_manager` in an expert-parallel group.

    Raises:
        ConfigError: this rank is not in exactly one group.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        name: str,
        device: torch.device,
        device_backend: str,
        all2all_backend: str = DEFAULT_BACKEND,
        communicator: type[DeviceCommunicator] = DeviceCommunicator,
    ) -> None:
        self.rank = dist.get_rank()
        own = [number for number, members in enumerate(groups) if self.rank in members]
        if len(own) != 1:
            raise ConfigError(f"rank {self.rank} to be in one {name} group", f"{len(own)} of {list(groups)}")
        self.unique_name = f"{name}:{own[0]}"
        # The order that torch gives the members of a group.
        self.ranks = sorted(groups[own[0]])
        self.rank_in_group = self.ranks.index(self.rank)
        self.world_size = len(self.ranks)
        self.device = device
        with ExitStack() as cleanup:
            self.cpu_group = _make_groups(groups, own[0], "gloo", cleanup)
            self.device_group = self.cpu_group
            if device.type != "cpu":
                self.device_group = _make_groups(groups, own[0], device_backend, cleanup)
            self.device_communicator = communicator(
                self.cpu_group, device, self.device_group, self.unique_name, all2all_backend
            )
            cleanup.callback(self.device_communicator.destroy)
            self._cleanup = cleanup.pop_all()

    def destroy(self) -> None:
        """Destroys the manager, if there is one, then the groups; idempotent."""
        self._cleanup.close()


def destroy_group(group: dist.ProcessGroup | None = None) -> None:
    """Destroys a process group, None = all, unless torch.distributed has been shut down with all its groups."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def _make_groups(groups: Sequence[Sequence[int]], own: int, backend: str, cleanup: ExitStack) -> dist.ProcessGroup:
    made = [dist.new_group(list(members), backend=backend) for members in groups]
    group: dist.ProcessGroup = made[own]
    if backend == "gloo":
        # A member that left before all are connected would break another's handshake.
        dist.barrier(group)
    cleanup.callback(destroy_group, group)
    return group
