"""Rails over torch.distributed: fixed blocks exchanged among the ranks that have the same local rank on each node."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ep_a2a.errors import ContiguityError, ShapeError, StateError
from ep_a2a.memory.device_groups import DeviceGroups, wait_for
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup
from ep_a2a.memory.transport_arrivals import RailArrivals

if TYPE_CHECKING:
    from ep_a2a.memory.node_grid import NodeGrid

GLOO_PATIENCE_SECS = 5.0
"""What gloo waits beyond our own bound before it closes its connections: those of ranks that came later, too."""


class TorchDistributedRail:
    """Moves blocks between this rank and its rail peers, the ranks of the same local rank on the other nodes.

    By all_to_all_single: NCCL for CUDA tensors, gloo for CPU tensors. Making one is collective over the rail.

    Args:
        group: the group that `grid` is of.
        grid: where this rank stands; ranks in errors are those of `group`.
        timeout_secs: bound of an exchange that is given none, which can be changed later; NCCL's own holds for it.
        reason: why there is one.

    Raises:
        RankTimeoutError: a rank of the rail did not come to make its group.
    """

    def __init__(self, group: dist.ProcessGroup, grid: NodeGrid, timeout_secs: float, reason: str = "") -> None:
        self.grid = grid
        self.timeout_secs = timeout_secs
        self.reason = reason
        self._group = make_subgroup(group, grid.rail_ranks)
        self._device_groups = DeviceGroups(self._group)
        self._arrivals = RailArrivals(self._group, grid.rail_ranks)
        self._state = "open"

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, timeout_secs: float | None = None) -> None:
        """Sends block n of `sent` to the peer on node n, and puts its block for this rank into block n of `received`.

        Collective over the rail, in the same order and with the same block size on all its ranks. This node's own
        block is copied. On CUDA it is a part of the current stream, and of a graph that is being captured; nothing
        waits on the host. The first exchange on a device must come before a capture: it connects.

        Args:
            received, sent: contiguous, [num_nodes, ...], on one device, of equally many bytes, not overlapping.
            timeout_secs: bound of this exchange on CPU; None for the rail's. It may differ between ranks. With NCCL
                its own holds.

        Raises:
            ShapeError, ContiguityError: the tensors are not so; nothing was sent.
            RankTimeoutError: on CPU, peers did not come in time; the rail cannot be used afterwards.
            StateError: an exchange has failed before, or the rail is closed.
        """
        if self._state != "open":
            raise StateError("a rail that works", f"one that is {self._state}", "Make a new one on all ranks.")
        check_blocks(received, sent, self.grid.num_nodes)
        received, sent = received.view(torch.uint8), sent.view(torch.uint8)
        if self.grid.num_nodes == 1:
            received.copy_(sent)
        elif received.is_cuda:
            dist.all_to_all_single(received, sent, group=self._device_groups.of(received.device))
        else:
            self._exchange_on_host(received, sent, self.timeout_secs if timeout_secs is None else timeout_secs)

    def _exchange_on_host(self, received: torch.Tensor, sent: torch.Tensor, timeout_secs: float) -> None:
        options = dist.AllToAllOptions()
        # all_to_all_single takes no bound; without one, whoever lets go of the group waits for the group's.
        options.timeout = timedelta(seconds=timeout_secs + GLOO_PATIENCE_SECS)
        self._arrivals.announce()
        ranks = self.grid.rail_ranks
        who = f"ranks {', '.join(map(str, ranks))}, one of each node,"
        try:
            work = self._device_groups.of(received.device).alltoall_base(received, sent, [], [], options)
            wait_for(
                work, received.device, timeout_secs, ranks[self.grid.node],
                who=who, find_missing=self._arrivals.missing,
            )  # fmt: skip
        except BaseException:
            # The peers may be one exchange ahead or behind now.
            self._state = "broken by a failed exchange"
            raise

    def close(self) -> None:
        """Gives up the rail's group; local, no exchange may be running. A second call does nothing.

        After a failed exchange it may take GLOO_PATIENCE_SECS.
        """
        if self._state != "closed":
            self._state = "closed"
            self._device_groups.close()
            destroy_subgroup(self._group)


def check_blocks(received: torch.Tensor, sent: torch.Tensor, num_nodes: int) -> None:
    """Refuses what an exchange cannot take."""
    for what, tensor in (("received", received), ("sent", sent)):
        if tensor.dim() == 0 or tensor.shape[0] != num_nodes:
            raise ShapeError(f"{what} to have one block for each of {num_nodes} nodes", str(tuple(tensor.shape)))
        if not tensor.is_contiguous():
            raise ContiguityError(f"{what} to be contiguous", f"strides {tensor.stride()}")
    if received.nbytes != sent.nbytes or received.device != sent.device:
        raise ShapeError(
            f"received of {sent.nbytes} bytes on {sent.device}, as sent", f"{received.nbytes} on {received.device}"
        )
