"""Ranks that share memory, small enough to look at every order in which they can act.

A rank makes steps, a step is a list of launches, a launch is a list of programs that run at the same time, and a
program is a list of actions. An action is atomic. It looks at memory and either cannot be taken yet (it waits) or is
taken: it may change the rank's own words at once, and hand over stores.

Stores are weak: a store lies in its rank's buffer until it drains, and stores to different words drain in any order. So
a plain store may be seen after everything that its rank does later, at every reader at another time. A fence is an
action that waits until stores have drained; a release is a fence and then a store. Loads see memory as it is when the
action is taken, so every wait acquires. A launch ends when its programs have ended and, if `launches_drain`, when its
stores have drained.

Every action is taken once, so runs are finite: a protocol that can hang has a state in which nothing can be done.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

DEADLOCK = "deadlock"
OVERWRITTEN = "unread data is overwritten"
STALE_READ = "stale read"

EARLIER = -1
"""Program number of stores that an earlier launch has left in the buffer."""


class Violation(Exception):
    """What must not happen has happened."""


class Store(NamedTuple):
    """A store that has not drained.

    Attributes:
        word: where to. value: what.
        program: who stored it, for fences.
        is_signal: nobody reads the word but to wait for it (`Model.is_reduced`).
    """

    word: int
    value: int
    program: int
    is_signal: bool


class Rank(NamedTuple):
    """What one rank is doing.

    Attributes:
        step: number of the step, num_steps at the end.
        script: number of the launches that it has chosen for this step (Machine.scripts).
        launch: number of the launch in the step. taken: actions taken by each program of the launch.
        known: what the rank remembers.
        pending: stores that have not drained, by word, those to one word in order.
    """

    step: int
    script: int
    launch: int
    taken: tuple[int, ...]
    known: Hashable
    pending: tuple[Store, ...]


class State(NamedTuple):
    """All of it: one byte per word of memory, and the ranks."""

    memory: bytes
    ranks: tuple[Rank, ...]


class Action(NamedTuple):
    """One atomic action.

    Attributes:
        name: for traces.
        take: returns False while it has to wait; whatever it has changed then is dropped.
        is_local: it looks at nothing that others change, so that it may be taken at once.
        is_stable: a wait that nobody can make unsatisfied again, and that changes nothing others look at
            (`Model.is_reduced`).
    """

    name: str
    take: Callable[[Turn], bool]
    is_local: bool = False
    is_stable: bool = False


Program = tuple[Action, ...]
Launch = tuple[Program, ...]


@dataclass
class Words:
    """Names of the words of memory."""

    names: list[str] = field(default_factory=list)

    def region(self, name: str, *shape: int) -> Callable[..., int]:
        """Adds words `name[i][j]...`, without indices of which there is one; returns the words' numbers by index."""
        first = len(self.names)
        for indices in itertools.product(*(range(size) for size in shape)):
            shown = (f"[{index}]" for index, size in zip(indices, shape) if size > 1)
            self.names.append(name + "".join(shown))

        def word(*indices: int) -> int:
            number = 0
            for index, size in zip(indices, shape, strict=True):
                number = number * size + index
            return first + number

        return word


class Turn:
    """What an action sees and does."""

    __slots__ = ("_pending", "_program", "known", "leaves", "memory", "stores", "written")

    def __init__(self, memory: bytearray, program: int, rank: Rank) -> None:
        self.memory, self.known = memory, rank.known
        self.leaves = False
        self.stores: list[Store] = []
        self.written: list[int] = []
        self._program, self._pending = program, rank.pending

    def store(self, word: int, value: int) -> None:
        """A store that drains at some time."""
        self.stores.append(Store(word, value, self._program, False))

    def write(self, word: int, value: int) -> None:
        """A store to a word that only this rank reads from now on; older ones of this rank to it are overtaken."""
        self.memory[word] = value
        self.written.append(word)

    def signal(self, word: int, value: int) -> None:
        """A store that is only waited for."""
        self.stores.append(Store(word, value, self._program, True))

    def has_drained(self, *, of_all_programs: bool = False) -> bool:
        """Whether a fence is passed: of this program's stores and of earlier launches', or of the whole rank's."""
        return not any(of_all_programs or store.program in (self._program, EARLIER) for store in self._pending)

    def leave(self) -> None:
        """This action is the program's last one."""
        self.leaves = True


class Model:
    """A protocol to explore: subclasses say what memory there is, what a step is, and when a store does harm.

    Attributes:
        num_ranks, num_steps, words: sizes, and the words of memory.
        launches_drain: a launch ends when its stores have drained.
        is_reduced: signals drain as soon as they may, and stable waits end as soon as they can. That leaves out states,
            but no way to go wrong: to see a signal late is to wait for longer.
    """

    num_ranks: int
    num_steps: int
    words: Words
    launches_drain = True
    is_reduced = False

    def initial_memory(self) -> bytes:
        """What memory holds before the first step."""
        raise NotImplementedError

    def choices(self, memory: bytearray, rank: int, step: int) -> Iterator[tuple[bytearray, Hashable]]:
        """What a rank may choose when it begins a step, and memory then."""
        raise NotImplementedError

    def launches(self, rank: int, step: int, choice: Hashable) -> tuple[Launch, ...]:
        """The launches of a step."""
        raise NotImplementedError

    def check_store(self, memory: bytearray, store: Store) -> None:
        """Raises Violation where a store that drains now destroys something."""
        raise NotImplementedError

    def shown(self, word: int, value: int) -> str:
        """What a word is told to hold, for traces."""
        return f"{self.words.names[word]} = {value}"


class Machine:
    """The states of a model and what leads from one to the next."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._scripts: list[tuple[Launch, ...]] = []
        self._script_numbers: dict[tuple[int, int, Hashable], int] = {}
        self._next_actions: dict[tuple[int, int, tuple[int, ...]], list[tuple[int, Action]]] = {}

    def initial(self) -> Iterator[tuple[State, list[str]]]:
        """The states in which all ranks have begun their first step."""
        waiting = Rank(-1, -1, 0, (), 0, ())
        yield from self._settled(bytearray(self.model.initial_memory()), [waiting] * self.model.num_ranks, None, [])

    def is_finished(self, state: State) -> bool:
        """Whether all ranks have made all steps and nothing is under way."""
        return all(rank.step == self.model.num_steps and not rank.pending for rank in state.ranks)

    def who_waits(self, state: State) -> list[str]:
        """What each rank waits for in a state from which nothing leads on."""
        lines = []
        for number, rank in enumerate(state.ranks):
            early, late = self.next_actions(rank)
            lines += [f"rank {number}: waits in vain until it {action.name}" for _program, action in (*early, *late)]
            if rank.step == self.model.num_steps:
                lines.append(f"rank {number}: has ended")
        return lines

    def successors(self, state: State) -> Iterator[tuple[State, list[str]]]:
        """(what can come next, what was done); raises Violation, with what was done as its second argument."""
        for number, rank in enumerate(state.ranks):
            for position in range(len(rank.pending)):
                if may_drain(rank.pending, position):
                    memory, done = bytearray(state.memory), []
                    yield from self._settled_with(
                        memory, state, number, self._drained(memory, number, rank, position, done), done
                    )
            for program, action in self.next_actions(rank)[1]:
                memory, done = bytearray(state.memory), []
                after = self._taken(memory, number, rank, program, action, done)
                if after is not None:
                    yield from self._settled_with(memory, state, number, after, done)

    def next_actions(self, rank: Rank) -> tuple[list[tuple[int, Action]], list[tuple[int, Action]]]:
        """(program, what it does next) of the programs that have not ended: what is done early, and all else."""
        key = (rank.script, rank.launch, rank.taken)
        found = self._next_actions.get(key)
        if found is None:
            found = self._next_actions[key] = ([], [])
            # a rank that makes no step has no script
            launch = self._scripts[rank.script][rank.launch] if rank.taken else ()
            for program, (actions, taken) in enumerate(zip(launch, rank.taken, strict=True)):
                if taken < len(actions):
                    action = actions[taken]
                    is_early = action.is_local or (action.is_stable and self.model.is_reduced)
                    found[0 if is_early else 1].append((program, action))
        return found

    def _drained(self, memory: bytearray, number: int, rank: Rank, position: int, done: list[str]) -> Rank:
        store = rank.pending[position]
        done.append(f"rank {number}: {self.model.shown(store.word, store.value)} arrives")
        try:
            self.model.check_store(memory, store)
        except Violation as violation:
            raise Violation(str(violation), done) from None
        memory[store.word] = store.value
        return rank._replace(pending=rank.pending[:position] + rank.pending[position + 1 :])

    def _taken(
        self, memory: bytearray, number: int, rank: Rank, program: int, action: Action, done: list[str]
    ) -> Rank | None:
        turn = Turn(memory, program, rank)
        try:
            if not action.take(turn):
                return None
        except Violation as violation:
            raise Violation(str(violation), [*done, f"rank {number}: {action.name}"]) from None
        done.append(f"rank {number}: {action.name}")
        taken = list(rank.taken)
        taken[program] += 1
        if turn.leaves:
            taken[program] = len(self._scripts[rank.script][rank.launch][program])
        pending = rank.pending
        if turn.stores or turn.written:
            left = (store for store in pending if store.word not in turn.written)
            # a stable sort: stores to one word keep their order
            pending = tuple(sorted((*left, *turn.stores), key=lambda store: store.word))
        return Rank(rank.step, rank.script, rank.launch, tuple(taken), turn.known, pending)

    # --- what is done at once, since it makes no difference to anybody when it is done ---

    def _settled_with(
        self, memory: bytearray, state: State, number: int, rank: Rank, done: list[str]
    ) -> Iterator[tuple[State, list[str]]]:
        return self._settled(memory, [*state.ranks[:number], rank, *state.ranks[number + 1 :]], number, done)

    def _settled(
        self, memory: bytearray, ranks: list[Rank], only: int | None, done: list[str]
    ) -> Iterator[tuple[State, list[str]]]:
        """The states after all that is done early, `only` by the rank that has moved where others notice nothing."""
        numbers = range(len(ranks)) if only is None or self.model.is_reduced else (only,)
        moved = True
        while moved:
            moved = False
            for number in numbers:
                after = self._moved_early(memory, number, ranks[number], done)
                while after is not None:
                    ranks[number], moved = after, True
                    after = self._moved_early(memory, number, ranks[number], done)
        for number in numbers:
            if self._has_ended_step(ranks[number]):
                yield from self._step_begun(memory, ranks, only, number, done)
                return
        yield State(bytes(memory), tuple(ranks)), done

    def _moved_early(self, memory: bytearray, number: int, rank: Rank, done: list[str]) -> Rank | None:
        """The rank after one thing that it does early, None if there is none."""
        if self.model.is_reduced:
            for position, store in enumerate(rank.pending):
                if store.is_signal and may_drain(rank.pending, position):
                    return self._drained(memory, number, rank, position, done)
        early, late = self.next_actions(rank)
        for program, action in early:
            after = self._taken(memory, number, rank, program, action, done)
            if after is not None:
                return after
        if early or late or not 0 <= rank.step < self.model.num_steps or (rank.pending and self.model.launches_drain):
            return None
        launches = self._scripts[rank.script]
        if rank.launch + 1 == len(launches):
            return None
        left = tuple(store._replace(program=EARLIER) for store in rank.pending)
        return rank._replace(launch=rank.launch + 1, taken=(0,) * len(launches[rank.launch + 1]), pending=left)

    def _has_ended_step(self, rank: Rank) -> bool:
        if rank.step == self.model.num_steps:
            return False
        return rank.step < 0 or not (any(self.next_actions(rank)) or (rank.pending and self.model.launches_drain))

    def _step_begun(
        self, memory: bytearray, ranks: list[Rank], only: int | None, number: int, done: list[str]
    ) -> Iterator[tuple[State, list[str]]]:
        step = ranks[number].step + 1
        left = tuple(store._replace(program=EARLIER) for store in ranks[number].pending)
        if step == self.model.num_steps:
            ended = [*ranks[:number], Rank(step, -1, 0, (), 0, left), *ranks[number + 1 :]]
            yield from self._settled(memory, ended, only, done)
            return
        for after, choice in self.model.choices(memory, number, step):
            key = (number, step, choice)
            if key not in self._script_numbers:
                self._script_numbers[key] = len(self._scripts)
                self._scripts.append(self.model.launches(*key))
            script = self._script_numbers[key]
            begun = Rank(step, script, 0, (0,) * len(self._scripts[script][0]), 0, left)
            told = [*done, f"rank {number}: begins step {step}: {choice}"]
            yield from self._settled(after, [*ranks[:number], begun, *ranks[number + 1 :]], only, told)


def may_drain(pending: tuple[Store, ...], position: int) -> bool:
    """Whether this store may drain now; stores to one word stay in order."""
    return not position or pending[position - 1].word != pending[position].word
