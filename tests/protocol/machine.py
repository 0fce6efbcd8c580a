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

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

EARLIER = -1
"""Program number of stores that an earlier launch has left in the buffer."""


class Violation(Exception):  # noqa: N818  not an error of this program
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
        choice: what the model let it choose for this step.
        launch: number of the launch in the step. taken: actions taken by each program of the launch.
        known: what the rank remembers.
        pending: stores that have not drained, by word, those to one word in order.
    """

    step: int
    choice: Hashable
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
        """Adds words `name[i][j]...`; returns the function from indices to the word's number."""
        first, count = len(self.names), 1
        for size in shape:
            count *= size
        for number in range(count):
            indices = []
            for size in reversed(shape):
                indices.append(number % size)
                number //= size  # noqa: PLW2901
            self.names.append(name + "".join(f"[{index}]" for index in reversed(indices)))

        def word(*indices: int) -> int:
            number = 0
            for index, size in zip(indices, shape, strict=True):
                number = number * size + index
            return first + number

        return word


class Turn:
    """What an action sees and does."""

    __slots__ = ("known", "memory", "pending", "program", "rank", "step")

    def __init__(self, memory: bytearray, rank: int, program: int, state: Rank) -> None:
        self.memory, self.rank, self.program = memory, rank, program
        self.step, self.known, self.pending = state.step, state.known, list(state.pending)

    def store(self, word: int, value: int) -> None:
        """A store that drains at some time."""
        self.pending.append(Store(word, value, self.program, False))

    def signal(self, word: int, value: int) -> None:
        """A store that is only waited for."""
        self.pending.append(Store(word, value, self.program, True))

    def has_drained(self, of_all_programs: bool = False) -> bool:
        """Whether a fence is passed: of this program's stores and of earlier launches', or of the whole rank's."""
        return not any(of_all_programs or store.program in (self.program, EARLIER) for store in self.pending)


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

    def shown(self, store: Store) -> str:
        """A stored value in words."""
        return str(store.value)


class Machine:
    """The states of a model and what leads from one to the next."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._launches: dict[tuple[int, int, Hashable], tuple[Launch, ...]] = {}

    def initial(self) -> Iterator[tuple[State, list[str]]]:
        """The states in which all ranks have begun their first step."""
        waiting = Rank(-1, None, 0, (), 0, ())
        yield from self._settled(bytearray(self.model.initial_memory()), [waiting] * self.model.num_ranks, None, [])

    def is_finished(self, state: State) -> bool:
        """Whether all ranks have made all steps and nothing is under way."""
        return all(rank.step == self.model.num_steps and not rank.pending for rank in state.ranks)

    def successors(self, state: State) -> Iterator[tuple[State, list[str]]]:
        """(what can come next, what was done); raises Violation, with what was done as its second argument."""
        for number, rank in enumerate(state.ranks):
            for position in range(len(rank.pending)):
                if may_drain(rank.pending, position):
                    memory, done = bytearray(state.memory), []
                    yield from self._settled_with(
                        memory, state, number, self._drained(memory, number, rank, position, done), done
                    )
            for program, action in self.next_actions(number, rank):
                if not self._is_early(action):
                    memory, done = bytearray(state.memory), []
                    after = self._taken(memory, number, rank, program, action, done)
                    if after is not None:
                        yield from self._settled_with(memory, state, number, after, done)

    def next_actions(self, number: int, rank: Rank) -> list[tuple[int, Action]]:
        """(program, what it does next) of the programs that have not ended."""
        if not 0 <= rank.step < self.model.num_steps:
            return []
        programs = enumerate(self._launches[number, rank.step, rank.choice][rank.launch])
        return [
            (program, actions[rank.taken[program]])
            for program, actions in programs
            if rank.taken[program] < len(actions)
        ]

    def _is_early(self, action: Action) -> bool:
        return action.is_local or (action.is_stable and self.model.is_reduced)

    def _drained(self, memory: bytearray, number: int, rank: Rank, position: int, done: list[str]) -> Rank:
        store = rank.pending[position]
        done.append(f"rank {number}: {self.model.words.names[store.word]} = {self.model.shown(store)} arrives")
        try:
            self.model.check_store(memory, store)
        except Violation as violation:
            raise Violation(str(violation), done) from None
        memory[store.word] = store.value
        return rank._replace(pending=rank.pending[:position] + rank.pending[position + 1 :])

    def _taken(
        self, memory: bytearray, number: int, rank: Rank, program: int, action: Action, done: list[str]
    ) -> Rank | None:
        turn = Turn(memory, number, program, rank)
        told = f"rank {number}: {action.name}"
        try:
            if not action.take(turn):
                return None
        except Violation as violation:
            raise Violation(str(violation), [*done, told]) from None
        done.append(told)
        taken = rank.taken[:program] + (rank.taken[program] + 1,) + rank.taken[program + 1 :]
        # a stable sort: stores to one word keep their order
        pending = sorted(turn.pending, key=lambda store: store.word)
        return rank._replace(taken=taken, known=turn.known, pending=tuple(pending))

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
            if self._has_ended_step(number, ranks[number]):
                yield from self._step_begun(memory, ranks, only, number, done)
                return
        yield State(bytes(memory), tuple(ranks)), done

    def _moved_early(self, memory: bytearray, number: int, rank: Rank, done: list[str]) -> Rank | None:
        """The rank after one thing that it does early, None if there is none."""
        if self.model.is_reduced:
            for position, store in enumerate(rank.pending):
                if store.is_signal and may_drain(rank.pending, position):
                    return self._drained(memory, number, rank, position, done)
        actions = self.next_actions(number, rank)
        for program, action in actions:
            if self._is_early(action):
                after = self._taken(memory, number, rank, program, action, done)
                if after is not None:
                    return after
        if actions or not 0 <= rank.step < self.model.num_steps or (rank.pending and self.model.launches_drain):
            return None
        launches = self._launches[number, rank.step, rank.choice]
        if rank.launch + 1 == len(launches):
            return None
        left = tuple(store._replace(program=EARLIER) for store in rank.pending)
        return rank._replace(launch=rank.launch + 1, taken=(0,) * len(launches[rank.launch + 1]), pending=left)

    def _has_ended_step(self, number: int, rank: Rank) -> bool:
        if rank.step == self.model.num_steps:
            return False
        return rank.step < 0 or not (self.next_actions(number, rank) or (rank.pending and self.model.launches_drain))

    def _step_begun(
        self, memory: bytearray, ranks: list[Rank], only: int | None, number: int, done: list[str]
    ) -> Iterator[tuple[State, list[str]]]:
        step = ranks[number].step + 1
        left = tuple(store._replace(program=EARLIER) for store in ranks[number].pending)
        if step == self.model.num_steps:
            ended = [*ranks[:number], Rank(step, None, 0, (), 0, left), *ranks[number + 1 :]]
            yield from self._settled(memory, ended, only, done)
            return
        for after, choice in self.model.choices(memory, number, step):
            key = (number, step, choice)
            if key not in self._launches:
                self._launches[key] = self.model.launches(*key)
            begun = Rank(step, choice, 0, (0,) * len(self._launches[key][0]), 0, left)
            told = [*done, f"rank {number}: begins step {step}: {choice}"]
            yield from self._settled(after, [*ranks[:number], begun, *ranks[number + 1 :]], only, told)


def may_drain(pending: tuple[Store, ...], position: int) -> bool:
    """Whether this store may drain now; stores to one word stay in order."""
    return not position or pending[position - 1].word != pending[position].word
