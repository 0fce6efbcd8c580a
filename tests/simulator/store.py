"""The store by which ranks of the simulator meet. Each call is an operation of a host, at which its rank may die."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from tests.simulator.scheduler import Scheduler

LOOK_SECS = 1.0


class Store:
    """Stands in for torch's store and, with a prefix, for its PrefixStore.

    Args:
        scheduler: of the simulation.
        holder: rank whose process holds the store and ends it; None for a process that outlives all.
    """

    def __init__(self, scheduler: Scheduler, holder: int | None = None) -> None:
        self._scheduler, self._holder = scheduler, holder
        self._values: dict[str, bytes] = {}
        self._prefix = ""

    def below(self, prefix: str) -> Store:
        """The part of this store whose keys begin with a prefix."""
        part = Store(self._scheduler, self._holder)
        part._values, part._prefix = self._values, f"{self._prefix}{prefix}/"
        return part

    def clone(self) -> Store:
        """Another connection to this store."""
        return self

    def _key(self, key: str) -> str:
        self._scheduler.host_point()
        if self._holder in self._scheduler.dead:
            raise dist.DistNetworkError("connection refused")
        return self._prefix + key

    def set(self, key: str, value: str) -> None:
        self._values[self._key(key)] = value.encode()

    def get(self, key: str) -> bytes:
        place = self._key(key)
        self._scheduler.wait(lambda: place in self._values)
        return self._values[place]

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Look for keys, once in LOOK_SECS: time passes only while all others wait, too."""
        until = self._scheduler.now + timeout.total_seconds()
        while True:
            self._scheduler.sleep(LOOK_SECS)
            if self.check(keys):
                return
            if self._scheduler.now > until:
                raise dist.DistStoreError(f"wait timeout for {keys}")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._key(key) in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        place = self._key(key)
        total = int(self._values.get(place, b"0")) + amount
        self._values[place] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        place = self._key(key)
        if self._values.get(place, b"") == expected.encode():
            self._values[place] = desired.encode()
        return self._values.get(place, expected.encode())

    def delete_key(self, key: str) -> bool:
        return self._values.pop(self._key(key), None) is not None
