"""Ranks die in a step, and others notice it at any look of a kernel: they go on, and every token is right.

What a rank has stored at others is all that they know of when it died. So for two ranks these are all orders, in a
schedule of the programs: each store of the dying rank as its last one, and each look of the other rank, when a program
begins or waits, as the first that sees the mask. For three and four ranks deaths, looks, schedules, which stores land
first, whole or by halves, and how old loads may be, are drawn.
"""

import functools
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from ep_a2a import clock
from ep_a2a.compat.combine_time_weights import CombineTimeWeightsOp
from ep_a2a.kernels import primitives
from ep_a2a.memory.arena import Arena
from tests.cases.mask_cases import POINTS, op_of, take_step
from tests.simulator.explain import describe
from tests.simulator.faults import POLLING_SECS, simulation_of
from tests.simulator.interpreter import site
from tests.simulator.ranks import Conditions, Context, Record
from tests.simulator.scheduler import Fault, Killed
from tests.simulator.seeds import FIRST_SEED, seeds

NUM_STEPS, LOST_IN = 3, 1
PATHS: dict[str, dict[str, Any]] = {
    "low_latency": {},
    "bulk": {"flagged_max_tokens": 0},
    "counters": {"flagged_max_tokens": 0, "max_sms": 4},
    "expert_major": {"layout": "expert_major"},
    "late_weights": {"layout": "expert_major", "kind": CombineTimeWeightsOp},
}
SLOW_PATHS = [path for path in PATHS if path != "counters"]
VICTIM = 1
LANDINGS = ("newest", "oldest", "random")
MASK_AFTER_SECS, DELAY_SECS = 20.0, 40.0
LATEST_SECS = 1.0
"""From a death on, after which any look notices it: waits end."""
MOST_LOOKS, NUM_SEEDS, NUM_QUICK_SEEDS = 16, 10, 1
PARTS = 8
DRAWN_PARTS = sorted({seed % PARTS for seed in seeds(1)})
"""A part takes a minute and more; `make seeds` runs all."""


class Run:
    """A simulation in which ranks notice deaths at chosen looks. All survivors must be right.

    Args:
        path: one of PATHS. looks: by rank, at how many places in programs it looks in vain behind a death.

    Attributes:
        noticed: ranks that have come to their look. begins: of each rank, operations before each step.
        posts: of VICTIM, the operations that store at other ranks.
    """

    def __init__(self, world_size: int, path: str, looks: tuple[int, ...], **conditions: Any) -> None:
        self.looks, self.noticed, self.posts = looks, set[int](), list[int]()
        self.begins: list[list[int]] = [[] for _ in range(world_size)]
        self._tell: dict[int, Any] = {}
        self._masked: list[set[int]] = [set() for _ in range(world_size)]
        self._places: list[set[Any]] = [set() for _ in range(world_size)]
        self._simulation = simulation = simulation_of(world_size, Conditions(**conditions))
        with self._watched():
            found = simulation.run(self._live, PATHS[path])
        dead = simulation.scheduler.dead & set(simulation.scheduler.struck)
        errors = {rank: error for rank, error in enumerate(found.errors) if error and not isinstance(error, Killed)}
        assert not errors, f"{errors}\n{looks} {conditions}\n{describe(simulation)}"
        for rank in {*range(world_size)} - dead:
            assert {*found.results[rank]} >= {*range(world_size)} - dead, (looks, conditions)

    def _live(self, context: Context, changes: dict[str, Any]) -> tuple[int, ...]:
        with Arena(context.group, context.device) as arena:
            op = op_of(context, arena, **changes)
            # looks alone tell
            self._tell[context.rank], arena.lose = arena.lose, lambda *_: None  # type: ignore[method-assign]
            for number in range(NUM_STEPS):
                self.begins[context.rank].append(context.machine.scheduler.num_operations[context.rank])
                take_step(op, number)
            return op.active_ranks()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        machine, scheduler = self._simulation.machine, self._simulation.scheduler
        note = machine.note

        def note_posts(*access: Any) -> Any:
            operation = note(*access)
            if operation.rank == VICTIM and "load" not in operation.name:
                owners = {machine.pool.trace.name_of(place).split(" word")[0] for place in operation.places.tolist()}
                if any(not owner.endswith(f"rank {VICTIM}") for owner in owners):
                    self.posts.append(scheduler.num_operations[VICTIM])
            return operation

        def looking(function: Any) -> Any:
            python = function.python

            def look(*args: Any) -> Any:
                self._look(site())
                return python(*args)

            return mock.patch.dict(function.__dict__, python=look)

        with (
            mock.patch.object(machine, "note", note_posts),
            looking(primitives.load_poison),
            looking(primitives.masked_now),
        ):
            yield

    def _look(self, where: str) -> None:
        machine, scheduler = self._simulation.machine, self._simulation.scheduler
        rank = machine.program.grid.rank.number
        news = scheduler.dead - self._masked[rank]
        if not news:
            return
        places = self._places[rank]
        places.add((machine.program.author.number, where))
        is_due = len(places) > self.looks[rank]
        if is_due or scheduler.now > max(scheduler.struck[each] for each in news) + LATEST_SECS:
            self.noticed |= {rank} if is_due else set()
            self._masked[rank] |= news
            places.clear()
            self._tell[rank]((), news)
            machine.pool.absorb()


@functools.cache
def deaths(path: str) -> list[int]:
    """Operations of VICTIM at which it dies: before its first store at the other rank in a step, and behind each."""
    run = Run(2, path, (0, 0))
    begin, end = run.begins[VICTIM][LOST_IN : LOST_IN + 2]
    return [begin + 1, *(post + 1 for post in run.posts if begin < post <= end)]


@pytest.mark.parametrize("part", ["quick", *(pytest.param(part, marks=pytest.mark.full) for part in DRAWN_PARTS)])
@pytest.mark.parametrize("path", PATHS)
def test_a_survivor_notices_a_death_at_any_look(path: str, part: int | str) -> None:
    """Every PARTS-th death; the quick part takes one look of each."""
    is_quick = part == "quick"
    for turn, operation in enumerate(deaths(path)[0 if is_quick else int(part) :: PARTS]):
        for look in (turn,) if is_quick else itertools.count(0):
            # half of a row may be all that a rank sends
            weak = {"landing": LANDINGS[(turn + look) % len(LANDINGS)], "halves": bool((turn + look) % 2)}
            run = Run(2, path, (look, 0), faults=(Fault(VICTIM, operation),), **weak)
            if not run.noticed:
                # the mask came before this look: in a wait that would not end, or not at all
                break


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(each, marks=[pytest.mark.full] * (each >= FIRST_SEED + NUM_QUICK_SEEDS))
        for each in seeds(NUM_SEEDS)
    ],
)
@pytest.mark.parametrize("world_size", [3, 4])
def test_survivors_notice_deaths_in_any_order(world_size: int, seed: int) -> None:
    draws = random.Random(seed)
    path = list(PATHS)[seed % len(PATHS)]
    schedule = {"seed": seed, "switches": draws.choice((0.0, 0.02)), "landing": draws.choice(LANDINGS)}
    schedule |= {"halves": draws.choice((False, True)), "staleness": draws.choice((1.0, 0.5))}
    looks = tuple(draws.randrange(MOST_LOOKS) for _ in range(world_size))
    begins = Run(world_size, path, looks, **schedule).begins
    victims = draws.sample(range(world_size), draws.randint(1, world_size - 2))
    faults = tuple(Fault(rank, draws.randint(*begins[rank][LOST_IN : LOST_IN + 2])) for rank in victims)
    Run(world_size, path, looks, faults=faults, **schedule)


@pytest.mark.parametrize("point", [POINTS[0], pytest.param(POINTS[2], marks=pytest.mark.full)])
@pytest.mark.parametrize("path", ["counters", *(pytest.param(each, marks=pytest.mark.full) for each in SLOW_PATHS)])
def test_a_rank_that_hangs_is_masked_in_time_beside_one_that_is_slow(path: str, point: str) -> None:
    """Rank 1 computes for longer than mask_after_secs, which spares it; rank 2 hangs."""
    masked_after: list[float] = []

    def live(context: Context) -> None:
        with Arena(context.group, context.device) as arena:
            op = op_of(context, arena, mask_after_secs=MASK_AFTER_SECS, timeout_secs=200, **PATHS[path])
            for number in range(NUM_STEPS - 1):
                take_step(op, number)
            hung_at, lose = clock.now(), arena.lose

            def note(gone: tuple[int, ...], masked: set[int]) -> None:
                assert masked == {2}
                masked_after.append(clock.now() - hung_at)
                lose(gone, masked)

            arena.lose = note  # type: ignore[method-assign]
            take_step(op, NUM_STEPS - 1, lambda at: clock.sleep(DELAY_SECS * context.rank * (at == point)))

    with mock.patch.object(Record, "computes", lambda _, rank: rank == 1):
        found = simulation_of(3, Conditions()).run(live)
    assert found.errors[:2] == [None] * 2
    assert len(masked_after) == 3
    assert max(masked_after) < MASK_AFTER_SECS + 1 + POLLING_SECS
