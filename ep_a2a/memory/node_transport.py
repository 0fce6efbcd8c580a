"""NodeTransport: moves blocks between the ranks of the same local rank on all nodes."""

import abc
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a.errors import ContiguityError, ShapeError, StateError
from ep_a2a.memory.device_groups import DeviceGroups, wait_for
from ep_a2a.memory.guards import is_capturing
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.peers import STORE_SECS, within
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup

GLOO_PATIENCE_SECS = 5.0
"""From our own bound to gloo's, which closes its connections, also to ranks that came late."""


@dataclass(frozen=True)
class Exchange:
    """A running exchange.

    Attributes:
        work: the collective to wait for; None if the exchange has ended, or ends in the stream.
        tensors: the tensors that it reads and writes, kept alive.
        number: counts this rank's exchanges, for a transport that does.
    """

    work: Any
    tensors: tuple[torch.Tensor, torch.Tensor]
    number: int = 0


class NodeTransport(abc.ABC):
    """Moves blocks between this rank and its partners: the ranks of the same local rank on the other nodes.

    Making one is collective over the partners, and so is every exchange: partners make the same ones in the same
    order, whichever op each is for. A subclass connects in `_connect` and moves blocks in `_start` and `_finish`;
    checks, states and errors are here.

    Args:
        group: the group that `grid` is of.
        grid: where this rank stands; ranks in errors are those of `group`.
        timeout_secs: bound of `exchange`; it can be changed later.

    Raises:
        RankTimeoutError: a partner did not come to make the group.
    """

    def __init__(self, group: dist.ProcessGroup, grid: NodeGrid, timeout_secs: float) -> None:
        self.group = group
        self.grid = grid
        self.timeout_secs = timeout_secs
        self._open()

    def _open(self) -> None:
        self._connect()
        self._state = "open"

    @abc.abstractmethod
    def _connect(self) -> None:
        """Connect with `grid.partners`. Collective over them."""

    @abc.abstractmethod
    def _start(self, received: torch.Tensor, sent: torch.Tensor, timeout_secs: float) -> Exchange:
        """Begin to move blocks. Both tensors are bytes, [num_nodes, ...], and include this node's own block."""

    @abc.abstractmethod
    def _finish(self, exchange: Exchange, timeout_secs: float) -> None:
        """Wait for the end of an exchange. Any exception breaks the transport until `renew`."""

    @abc.abstractmethod
    def _disconnect(self) -> None:
        """Undo `_connect`. Local."""

    @property
    def is_open(self) -> bool:
        """Whether exchanges can be made: the transport is not closed and no exchange has failed."""
        return self._state == "open"

    def require_open(self) -> None:
        """Raise StateError if an exchange has failed or the transport is closed."""
        if not self.is_open:
            raise StateError(
                "a transport between nodes that works",
                f"one that is {self._state}",
                "Call reset() of the op on all ranks.",
            )

    def begin(self, received: torch.Tensor, sent: torch.Tensor, timeout_secs: float) -> Exchange:
        """Begin to send block n of `sent` to the partner on node n, and to receive that partner's block in `received`.

        This node's own block is copied. The host does not wait. On CUDA the exchange follows the work on the current
        stream; in a graph's capture it also ends in that stream. The first exchange on a device connects, so it must
        come before a capture.

        Args:
            received, sent: contiguous, [num_nodes, ...], on one device, of equally many bytes, not overlapping. Leave
                them alone until the exchange has ended.
            timeout_secs: bound of this exchange on CPU.

        Raises:
            ShapeError, ContiguityError: the tensors do not fit; nothing was sent.
            StateError: an exchange has failed, or the transport is closed.
        """
        self.require_open()
        check_blocks(received, sent, self.grid.num_nodes)
        received, sent = received.view(torch.uint8), sent.view(torch.uint8)
        if self.grid.num_nodes == 1:
            received.copy_(sent)
            return Exchange(None, (received, sent))
        return self._start(received, sent, timeout_secs)

    def end(self, exchange: Exchange, timeout_secs: float) -> None:
        """End an exchange: wait for it on CPU, for timeout_secs at most; on CUDA make the current stream wait.

        Raises:
            RankTimeoutError: on CPU, partners did not come in time; no exchange can be made until `renew`.
        """
        if exchange.work is None:
            return
        try:
            self._finish(exchange, timeout_secs)
        except BaseException:
            # The partners may be one exchange ahead or behind now.
            self._state = "broken by a failed exchange"
            raise

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Begin and end an exchange, within the transport's bound."""
        self.end(self.begin(received, sent, self.timeout_secs), self.timeout_secs)

    def renew(self) -> None:
        """Connect anew after a failed exchange. Collective over the partners; no exchange may be running.

        Raises:
            RankTimeoutError: a partner did not come.
        """
        self.close()
        self._open()

    def close(self) -> None:
        """Give up the connection. Local; no exchange may be running. A second call does nothing.

        After a failed exchange it may take GLOO_PATIENCE_SECS.
        """
        if self._state != "closed":
            self._state = "closed"
            self._disconnect()


class NodeAllToAll(NodeTransport):
    """Moves blocks by all_to_all_single: NCCL with its own time-out for CUDA tensors, gloo for CPU tensors."""

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
        # all_to_all_single takes no bound; without one, dropping the group waits for the group's.
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
        """Partners that never began exchange `number`.

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
    """Raise ShapeError or ContiguityError unless the tensors fit an exchange."""
    for what, tensor in (("received", received), ("sent", sent)):
        if tensor.dim() == 0 or tensor.shape[0] != num_nodes:
            raise ShapeError(f"{what} to have one block for each of {num_nodes} nodes", str(tuple(tensor.shape)))
        if not tensor.is_contiguous():
            raise ContiguityError(f"{what} to be contiguous", f"strides {tensor.stride()}")
    if received.nbytes != sent.nbytes or received.device != sent.device:
        raise ShapeError(
            f"received of {sent.nbytes} bytes on {sent.device}, as sent", f"{received.nbytes} on {received.device}"
        )
