"""Interprets kernels as tasks of a scheduler, on weak memory."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import greenlet
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from ep_a2a.kernels import primitives
from ep_a2a.kernels.interpreter_operators import fast_operators
from ep_a2a.kernels.interpreter_types import cached_types
from ep_a2a.kernels.portable import PortableFunction, _without_overflow_checks
from tests.simulator.memory import Author, Pool, View
from tests.simulator.puts import Puts
from tests.simulator.scheduler import Scheduler, Task
from tests.simulator.trace import Operation

builder = interpreter.interpreter_builder
KERNELS = Path(primitives.__file__).parent
NO_KERNELS = ("portable.py", "target.py", "interpreter_operators.py")
SEM = interpreter._ir.MEM_SEMANTIC
RELEASES = (SEM.RELEASE, SEM.ACQUIRE_RELEASE)
ACQUIRES = (SEM.ACQUIRE, SEM.ACQUIRE_RELEASE)
SEM_NAMES = {sem: sem.name.lower() for sem in (SEM.RELAXED, SEM.ACQUIRE, SEM.RELEASE, SEM.ACQUIRE_RELEASE)}
SYSTEM = interpreter._ir.MEM_SYNC_SCOPE.SYSTEM


@functools.cache
def source_name(path: str) -> str:
    """The name of a file that may have kernels; "" for any other."""
    name = Path(path)
    return name.name if name.parent == KERNELS and name.name not in NO_KERNELS else ""


def site() -> str:
    """The place in the source of a kernel that is being interpreted, "file:line"."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if name := source_name(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class Grid:
    """A launch: its programs, and the launch before it on the rank's stream."""

    def __init__(self, rank: RankStream, num_programs: int, num_threads: int, previous: Grid | None) -> None:
        self.rank, self.num_programs, self.num_threads, self.previous = rank, num_programs, num_threads, previous
        self.programs: list[Program] = []
        # a launch for no local expert has none
        self.has_ended = num_programs == 0

    def program_ended(self, machine: Machine) -> None:
        """Count a program that has ended; with the last one, all stores of the launch have landed."""
        if all(program.has_ended for program in self.programs):
            machine.pool.land_all_of({program.author.number for program in self.programs})
            for program in self.programs:
                program.author.barrier()
                self.rank.view.join(program.author.view)
                self.rank.performed.join(program.author.view)
                self.rank.performed.join(program.author.posted)
            self.has_ended = True

    @property
    def lets_next_start(self) -> bool:
        """Whether a dependent launch may start beside it."""
        return self.has_ended or all(program.has_ended or program.allows_next for program in self.programs)


class RankStream:
    """What a rank has launched.

    Attributes:
        number: of the rank. view, performed: as of Author, what a new launch knows. last: its last launch.
        num_launches: by name of the kernel.
    """

    def __init__(self, number: int) -> None:
        self.number, self.view, self.performed = number, View(), View()
        self.last: Grid | None = None
        self.num_launches: collections.Counter[str] = collections.Counter()


class Program:
    """A program of a launch that is being interpreted."""

    def __init__(self, grid: Grid, index: int, author: Author) -> None:
        self.grid, self.index, self.author = grid, index, author
        self.allows_next = self.has_ended = False
        self.last_look: tuple[int, bytes] | None = None
        self.num_operations = 0
        self.looks: list[tuple[np.ndarray, np.ndarray]] | None = []

    def looked(self, places: np.ndarray, values: np.ndarray) -> None:
        """Keep what a volatile load has returned, until the program polls."""
        if self.looks is not None:
            self.looks.append((places, values))


class Machine:
    """All GPUs: launches, and what interpreted code does to memory.

    Args:
        pool, scheduler: of the simulation.
        weakened: sites whose ordering is taken away.

    Attributes:
        sites_seen: ordering sites that programs have come to. exchanged: what hosts have sent each other (nodes.py).
    """

    def __init__(self, pool: Pool, scheduler: Scheduler, weakened: frozenset[str] = frozenset()) -> None:
        self.pool, self.scheduler, self.weakened = pool, scheduler, weakened
        self.sites_seen: set[str] = set()
        self.exchanged: dict[Any, Any] = {}
        self._num_gpu_atomics = 0
        self._num_authors = 0

    @property
    def program(self) -> Program:
        """The program that runs."""
        found: Program = greenlet.getcurrent().program
        return found

    def new_author(self) -> int:
        """A number that no program or put has."""
        self._num_authors += 1
        return self._num_authors

    def launch(
        self,
        rank: RankStream,
        kernel: PortableFunction,
        num_programs: int,
        args: Any,
        constants: Any,
        num_threads: int = 128,
    ) -> Grid:
        """Start the programs of a launch behind the rank's last one, or beside it where it is dependent."""
        depends = bool(getattr(constants.get("FORM"), "DEPENDENT_LAUNCH", False))
        previous = rank.last
        if previous is not None:
            self.scheduler.wait(lambda: previous.lets_next_start if depends else previous.has_ended)
        self.pool.absorb()
        grid = rank.last = Grid(rank, num_programs, num_threads, previous)
        rank.num_launches[kernel.__name__] += 1
        named = inspect.getcallargs(kernel.python, *args, **constants)
        constexprs = interpreter.GridExecutor(kernel.python, kernel.arg_names, (1,)).constexprs
        values = {name: v if name in constexprs else interpreter._implicit_cvt(v) for name, v in named.items()}
        for index in range(num_programs):
            author = Author(self.new_author(), rank.number, rank.view.copy(), performed=rank.performed.copy())
            program = Program(grid, index, author)
            program.author.polled_at = self.pool.moment
            grid.programs.append(program)
            self._start(kernel, program, values)
        return grid

    def _start(self, kernel: PortableFunction, program: Program, values: dict[str, Any]) -> None:
        grid = program.grid

        def work() -> None:
            kernel.python(**values)
            program.has_ended = True
            grid.program_ended(self)

        def enter() -> None:
            builder.grid_dim, builder.grid_idx = (grid.num_programs, 1, 1), (program.index, 0, 0)

        call = grid.rank.num_launches[kernel.__name__]
        name = f"rank {grid.rank.number} {kernel.__name__.removesuffix('_kernel')}[{program.index}] of call {call}"
        task = Task(name, grid.rank.number, work, enter)
        task.context.program = program
        self.scheduler.start(task)

    # --- what stands in for the interpreter's operations ---

    def _is_weak(self, where: str, kind: str) -> bool:
        place = f"{where} {kind}"
        self.sites_seen.add(place)
        return place in self.weakened

    def masked_load(self, ptrs: Any, mask: Any, other: Any, *cache_and_volatile: Any) -> Any:
        """create_masked_load."""
        is_volatile = cache_and_volatile[-1]
        self.scheduler.point()
        if not self.pool.has(ptrs.data[mask.data]):
            return self.plain["create_masked_load"](builder, ptrs, mask, other, *cache_and_volatile)
        kind = ptrs.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        result = np.zeros(ptrs.data.shape, dtype) if other is None else other.data.astype(dtype).copy()
        where = site()
        is_strong = bool(is_volatile) and not self._is_weak(where, "volatile")
        chosen = mask.data
        addresses = ptrs.data[chosen]
        if is_volatile:
            self._yield_in_loop(addresses)
        operation = self.note("volatile load" if is_strong else "load", addresses, dtype.itemsize, where)
        raw = self.pool.load(self.program.author, operation, is_strong=is_strong)
        if is_volatile:
            self.program.looked(operation.bytes, raw)
        result[chosen] = np.ascontiguousarray(raw).view(dtype)[:, 0]
        return interpreter.TensorHandle(result, kind)

    def load(self, ptr: Any, *cache_and_volatile: Any) -> Any:
        """create_load."""
        mask = interpreter.TensorHandle(np.ones_like(ptr.data, dtype=bool), tl.int1)
        return self.masked_load(ptr, mask, None, *cache_and_volatile)

    def masked_store(self, ptrs: Any, value: Any, mask: Any, *cache: Any) -> Any:
        """create_masked_store."""
        self.scheduler.point()
        chosen = np.broadcast_to(mask.data, ptrs.data.shape)
        addresses = ptrs.data[chosen]
        if not self.pool.has(addresses):
            return self.plain["create_masked_store"](builder, ptrs, value, mask, *cache)
        values = np.broadcast_to(value.data, ptrs.data.shape)[chosen]
        self.program.num_operations += 1
        where = site()
        passes_caches = bool(cache) and str(cache[0]).lower().endswith("wt") and not self._is_weak(where, "wt")
        operation = self.note("store past caches" if passes_caches else "store", addresses, values.itemsize, where)
        self.pool.store(self.program.author, operation, values, passes_caches=passes_caches)
        return None

    def store(self, ptr: Any, value: Any, *cache: Any) -> Any:
        """create_store."""
        mask = interpreter.TensorHandle(np.ones_like(ptr.data, dtype=bool), tl.int1)
        return self.masked_store(ptr, value, mask, *cache)

    def atomic_rmw(self, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        """create_atomic_rmw."""
        return self._broadcast(self._atomic("create_atomic_rmw", (op, ptr, value, mask), ptr, mask.data, sem, scope))

    def atomic_cas(self, ptr: Any, compare: Any, value: Any, sem: Any, scope: Any) -> Any:
        """create_atomic_cas."""
        everywhere = np.ones_like(ptr.data, bool)
        return self._broadcast(self._atomic("create_atomic_cas", (ptr, compare, value), ptr, everywhere, sem, scope))

    def _broadcast(self, result: Any) -> Any:
        """The result of an atomic. That of a scalar goes to all threads through shared memory, behind a barrier."""
        if result.data.size == 1:
            self.program.author.barrier()
        return result

    def _atomic(self, name: str, args: tuple[Any, ...], ptr: Any, mask: Any, sem: Any, scope: Any) -> Any:
        self.scheduler.point()
        here = np.broadcast_to(mask, ptr.data.shape)
        chosen = ptr.data[here]
        if not self.pool.has(chosen):
            return self.plain[name](builder, *args, sem, scope)
        where = site()
        if sem != SEM.RELAXED and self._is_weak(where, "sem"):
            sem = SEM.RELAXED
        order = {"acquires": sem in ACQUIRES, "releases": sem in RELEASES}
        self.program.num_operations += 1
        # an atomic may see what has not landed
        self.program.looks = None
        author, size = self.program.author, ptr.get_element_ty().primitive_bitwidth // 8
        is_system = scope == SYSTEM and not self._is_weak(where, "scope")
        kind = f"{name.removeprefix('create_')} {SEM_NAMES[sem]} {'sys' if is_system else 'gpu'}"
        operation = self.note(kind, chosen, size, where)
        if is_system:

            def in_place() -> Any:
                return self.plain[name](builder, *args, sem, scope)

            result = self.pool.system_atomic(author, operation, in_place, **order)
        else:
            self._num_gpu_atomics += 1

            def elsewhere(addresses: np.ndarray) -> Any:
                moved = ptr.data.copy()
                moved[here] = addresses
                target = interpreter.TensorHandle(moved, ptr.dtype)
                return self.plain[name](builder, *[target if each is ptr else each for each in args], sem, scope)

            result = self.pool.gpu_atomic(author, operation, elsewhere, **order)
        operation.values = np.ascontiguousarray(result.data[here]).view(np.uint8).reshape(-1, size)
        return result

    def _reduce(self, tile: Any, axis: Any, combine: Any, **options: Any) -> Any:
        """reduce. Over as many lanes as there are threads it is a barrier for the loads before it."""
        program = getattr(greenlet.getcurrent(), "program", None)
        lanes = (tile[0] if isinstance(tile, tuple) else tile).handle.data.size
        if program is not None and lanes >= program.grid.num_threads:
            program.author.turn += 1
        return self.plain["reduce"](tile, axis, combine, **options)

    def _yield_in_loop(self, addresses: np.ndarray) -> None:
        """Let others go on where a line looks at the same words again, with nothing else in between."""
        look = self.program.num_operations, site(), addresses.tobytes()
        if self.program.last_look == look:
            self._poll()
        self.program.last_look = look

    def _poll(self) -> None:
        """A program has looked in vain: it looks again when what its volatile loads have returned has changed."""
        looks, self.program.looks = self.program.looks, []
        self.program.author.polled_at, self.program.author.has_looked = self.pool.moment, False
        num_gpu_atomics = self._num_gpu_atomics

        def sees_change() -> bool:
            # what an atomic of gpu scope writes is seen before it lands
            is_changed = looks is None or num_gpu_atomics != self._num_gpu_atomics
            return is_changed or any((self.pool.landed[places] != seen).any() for places, seen in looks or ())

        self.scheduler.poll(sees_change)

    def note(self, name: str, addresses: np.ndarray, size: int, where: str) -> Operation:
        """Add an access of elements of that size to the trace."""
        task = self.scheduler.current
        assert task is not None
        places = addresses.astype(np.int64) - self.pool.address
        return self.pool.trace.add(self.program.author.rank, task.name, name, where, places, size)

    def barrier(self) -> None:
        """create_barrier."""
        self.scheduler.point()
        if not self._is_weak(site(), "barrier"):
            self.program.author.barrier()

    # --- what stands in for functions of primitives ---

    def clock_ns(self) -> int:
        """A program's clock."""
        return int(self.scheduler.now * 1e9)

    def pause(self, _pause_ns: object) -> None:
        """A program has polled in vain. The look behind a pause is no second poll."""
        self._poll()
        self.program.last_look = None

    def after_previous_launch(self) -> None:
        """A program waits for the end of the launch before its own."""
        grid = self.program.grid
        if grid.previous is None or self._is_weak(site(), "wait"):
            return
        previous = grid.previous
        self.scheduler.wait(lambda: previous.has_ended)
        self.program.author.view.join(grid.rank.view)
        self.program.author.performed.join(grid.rank.performed)
        self.program.author.polled_at = self.pool.moment

    def allow_next_launch(self) -> None:
        """A program lets the next launch start, and goes on when nobody else can."""
        self.program.allows_next = True
        self.scheduler.poll(lambda: False)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The interpreter with these operations in the place of its own."""
        operations = {
            "create_load": self.load,
            "create_store": self.store,
            "create_masked_load": self.masked_load,
            "create_masked_store": self.masked_store,
            "create_atomic_cas": self.atomic_cas,
            "create_atomic_rmw": self.atomic_rmw,
            "create_barrier": self.barrier,
            "get_cache_policy": lambda modifier, _: modifier,
        }
        names = "clock_ns", "pause", "after_previous_launch", "allow_next_launch"
        twins: dict[PortableFunction, Callable[..., Any]] = {
            getattr(primitives, name): getattr(self, name) for name in names
        } | Puts(self, site).twins
        self.plain = {name: getattr(type(builder), name) for name in operations}
        patches = interpreter._patch_lang(primitives.pause.fn)
        tl.tensor.__index__ = lambda tensor: int(tensor.handle.data.item())
        self.plain["reduce"], tl.reduce = tl.reduce, self._reduce
        kept = {function: function.python for function in twins}
        try:
            for name, operation in operations.items():
                setattr(builder, name, operation)
            for function, twin in twins.items():
                function.__dict__["python"] = twin
            with _without_overflow_checks(), cached_types(), fast_operators():
                yield
        finally:
            for function, plain in kept.items():
                function.__dict__["python"] = plain
            for name in operations:
                delattr(builder, name)
            patches.restore()
