"""Ranks of the product in one process: host code and kernels as they are, on a simulated store, clock and GPU."""

import contextlib
import math
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a import clock
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.memory import arena, host_shm, node_memory, peers
from ep_a2a.memory import rendezvous as rendezvous_module
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.symmetric import SymmetricMemory
from ep_a2a.ops import op_kernels
from ep_a2a.ops.memory import BoundMemory
from tests.cases import op_cases
from tests.simulator.interpreter import Machine, RankStream
from tests.simulator.memory import Pool, View
from tests.simulator.nodes import HostExchange
from tests.simulator.scheduler import Conditions, Scheduler, Task
from tests.simulator.store import Store

POOL_BYTES = 1 << 24
PLAIN = Conditions()


class Group:
    """Stands in for a process group."""

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank, self.size, self.store = rank, size, store


@dataclass
class Context:
    """What a rank's body gets.

    Attributes:
        rank, group, device: as from RankPool.
        machine, stream: of the simulation, and the rank's stream of it.
    """

    rank: int
    group: Any
    device: torch.device
    machine: Machine
    stream: RankStream

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        size: int = self.group.size
        return size

    def synchronize(self) -> None:
        """Wait for the end of all that this rank has launched."""
        self.machine.scheduler.wait(lambda: self.stream.last is None or self.stream.last.has_ended)


class Record:
    """Stands in for HostRecord.

    Args:
        rank: whose it is. scheduler: of the simulation.
        lines, left: of all ranks of a host: the lines that they have appended, and who has closed its record.
    """

    def __init__(self, rank: int, scheduler: Scheduler, lines: list[dict[str, Any]], left: set[int]) -> None:
        self._rank, self._scheduler, self._num_read = rank, scheduler, 0
        self.lines, self.left = lines, left

    def has_ended(self, rank: int) -> bool:
        return rank in self._scheduler.dead or rank in self.left

    def waits(self, _: int) -> bool:
        return False

    def is_stopped(self, rank: int) -> bool:
        return self._scheduler.now < self._scheduler.stopped.get(rank, 0.0)

    def computes(self, _: int) -> bool:
        return False

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def append(self, line: dict[str, Any]) -> None:
        self._scheduler.host_point()
        self.lines.append(line)

    def new_lines(self) -> list[dict[str, Any]]:
        found, self._num_read = self.lines[self._num_read :], len(self.lines)
        return found

    def unlink(self) -> None:
        pass

    def close(self) -> None:
        self.left.add(self._rank)


@dataclass
class Outcome:
    """How a simulation has ended.

    Attributes:
        machine: with all that has happened. results, errors: by rank; Killed is the error of a rank that has died.
    """

    machine: Machine
    results: list[Any]
    errors: list[BaseException | None]


class Simulation:
    """A machine with one GPU per rank, and what stands in for the product's ways to the world."""

    def __init__(self, world_size: int, conditions: Conditions) -> None:
        self.conditions = conditions
        draws = random.Random(conditions.seed)
        self.pool = Pool(POOL_BYTES, draws, conditions.staleness, conditions.fresh_looks)
        self.scheduler = Scheduler(draws, self.pool, conditions)
        self.machine = Machine(self.pool, self.scheduler, conditions.weakened)
        self.streams = [RankStream(rank) for rank in range(world_size)]
        self.hosts = conditions.hosts or (0,) * world_size
        self._lines: dict[int, list[dict[str, Any]]] = {host: [] for host in self.hosts}
        self._left: set[int] = set()
        self._meetings: dict[str, list[View]] = {}
        self._contexts: list[Context] = []

    def run(self, body: Callable[..., Any], *args: Any) -> Outcome:
        """Run body(context, *args) on every rank."""
        store, hosts = Store(self.scheduler, self.conditions.store_holder), []
        for stream in self.streams:
            group = Group(stream.number, len(self.streams), store)
            context = Context(stream.number, group, torch.device("cpu"), self.machine, stream)
            self._contexts.append(context)

            def work(context: Context = context) -> Any:
                return body(context, *args)

            hosts.append(self.scheduler.start(Task(f"rank {stream.number} host", stream.number, work, is_host=True)))
        with self._product_patched(), self.machine.installed():
            try:
                self.scheduler.run(self.conditions.limit_secs)
            finally:
                self.scheduler.end_all()
        return Outcome(self.machine, [host.result for host in hosts], [host.error for host in hosts])

    @contextlib.contextmanager
    def _product_patched(self) -> Iterator[None]:
        plain_exchange = Rendezvous.exchange
        make_kernels, bind = op_kernels.OpKernels.__init__, BoundMemory.__init__

        def exchange(rendezvous: Rendezvous, label: str, message: Any) -> list[Any]:
            # whoever has met knows what the others have done before
            stream = self.streams[self.current_rank]
            came = self._meetings.setdefault(rendezvous.last_meeting, [])
            came.append(stream.view.copy())
            answers = plain_exchange(rendezvous, label, message)
            for each in came:
                stream.view.join(each)
                stream.performed.join(each)
            return answers

        def gpu_kernels(kernels: Any, *args: Any) -> None:
            make_kernels(kernels, *args)
            kernels.interpreted, kernels.num_sms, kernels.can_depend = False, self.conditions.num_sms, True

        def bind_and_name(memory: BoundMemory, config: Any, *args: Any) -> None:
            bind(memory, config, *args)
            for block, tensor, _ in memory._blocks:
                for each in block.fields:
                    if math.prod(each.shape):
                        place = tensor.data_ptr() - self.pool.address + each.offset_bytes
                        self.pool.trace.names[place] = f"{each.region.name} of rank {config.rank}"

        with contextlib.ExitStack() as stack:
            for owner, name, new in (
                (arena, "allocate_symmetric", self._allocate),
                (node_memory, "allocate_symmetric", self._allocate),
                (node_memory, "make_subgroup", subgroup),
                (op_cases, "NodeAllToAll", lambda _, grid, __: HostExchange(self._contexts[self.current_rank], grid)),
                (node_memory, "destroy_subgroup", lambda _: None),
                (arena, "zeros_outside_pools", lambda num_bytes, _: torch.from_numpy(self.pool.take(num_bytes))),
                (BoundMemory, "__init__", bind_and_name),
                (CompiledKernel, "run", lambda kernel, *args: self._launch(kernel, *args)),
                (CompiledKernel, "is_compiled", property(lambda _: True)),
                (op_kernels.OpKernels, "__init__", gpu_kernels),
                (Rendezvous, "exchange", exchange),
                (clock, "now", lambda: self.scheduler.now),
                (clock, "sleep", self.scheduler.sleep),
                (peers, "_start", self._repeat),
                (peers, "_peers", weakref.WeakKeyDictionary()),
                (peers, "_leave", lambda stopping, _, record: (stopping.set(), record.close())),
                (peers, "begun", at_once),
                (rendezvous_module, "begun", at_once),
                # a meeting that waits to its bound takes fewer operations
                (rendezvous_module, "POLL_SECS_PER_RANK", rendezvous_module.LONGEST_POLL_SECS),
                (peers.HostRecord, "join", lambda _store, rank, _size: self._record(rank)),
                (distributed_c10d, "PrefixStore", below),
                (dist, "get_rank", of_group(dist.get_rank, "rank")),
                (dist, "get_world_size", of_group(dist.get_world_size, "size")),
                (
                    distributed_c10d,
                    "_get_process_group_store",
                    of_group(distributed_c10d._get_process_group_store, "store"),
                ),
            ):
                stack.enter_context(mock.patch.object(owner, name, new))
            try:
                yield
            finally:
                # their records lead back to them by the scheduler, so that nothing of this run would ever be freed
                for each in list(peers._peers.values()):
                    each._finalizer.detach()

    def _record(self, rank: int) -> Record:
        return Record(rank, self.scheduler, self._lines[self.hosts[rank]], self._left)

    def _allocate(self, rendezvous: Rendezvous, _: torch.device, num_bytes: int) -> SymmetricMemory:
        local = torch.from_numpy(self.pool.take(num_bytes))
        addresses = rendezvous.exchange("addresses", local.data_ptr())
        memory = SymmetricMemory(local, tuple(addresses), "simulated", lambda: None)
        # puts find the place at another rank there
        host_shm._living.add(memory)
        return memory

    def _launch(self, kernel: CompiledKernel, num_programs: int, values: tuple[Any, ...], _: torch.device) -> None:
        stream = self.streams[self.current_rank]
        grid = self.machine.launch(
            stream, kernel.kernel, num_programs, kernel.as_read(values), kernel.constants, 32 * kernel.num_warps
        )
        if not self.conditions.asynchronous:
            self.scheduler.wait(lambda: grid.lets_next_start if self.conditions.dependent else grid.has_ended)

    def _repeat(self, held: Any, stopping: Any, name: str, secs: float, work: Callable[[Any], bool]) -> None:
        def repeat() -> None:
            while not stopping.is_set() and work(held):
                self.scheduler.sleep(secs)

        rank = self.current_rank
        self.scheduler.start(Task(f"rank {rank} {name}", rank, repeat, is_daemon=True))

    @property
    def current_rank(self) -> int:
        """The rank whose task runs. A group of some ranks counts otherwise."""
        assert self.scheduler.current is not None
        return self.scheduler.current.rank


def at_once(work: Callable[[], Any]) -> Future[Any]:
    """Stands in for peers.begun: no answer takes long."""
    found: Future[Any] = Future()
    try:
        found.set_result(work())
    except Exception as error:  # noqa: BLE001 - raised where the result is taken
        found.set_exception(error)
    return found


def subgroup(group: Group, ranks: Sequence[int]) -> Group:
    """Stands in for subgroups.make_subgroup."""
    return Group(ranks.index(group.rank), len(ranks), group.store.below(f"ranks {ranks}"))


def below(prefix: str, store: Any, plain_store: Any = dist.PrefixStore) -> Any:
    """Stands in for PrefixStore. A rank alone has a store of torch's."""
    return store.below(prefix) if isinstance(store, Store) else plain_store(prefix, store)


def of_group(plain_function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of torch's process groups that also takes a Group, of which it returns an attribute."""

    def found(group: Any = None) -> Any:
        return getattr(group, name) if isinstance(group, Group) else plain_function(group)

    return found


def simulate(world_size: int, body: Callable[..., Any], *args: Any, conditions: Conditions = PLAIN) -> Outcome:
    """Run body(context, *args) on every rank of a machine."""
    return Simulation(world_size, conditions).run(body, *args)
