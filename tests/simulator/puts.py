"""Puts of kernels into memory of other nodes: docs/memory-model.md tells what the product expects of NVSHMEM.

- A put has read its source when it returns. What other threads of the program have written there needs a barrier.
- Its bytes land by themselves, at any time, behind those of the program's earlier puts. Its counter grows behind them.
- A put without bytes does not raise its counter: NVSHMEM's interface does not say whether it does.
- Whoever acquires a word that was put knows what lies before a barrier before the put, or was put before a fence.
- A program that waits for a counter knows what was put before the counter had that value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ep_a2a.kernels import put_kernels
from ep_a2a.kernels.put_kernels import _number
from ep_a2a.memory import host_shm
from tests.simulator.memory import Author, Pending, View

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulator.interpreter import Machine


class Puts:
    """Stands in for functions of put_kernels.

    Args:
        machine: whose programs put. site: tells the place in the kernels' source that is being interpreted.
    """

    def __init__(self, machine: Machine, site: Callable[[], str]) -> None:
        self._machine, self._pool, self._site = machine, machine.pool, site
        # by program: its last put, what it has put, and what of this before a fence
        self._last: dict[int, Pending] = {}
        self._made: dict[int, View] = {}
        self._fenced: dict[int, View] = {}
        # by place and value of a counter, what was put before it came to this value
        self._counted: dict[tuple[int, int], View] = {}

    @property
    def twins(self) -> dict[Any, Callable[..., Any]]:
        """What stands in, by function."""
        return {
            put_kernels.put_and_count: self.put_and_count,
            put_kernels.after_arrival: self.after_arrival,
            put_kernels.fence: self.fence,
            # a launch passes arguments by name, and a bound method has one more
            put_kernels.quiet_kernel: lambda table: self.quiet_kernel(),
        }

    def put_and_count(self, target: Any, source: Any, num_bytes: Any, counter: Any, element: Any) -> None:
        """The bytes, and then the counter, are pending from now on."""
        self._machine.scheduler.point()
        author, site, peer = self._machine.program.author, self._site(), _number(element)
        begin, end = _number(source), _number(source) + _number(num_bytes)
        if begin == end:
            return
        size = 4 if (begin | end | _number(target)) % 8 else 8
        addresses = np.arange(begin, end, size)
        target_counter = np.array([host_shm._place_of(_number(counter), peer)])
        targets = addresses + (host_shm._place_of(_number(target), peer) - begin)
        # a counter that only grows comes with a word that is put onto itself, and that nobody uses
        is_read = begin != _number(target)
        load = self._machine.note("put reads", addresses, size, site)
        values = self._pool.load(author, load, is_strong=False, is_checked=False)
        if is_read:
            # whoever knows that the put was made, also by its counter, may write to the source
            reader = self._machine.new_author()
            self._pool.reads.add(Author(reader, author.rank, author.view), load.bytes, site, is_volatile=False)
            author.view.learn(reader, 1)
        put = self._machine.note("put", targets, size, site)
        put.values, places = values, put.bytes
        self._pool.reads.check_store(author, places, site)
        raised = self._machine.note("put counts", target_counter, 8, site)

        number = self._machine.new_author()
        released = author.view.copy()
        released.learn(author.number, author.phase)
        fenced = released.copy()
        fenced.join(self._fenced.get(author.number, View()))
        previous = self._last.get(author.number)
        data = Pending(
            places, values, author.rank, number, 0, put, passes_caches=True, behind=previous, released=fenced
        )
        made = self._made.setdefault(author.number, View())
        made.learn(number, 1)
        place = raised.bytes
        known = made.copy()

        def count() -> np.ndarray:
            value = self._pool.landed[place].view(np.int64) + 1
            self._counted[int(place[0, 0]), int(value.item())] = known
            raised.values = value.view(np.uint8)
            return raised.values

        signal = Pending(place, np.empty((1, 8), np.uint8), author.rank, number, 0, raised, passes_caches=True)
        signal.released, signal.value_now = released, count
        signal.behind = data
        self._last[author.number] = signal
        self._pool.pending += [data, signal]

    def after_arrival(self, counter: Any, value: Any) -> None:
        """The program waits for a value that the counter has, and knows what was put before."""
        place = _number(counter) - self._pool.address
        author = self._machine.program.author
        author.view.join(self._counted.get((place, _number(value)), View()))

    def fence(self) -> None:
        """What the program has put so far comes before what it puts now."""
        number = self._machine.program.author.number
        self._fenced[number] = self._made.get(number, View()).copy()

    def quiet_kernel(self) -> None:
        """All that the rank has put lands."""
        rank = self._machine.program.author.rank
        for store in [each for each in self._pool.pending if each.released is not None and each.rank == rank]:
            if store in self._pool.pending:
                self._pool.land(store)
