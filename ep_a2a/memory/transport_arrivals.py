"""Who has come to an exchange, asked after one has failed: gloo does not say which rank it waits for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Sequence

ASK_SECS = 5.0
"""Bound of a wait for the store, whose host may be the one that cannot be reached."""


class Arrivals:
    """Each rank's number of exchanges, in the store of the group that makes them.

    Args:
        group: the ranks that take part; one Arrivals per group.
        names: what the ranks are called, in their order.
    """

    def __init__(self, group: dist.ProcessGroup, names: Sequence[int]) -> None:
        self._rank = dist.get_rank(group)
        self._names = tuple(names)
        self._store = distributed_c10d.PrefixStore("ep_a2a/exchanges", distributed_c10d._get_process_group_store(group))
        self._number = 0

    def announce(self) -> int:
        """Says that this rank has come to its next exchange, and returns its number; a TCP store is not waited for."""
        self._number += 1
        self._store.set(str(self._rank), str(self._number))
        return self._number

    def missing(self, number: int) -> tuple[int, ...]:
        """Names of the ranks that have not come to the exchange of this number.

        All other ranks where that cannot be found out: the store does not answer within ASK_SECS, or all have come but
        not all connections have held.
        """
        late: list[int] = []
        # A thread, since the store's own timeout does not hold where its host has fallen silent.
        asking = threading.Thread(target=lambda: late.extend(self._late(number)), daemon=True)
        asking.start()
        asking.join(ASK_SECS)
        others = tuple(name for place, name in enumerate(self._names) if place != self._rank)
        return others if asking.is_alive() or not late else tuple(late)

    def _late(self, number: int) -> list[int]:
        try:
            return [name for place, name in enumerate(self._names) if self._number_of(place) < number]
        except (RuntimeError, ValueError):  # a lost connection to the store, or no number there: nothing is known
            return []

    def _number_of(self, place: int) -> int:
        key = str(place)
        return int(self._store.get(key)) if self._store.check([key]) else 0
