"""Moves blocks between nodes, among the ranks that have the same local rank on each node."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a.errors import ContiguityError, ShapeError, StateError
from ep_a2a.memory.device_groups import DeviceGroups, wait_for
from ep_a2a.memory.guards import is_capturing
from ep_a2a.memory.peers import STORE_SECS, within
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup

if TYPE_CHECKING:
    from ep_a2a.memory.node_grid import NodeGrid

GLOO_PATIENCE_SECS = 5.0
"""What gloo waits beyond our own bound before it closes its connections: those of ranks that came later, too."""


@dataclass(frozen=True)
class Exchange:
    """An exchange that has begun.

    Attributes:
        work: what is waited for; None where the exchange has ended, or is a part of the stream already.
        tensors: what it reads and writes, kept alive.
        number: counts this rank's exchanges, for a transport that does.
    """

    work: Any
    tensors: tuple[torch.Tensor, torch.Tensor]
    number: int = 0


class NodeTransport(abc.ABC):
    """Moves blocks between this rank and its partners, the ranks of the same local rank on the other nodes.

    Making one is collective over the partners, and so is every exchange: partners make the same ones in the same
    order, whichever op each is for. A subclass connects in `_connect` and moves blocks in `_start` and `_finish`;
    checks, states and errors are here.

    Args:
        group: the group that `grid` is of.
        grid: where this rank stands; ranks in errors are those of `group`.
        timeout_secs: bound of an exchange that is given none; it can be changed later.
        reason: why there is one.

    Raises:
        RankTimeoutError: a partner did not come to make the group.
    """

    def __init__(self, group: dist.ProcessGroup, grid: NodeGrid, timeout_secs: float, reason: str = "") -> None:
        self.group = group
        self.grid = grid
        self.timeout_secs = timeout_secs
        self.reason = reason
        self._open()

    def _open(self) -> None:
        self._connect()
        self._state = "open"

    @abc.abstractmethod
    def _connect(self) -> None:
        """Makes ready for exchanges with `grid.partners`. Collective over them."""

    @abc.abstractmethod
    def _start(self, received: torch.Tensor, sent: torch.Tensor, timeout_secs: float) -> Exchange:
        """Begins to move blocks; see `begin`. Both are bytes, [num_nodes, ...], this node's own block among them."""

    @abc.abstractmethod
    def _finish(self, exchange: Exchange, timeout_secs: float) -> None:
        """Waits until an exchange has ended; any exception breaks the transport until `renew`."""

    @abc.abstractmethod
    def _disconnect(self) -> None:
        """Undoes `_connect`; local."""

    @property
    def is_open(self) -> bool:
        """Whether exchanges can be made: none has failed."""
        return self._state == "open"

    def require_open(self) -> None:
        """Raises StateError where an exchange has failed, or this is closed."""
        if not self.is_open:
            raise StateError(
                "a transport between nodes that works",
                f"one that is {self._state}",
                "Call reset() of the op on all ranks.",
            )

    def begin(self, received: torch.Tensor, sent: torch.Tensor, timeout_secs: float | None = None) -> Exchange:
        """Begins to send block n of `sent` to the partner on node n, whose block for this rank comes to `received`.

        This node's own block is copied. Nothing waits on the host. On CUDA the exchange comes behind what the current
        stream does now; while a graph is captured it ends in the stream, too. The first exchange on a device must come
        before a capture: it connects.

        Args:
            received, sent: contiguous, [num_nodes, ...], on one device, of equally many bytes, not overlapping. Until
                the exchange has ended they are its own.
            timeout_secs: bound of this exchange on CPU; None for the transport's.

        Raises:
            ShapeError, ContiguityError: the tensors are not so; nothing was sent.
            StateError: an exchange has failed before, or this is closed.
        """
        self.require_open()
        check_blocks(received, sent, self.grid.num_nodes)
        received, sent = received.view(torch.uint8), sent.view(torch.uint8)
        if self.grid.num_nodes == 1:
            received.copy_(sent)
            return Exchange(None, (received, sent))
        return self._start(received, sent, self._bound(timeout_secs))

    def end(self, exchange: Exchange, timeout_secs: float | None = None) -> None:
        """Waits for an exchange: on CPU until it has ended, on CUDA by making the current stream wait.

        Raises:
            RankTimeoutError: on CPU, partners did not come in time; no exchange can be made until `renew`.
        """
        if exchange.work is None:
            return
        try:
            self._finish(exchange, self._bound(timeout_secs))
        except BaseException:
            # The partners may be one exchange ahead or behind now.
            self._state = "broken by a failed exchange"
            raise

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, timeout_secs: float | None = None) -> None:
        """`begin` and `end` in one."""
        self.end(self.begin(received, sent, timeout_secs), timeout_secs)

    def _bound(self, timeout_secs: float | None) -> float:
        return self.timeout_secs if timeout_secs is None else timeout_secs

    def renew(self) -> None:
        """Connects anew after a failed exchange. Collective over the partners; no exchange may be running.

        Raises:
            RankTimeoutError: a partner did not come.
        """
        self.close()
        self._open()

    def close(self) -> None:
        """Gives up the connection; local, no exchange may be running. A second call does nothing.

        After a failed exchange it may take GLOO_PATIENCE_SECS.
        """
        if self._state != "closed":
            self._state = "closed"
            self._disconnect()


class NodeAllToAll(NodeTransport):
    """Moves blocks by all_to_all_single: NCCL for CUDA tensors, within NCCL's own bound, gloo for CPU tensors."""

    def _connect(self) -> None:
        self._group = make_subgroup(self.group, self.grid.partners)
        self._device_groups = DeviceGroups(self._group)
        store = distributed_c10d._get_process_group_store(self._group)
        # each partner's number of exchanges, since gloo does not say which rank it waits for
        self._numbers = distributed_c10d.PrefixStore("ep_a2a/exchanges", store)
        self._number = 0

    def _start(self, received: torch.Tensor, sent: torch.Tensor, timeout_secs: float) -> Exchange:
        if received.is_cuda:
            group = self._device_groups.of(received.device)
            work = dist.all_to_all_single(received, sent, group=group, async_op=True)
            if is_capturing(received.device):
                # the halves of a split call may be captured in graphs of their own
                work.wait()
                work = None
            return Exchange(work, (received, sent))
        options = dist.AllToAllOptions()
        # all_to_all_single takes no bound; without one, whoever lets go of the group waits for the group's.
        options.timeout = timedelta(seconds=timeout_secs + GLOO_PATIENCE_SECS)
        self._number += 1
        self._numbers.set(str(self.grid.node), str(self._number))
        work = self._device_groups.of(received.device).alltoall_base(received, sent, [], [], options)
        return Exchange(work, (received, sent), self._number)

    def _finish(self, exchange: Exchange, timeout_secs: float) -> None:
        ranks = self.grid.partners
        who = f"ranks {', '.join(map(str, ranks))}, one of each node,"
        wait_for(
            exchange.work,
            exchange.tensors[0].device,
            timeout_secs,
            ranks[self.grid.node],
            who=who,
            find_missing=lambda: self._missing(exchange.number),
        )

    def _missing(self, number: int) -> tuple[int, ...]:
        """Partners that have not come to the exchange of this number.

        All partners where the store does not answer, or where all have come but not all connections have held.
        """

        def come(place: int) -> bool:
            key = str(place)
            return self._numbers.check([key]) and int(self._numbers.get(key)) >= number

        late = within(STORE_SECS, lambda: [place for place in range(self.grid.num_nodes) if not come(place)])
        others = [place for place in range(self.grid.num_nodes) if place != self.grid.node]
        return tuple(self.grid.partners[place] for place in late or others)

    def _disconnect(self) -> None:
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
