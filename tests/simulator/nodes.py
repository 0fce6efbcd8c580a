"""Exchanges of blocks that hosts make between virtual nodes in the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.node_transport import Exchange, NodeTransport
from tests.simulator.memory import View

if TYPE_CHECKING:
    from tests.simulator.ranks import Context

TIMEOUT_SECS = 2.0


class HostExchange(NodeTransport):
    """Moves blocks at once when all partners have sent theirs. Whoever has received knows what the senders did before.

    Args:
        context: of the rank. grid: its place among the nodes.
    """

    def __init__(self, context: Context, grid: NodeGrid) -> None:
        self._context, self._connections, self._number = context, 0, 0
        # blocks that ranks have sent, by rank, its connection and number of its exchange, and what the sender knew
        self._sent: dict[tuple[int, int, int], tuple[torch.Tensor, View]] = context.machine.exchanged
        super().__init__(context.group, grid, TIMEOUT_SECS)

    def _connect(self) -> None:
        self._connections, self._number = self._connections + 1, 0

    def _start(self, received: torch.Tensor, sent: torch.Tensor, timeout_secs: float) -> Exchange:
        self._context.synchronize()
        self._number += 1
        self._sent[self._context.rank, self._connections, self._number] = sent.clone(), self._context.stream.view.copy()
        return Exchange(self._number, (received, sent), self._number)

    def _finish(self, exchange: Exchange, timeout_secs: float) -> None:
        scheduler, received = self._context.machine.scheduler, exchange.tensors[0]
        keys = [(rank, self._connections, exchange.number) for rank in self.grid.partners]
        deadline = scheduler.now + timeout_secs
        while late := [key[0] for key in keys if key not in self._sent]:
            # a process that ends closes its connections
            if scheduler.now > deadline or scheduler.dead.intersection(late):
                raise RankTimeoutError(
                    f"partners within {timeout_secs:g} s", f"none of {late}", missing_ranks=tuple(late)
                )
            scheduler.sleep(min(1e-3, timeout_secs))
        for place, key in enumerate(keys):
            block, view = self._sent[key]
            received[place].copy_(block[self.grid.node])
            self._context.stream.view.join(view)
            self._context.stream.performed.join(view)

    def _disconnect(self) -> None:
        pass
