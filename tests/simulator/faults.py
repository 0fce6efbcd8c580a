"""Ranks that die or stand still at any operation of their whole life, and what the others must hear of it."""

import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory.arena import CLOSE_PATIENCE_SECS
from tests.cases.fault_cases import settled_step
from tests.cases.op_cases import Case, arena_of, make_op
from tests.cases.op_checks import raised
from tests.simulator.cases import CASES
from tests.simulator.explain import describe
from tests.simulator.ranks import Conditions, Context, Simulation
from tests.simulator.scheduler import Fault, Killed

JOINED = 4
"""Operation from which on others know that a rank was there."""
BOUND_SECS = 20.0
EXCHANGE_SECS = 2 * BOUND_SECS
"""Of the exchange between nodes that ends a combine."""
ON_HOST_SECS, BETWEEN_HOSTS_SECS = 2.0, 3.0
"""From a death to the error of whoever waits, as docs/reliability.md promises."""
POLLING_SECS = 8.0
"""What the simulated clock may add: the polls between two looks for poison last up to 0.2 s each there."""
SURE_SECS = 0.5
"""Whoever has died so long before the first error must be named in it."""
SHORT_STOP_SECS, LONG_STOP_SECS = BOUND_SECS / 2, 3 * BOUND_SECS
THREE = {"world_size": 3, "num_experts": 6, "num_steps": 2}
PATHS = {
    "low_latency": replace(CASES["low_latency"], **THREE),
    "low_latency_compact": replace(CASES["low_latency_compact"], **THREE),
    "bulk": replace(CASES["bulk"], **THREE),
    "bulk_compact": replace(CASES["bulk_compact"], **THREE),
    "bulk_of_four": replace(CASES["bulk"], world_size=4, num_experts=8, num_steps=2),
    "expert_major": replace(CASES["expert_major"], **THREE),
    "rings": replace(CASES["rings"], num_steps=1),
    "rings_of_a_step": replace(CASES["rings_of_a_step"], num_steps=1),
    "rings_by_puts": replace(CASES["rings_by_puts"], num_steps=1),
    "staged": replace(CASES["staged"], num_steps=1),
    "rings_of_three_nodes": replace(CASES["rings"], **THREE, num_nodes=3),
}


@dataclass(frozen=True)
class Run:
    """A path of the rows, and what happens to its ranks.

    Attributes:
        path: one of PATHS. conditions: with the faults. apart: whether each virtual node is a host.
    """

    path: str
    conditions: Conditions
    apart: bool = False

    @property
    def case(self) -> Case:
        """The op of the run."""
        return PATHS[self.path]


@dataclass
class Life:
    """What has become of a rank.

    Attributes:
        phase: the last one that it has come to. first_operations: by phase, the number of its first operation.
        error: the first one of a wait. told_at: when it came.
        went_on: whether the op was reset and right again after an error.
        in_reset: the error of this reset, during which another rank may die.
        closed_at: when op and arena were closed. close_secs: how long that took.
    """

    phase: str = ""
    first_operations: dict[str, int] = field(default_factory=dict)
    error: RankTimeoutError | None = None
    told_at: float = 0.0
    went_on: bool = False
    in_reset: RankTimeoutError | None = None
    closed_at: float = 0.0
    close_secs: float = 0.0

    @property
    def named(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(missing, late) of the error."""
        return None if self.error is None else (self.error.missing_ranks, self.error.late_ranks)


def live(context: Context, case: Case, lives: list[Life]) -> None:
    """Build an op, take its steps, reset and close it. After an error: reset it where all live, then close it."""
    life, scheduler = lives[context.rank], context.machine.scheduler

    def phases() -> Iterator[str]:
        yield "build"
        arena = arena_of(context, case)
        made.append(arena)
        op = make_op(context, case, arena)
        made.append(op)
        op.set_timeout(BOUND_SECS)
        yield "steps"
        for number in range(case.num_steps):
            settled_step(case, op, number)
        yield "reset"
        op.reset()
        settled_step(case, op, case.num_steps)
        yield "close"

    made: list[Any] = []
    try:
        for phase in phases():
            life.phase = phase
            life.first_operations[phase] = scheduler.num_operations[context.rank] + 1
    except RankTimeoutError as error:
        life.error, life.told_at = error, scheduler.now
        go_on(context, case, made, life)
    begin = scheduler.now
    for each in reversed(made):
        each.close()
    life.closed_at, life.close_secs = scheduler.now, scheduler.now - begin


def go_on(context: Context, case: Case, made: list[Any], life: Life) -> None:
    """After an error: an op that has failed stays so, and reset makes it usable where nobody has died."""
    assert life.error is not None
    if life.phase == "steps":
        _, op = made
        for again in (op.check, lambda: settled_step(case, op, case.num_steps)):
            error = raised(RankTimeoutError, again)
            assert isinstance(error, RankTimeoutError)
            assert (error.missing_ranks, error.late_ranks) == life.named
    if life.error.late_ranks:
        # whoever had all that it needed has no error, and comes to this reset, too
        _, op = made
        try:
            op.reset()
            settled_step(case, op, case.num_steps)
            life.went_on = True
        except RankTimeoutError as error:
            life.in_reset = error


def simulation_of(world_size: int, conditions: Conditions) -> Simulation:
    """A machine whose steps may fail: a load whose value a failed step does not use may be overtaken by a store."""
    simulation = Simulation(world_size, conditions)
    simulation.pool.reads.check_store = lambda *_: None  # type: ignore[method-assign]
    return simulation


def simulated(run: Run) -> tuple[Simulation, list[Life], list[BaseException | None]]:
    """The lives of its ranks, and the errors that are none of a wait."""
    case = run.case
    per_node = case.world_size // case.num_nodes
    hosts = tuple(rank // per_node for rank in range(case.world_size)) if run.apart else ()
    simulation = simulation_of(case.world_size, replace(run.conditions, hosts=hosts))
    lives = [Life() for _ in range(case.world_size)]
    outcome = simulation.run(live, case, lives)
    return simulation, lives, [None if isinstance(each, Killed) else each for each in outcome.errors]


@functools.cache
def whole_lives(path: str) -> list[tuple[int, dict[str, int]]]:
    """By rank where nothing happens: its number of operations, and that of the first one of each phase."""
    simulation, lives, errors = simulated(Run(path, Conditions(num_sms=4)))
    assert errors == [None] * len(lives), errors
    assert all(life.error is None for life in lives), [life.error for life in lives]
    return [(simulation.scheduler.num_operations[rank], life.first_operations) for rank, life in enumerate(lives)]


def draw(seed: int) -> Run:
    """The run of a seed: one to three ranks die or stand still, at any operation after they have joined."""
    draws = random.Random(seed)
    path = list(PATHS)[seed % len(PATHS)]
    world_size = PATHS[path].world_size
    num_faults = draws.choice((1, 1, 1, 2, min(3, world_size - 1)))
    faults = []
    for rank in draws.sample(range(world_size), num_faults):
        num_operations, first = whole_lives(path)[rank]
        begin = draws.choice((JOINED, JOINED, first["steps"], first["steps"], first["steps"], first["reset"]))
        secs = draws.choice((None, None, None, SHORT_STOP_SECS, LONG_STOP_SECS)) if num_faults < 3 else None
        faults.append(Fault(rank, draws.randint(begin, num_operations), secs))
    conditions = Conditions(
        seed=seed,
        switches=draws.choice((0.0, 0.02)),
        host_switches=draws.choice((0.0, 0.2)),
        num_sms=4,
        faults=tuple(faults),
    )
    return Run(path, conditions, apart=PATHS[path].num_nodes > 1 and draws.random() < 0.5)


class Judge:
    """What was wrong with whom survivors named, and when.

    Args:
        run: what was tried. struck: when the faults came, by rank. lives: of all ranks.
    """

    def __init__(self, run: Run, struck: dict[int, float], lives: list[Life]) -> None:
        self.run, self.struck, self.lives = run, struck, lives
        kinds = {fault.rank: fault.secs for fault in run.conditions.faults if fault.rank in struck}
        self.died = {rank for rank, secs in kinds.items() if secs is None}
        self.stopped = set(kinds) - self.died
        self.unharmed = [rank for rank in range(len(lives)) if rank not in kinds]
        self.first_error = min((life.told_at for life in lives if life.error), default=0.0)

    def problems(self) -> list[str]:
        """All that was wrong, nothing as a rule."""
        return [*self._disagreements(), *self._wrong_names(), *self._late_errors(), *self._silences()]

    def _disagreements(self) -> Iterator[str]:
        # hosts agree on who is gone, and need not on who is late; a rank to which all has come has no error
        told = {rank: life.named for rank, life in enumerate(self.lives) if life.named and rank not in self.died}
        compared = [named[0] if self.run.apart else named for rank, named in told.items() if rank in self.unharmed]
        if not self.run.apart and not self.died:
            compared += [told[rank] for rank in self.stopped & told.keys()]
        if len(set(compared)) > 1:
            yield f"ranks disagree: {told}"

    def _wrong_names(self) -> Iterator[str]:
        sure = {rank for rank in self.died if self.struck[rank] < self.first_error - SURE_SECS}
        may_be_missing = self.died | (self.stopped if self.run.apart else set())
        for rank in self.unharmed:
            if (named := self.lives[rank].named) is None:
                continue
            missing, late = set(named[0]), set(named[1])
            right = sure <= missing <= may_be_missing and not late
            if not (right if missing or sure else late and late <= self.stopped):
                yield f"rank {rank} named {named}, {sure} of {self.died} were gone: {self.lives[rank].error}"

    def _most_secs(self, life: Life) -> float:
        """From the last death to the error of a rank."""
        awaited = re.search(r"partners within .*none of \[(.*?)\]", str(life.error))
        if awaited and not self.died & {int(rank) for rank in awaited[1].split(",")}:
            # its partner lives and has given up, which an exchange between nodes does not see (docs/reliability.md)
            return EXCHANGE_SECS + POLLING_SECS
        if not self.run.apart:
            return ON_HOST_SECS + POLLING_SECS
        per_node = len(self.lives) // self.run.case.num_nodes
        with_survivors = {rank // per_node for rank in self.unharmed}
        is_silent = any(rank // per_node not in with_survivors for rank in self.died)
        return BETWEEN_HOSTS_SECS + POLLING_SECS + (BOUND_SECS if is_silent else 0.0)

    def _late_errors(self) -> Iterator[str]:
        for rank in self.unharmed:
            life = self.lives[rank]
            if life.error and not self.stopped:
                last = max(self.struck[each] for each in self.died if self.struck[each] < life.told_at)
                if life.told_at > last + self._most_secs(life):
                    yield f"rank {rank} was told {life.told_at - last:.2f} s after the last death"
            if life.close_secs > CLOSE_PATIENCE_SECS + 1.1:
                yield f"rank {rank} closed for {life.close_secs:.2f} s"
            if life.phase == "steps" and life.named and life.named[0] and life.close_secs > 0:
                yield f"rank {rank} waited {life.close_secs:.2f} s to close a failed op"

    def _silences(self) -> Iterator[str]:
        # who dies in the last meeting may have come to it
        must_hear = any(self.lives[rank].phase in ("build", "steps") for rank in self.died)
        for rank in self.unharmed:
            life = self.lives[rank]
            if must_hear and life.error is None:
                yield f"rank {rank} heard of no death"
            if life.error and self._only_short_stops():
                yield f"rank {rank} did not wait for a short stop: {life.error}"
            another_died = life.in_reset and life.in_reset.missing_ranks and self.died >= {*life.in_reset.missing_ranks}
            if not life.closed_at or (life.named and life.named[1] and not life.went_on and not another_died):
                yield f"rank {rank} did not come to the end: {life.in_reset}"

    def _only_short_stops(self) -> bool:
        return len(self.struck) == 1 and all(fault.secs == SHORT_STOP_SECS for fault in self.run.conditions.faults)


def problems_of(run: Run) -> list[str]:
    """Run it; what was wrong, and the last operations of each rank, nothing as a rule."""
    simulation, lives, errors = simulated(run)
    found = [f"rank {rank}: {type(each).__name__}: {each}" for rank, each in enumerate(errors) if each]
    found += Judge(run, simulation.scheduler.struck, lives).problems()
    return [*found, str(run), describe(simulation)] if found else []
