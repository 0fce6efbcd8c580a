"""Runs the hosts and programs of all ranks in one thread: one task at a time, by one clock, repeatable by its seed."""

import collections
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import greenlet
import numpy as np

from tests.simulator.memory import Pending, Pool

SHORTEST_STEP_SECS = 1e-6
LIMIT_SECS = 1000.0
"""More than the bounds of all waits, by the simulated clock."""


class Fault(NamedTuple):
    """What happens to a rank.

    Attributes:
        rank: whose process it is.
        operation: number of its operation at which it happens, from 1.
        secs: how long all of the rank stands still; None where it dies.
    """

    rank: int
    operation: int
    secs: float | None = None


@dataclass(frozen=True)
class Conditions:
    """How the machine behaves.

    Attributes:
        seed: of all choices.
        switches: probability that a task is interrupted before an access.
        staleness: probability that a load goes one value further back.
        fresh_looks: the first volatile load of a program behind a pause sees all that has landed.
        landing: which pending store lands first: "newest", "oldest" or "random".
        halves: each store lands by halves, since an element of it is a thread's own.
        num_sms: multiprocessors of each GPU.
        weakened: places (sites.Site.place) whose ordering is taken away.
        dependent: a launch holds up the host only until the next may start beside it; the host calls
            `Context.synchronize`.
        asynchronous: a launch holds up the host's next launch only, and the host keeps the inputs alive.
        faults: ranks that die or stand still.
        hosts: number of each rank's host; empty where all have one.
        host_switches: probability that a host is interrupted where it reaches other hosts.
        store_holder: rank whose process holds the store; None for a process that outlives all.
        limit_secs: of the simulated clock, for the whole run.
    """

    seed: int = 0
    switches: float = 0.0
    staleness: float = 1.0
    fresh_looks: bool = False
    landing: str = "newest"
    num_sms: int = 2
    weakened: frozenset[str] = frozenset()
    dependent: bool = False
    asynchronous: bool = False
    faults: tuple[Fault, ...] = ()
    hosts: tuple[int, ...] = ()
    host_switches: float = 0.0
    store_holder: int | None = None
    limit_secs: float = LIMIT_SECS
    halves: bool = False


class Stuck(AssertionError):
    """No task can go on."""


class Killed(BaseException):
    """Ends the tasks of a rank that dies."""


@dataclass(eq=False)
class Task:
    """A rank's host, or a program of a launch.

    Attributes:
        name: for the trace. rank: whose it is.
        work: what it runs.
        can_go_on: None, or what it waits for.
        wakes_at: None, or the time at which a sleep ends.
        has_polled: whether it has looked for something in vain.
        sees_change: whether it would see something new if it looked again now.
        enter: called whenever it gets control.
    """

    name: str
    rank: int
    work: Callable[[], Any]
    enter: Callable[[], None] = lambda: None
    is_daemon: bool = False
    is_host: bool = False
    can_go_on: Callable[[], bool] | None = None
    wakes_at: float | None = None
    has_polled: bool = False
    sees_change: Callable[[], bool] | None = None
    result: Any = None
    error: BaseException | None = None
    context: greenlet.greenlet = field(init=False)

    def __post_init__(self) -> None:
        self.context = greenlet.greenlet(self._run)

    def _run(self) -> None:
        try:
            self.result = self.work()
        except Killed as killed:
            self.error = killed
        except BaseException as error:  # noqa: BLE001 - reported to whoever started it
            self.error = error

    @property
    def has_ended(self) -> bool:
        """Whether it has returned or raised."""
        return self.context.dead


def nothing() -> None:
    """What is left of a task that has ended."""


def _end(task: Task) -> None:
    """End a task, if it has begun."""
    task.context.parent = greenlet.getcurrent()
    # true from its start to its end; what it does at its end may wait once more
    while task.context:
        task.context.throw(Killed)


class Scheduler:
    """Chooses who goes on.

    Attributes:
        num_operations: by rank.
        struck: when what happens to ranks has happened, by rank.
        dead: ranks that have died. stopped: ranks that stand still, and until when.

    Args:
        draws: random choices. pool: memory whose stores land when nobody can go on.
        conditions: how the machine behaves.
    """

    def __init__(self, draws: random.Random, pool: Pool, conditions: Conditions) -> None:
        self.draws, self.pool, self.conditions = draws, pool, conditions
        self.start_secs = self.now = 1000.0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.num_operations: collections.Counter[int] = collections.Counter()
        self.struck: dict[int, float] = {}
        self.dead: set[int] = set()
        self.stopped: dict[int, float] = {}
        self._hub = greenlet.getcurrent()
        self._step_secs = SHORTEST_STEP_SECS
        self._changes = 0

    def start(self, task: Task) -> Task:
        """Let a task run from now on. Control comes back to the loop when it ends."""
        task.context.parent = self._hub
        self.tasks.append(task)
        return task

    # --- called by tasks ---

    def point(self) -> None:
        """An operation of the current task: its rank may die or stop here, or another task go on."""
        self._count()
        if self.conditions.switches and self.draws.random() < self.conditions.switches:
            self._hub.switch()

    def host_point(self) -> None:
        """The current host reaches other hosts: its rank may die or stop here, or another task go on."""
        self._count()
        if self.conditions.host_switches and self.draws.random() < self.conditions.host_switches:
            self._hub.switch()

    def _count(self) -> None:
        assert self.current is not None
        rank = self.current.rank
        self.num_operations[rank] += 1
        for fault in self.conditions.faults:
            if (fault.rank, fault.operation) == (rank, self.num_operations[rank]):
                self._strike(fault)
        if rank in self.dead:
            raise Killed

    def _strike(self, fault: Fault) -> None:
        self.struck[fault.rank] = self.now
        if fault.secs is None:
            self.kill(fault.rank)
        else:
            self.stopped[fault.rank] = self.now + fault.secs
            self._hub.switch()

    def kill(self, rank: int) -> None:
        """End all tasks of a rank. The caller ends by itself if it is one of them."""
        self.dead.add(rank)
        for task in [each for each in self.tasks if each.rank == rank and each is not self.current]:
            self.tasks.remove(task)
            _end(task)

    def poll(self, sees_change: Callable[[], bool] | None = None) -> None:
        """A task has looked for something in vain.

        Without `sees_change`, or where chance switches tasks, any change of memory lets it look again.
        """
        assert self.current is not None
        self._count()
        self.current.has_polled = True
        self.current.sees_change = None if self.conditions.switches else sees_change
        self._hub.switch()

    def sleep(self, secs: float) -> None:
        """A task goes on after a time."""
        assert self.current is not None
        self._count()
        self.current.wakes_at = self.now + secs
        self._hub.switch()

    def wait(self, can_go_on: Callable[[], bool]) -> None:
        """A task goes on when a condition holds."""
        assert self.current is not None
        if not can_go_on():
            self.current.can_go_on = can_go_on
            self._hub.switch()

    # --- the loop ---

    def run(self, limit_secs: float = LIMIT_SECS) -> None:
        """Run until all tasks that are no daemons have ended."""
        end = self.now + limit_secs
        while any(not task.is_daemon for task in self.tasks):
            if self.now > end:
                raise Stuck("no task can go on, or some never end")
            ready = [task for task in self.tasks if self._is_ready(task)]
            fresh = [task for task in ready if not task.has_polled]
            if fresh:
                self._resume(self.draws.choice(fresh))
            elif self._changes != self.pool.num_changes:
                self._changes = self.pool.num_changes
                self._step_secs = SHORTEST_STEP_SECS
                self._wake_pollers()
            elif self._land_one():
                # where chance switches tasks, it may let all of them look in between
                self._wake_pollers(everybody=bool(self.conditions.switches))
            else:
                self._pass_time()

    def end_all(self) -> None:
        """End the tasks that are left, and forget what they run: it holds the whole simulation in memory."""
        self.dead |= {task.rank for task in self.tasks}
        for task in self.tasks:
            _end(task)
            task.work = task.enter = nothing
            task.can_go_on = task.sees_change = task.error = None

    def _stands_still(self, task: Task) -> bool:
        return self.now < self.stopped.get(task.rank, 0.0)

    def _is_ready(self, task: Task) -> bool:
        if self._stands_still(task):
            return False
        if task.wakes_at is not None:
            return self.now >= task.wakes_at
        return task.can_go_on is None or task.can_go_on()

    def _wake_pollers(self, *, everybody: bool = False) -> None:
        """Let tasks look again that would see a change, or all."""
        for task in self.tasks:
            if task.has_polled and (everybody or task.sees_change is None or task.sees_change()):
                task.has_polled = False

    def _resume(self, task: Task) -> None:
        task.wakes_at = task.can_go_on = None
        self.current = task
        task.enter()
        task.context.switch()
        self.current = None
        if task.has_ended:
            if task in self.tasks:
                self.tasks.remove(task)
            if task.error is not None and not isinstance(task.error, Killed) and not task.is_host:
                raise task.error

    def _land_one(self) -> bool:
        """Let one store land that lands by itself. Returns whether there was one."""
        pending = [store for store in self.pool.pending if store.passes_caches]
        if not pending:
            return False
        place = {"oldest": 0, "newest": len(pending) - 1}.get(self.conditions.landing)
        store = pending[self.draws.randrange(len(pending)) if place is None else place]
        self.pool.land(store, self._half_of(store) if self.conditions.halves else None)
        return True

    def _half_of(self, store: Pending) -> np.ndarray | None:
        """The first or second half of a store's elements, or None for all that are left."""
        number = len(store.places)
        if number == 1 or number < len(store.operation.places):
            return None
        middle = number // 2
        return np.arange(middle) if self.draws.random() < 0.5 else np.arange(middle, number)

    def _pass_time(self) -> None:
        still = [task for task in self.tasks if self._stands_still(task)]
        others = [task for task in self.tasks if task not in still]
        sleeps = [self.stopped[task.rank] for task in still]
        sleeps += [task.wakes_at for task in others if task.wakes_at is not None]
        polls = any(task.has_polled for task in others)
        if polls:
            # a host may have written what a program looks for
            self.pool.absorb()
            if self._changes != self.pool.num_changes:
                return
        if not sleeps and not polls:
            raise Stuck("no task can go on, or some never end")
        step = self.now + self._step_secs
        self.now = min([*sleeps, step]) if polls else min(sleeps)
        self._step_secs *= 2
        self._wake_pollers(everybody=True)
