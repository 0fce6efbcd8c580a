"""IntraNode's protocol as a model: what docs/protocol.md says about it, kernel by kernel.

One word of data for each pair of ranks and step. A word of data is EMPTY, or the number of its step plus one, or READ.
READ is the model's own mark, which the kernels do not have: what is not READ yet must not be overwritten, and what is
READ must not be read again.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tests.protocol.machine import Action, Launch, Model, Program, Store, Turn, Violation, Words

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

EMPTY, READ = 0, 255
FULL = 64
"""Marks the side word of a row that was written in full (WRITTEN_IN_FULL)."""
EPOCHS = 8
"""Values of an epoch word: 32 bits in the kernels, 3 here, so that few steps wrap."""


class Path(enum.StrEnum):
    """Which dispatch a step takes (policy.dispatch_phase)."""

    COUNTED = "dispatch of many tokens"
    FLAGGED = "flagged dispatch"


class Calls(enum.StrEnum):
    """Whole calls, or halves."""

    WHOLE = "whole calls"
    SPLIT = "halves"


class Choice(NamedTuple):
    """What a rank does in a step."""

    path: Path
    calls: Calls
    routes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path}, {self.calls}, rows for {list(self.routes) or 'nobody'}"


def wrapping_late(flag: int, epoch: int) -> bool:
    """late_lanes: the difference, wrapped to the words' width, is negative."""
    return (flag - epoch) % EPOCHS >= EPOCHS // 2


def differs(flag: int, epoch: int) -> bool:
    """A mutant."""
    return flag != epoch


def plainly_less(flag: int, epoch: int) -> bool:
    """A mutant: compares signed words."""
    return (flag ^ EPOCHS // 2) < (epoch ^ EPOCHS // 2)


@dataclass(frozen=True)
class Rules:
    """What is explored, and what mutants change.

    Attributes:
        num_ranks, num_steps: sizes.
        first_epoch: of the first step. From 6 on the steps' epochs are 6, 7, 1; from 2 on 2, 3, 4, where 4 is negative.
        paths, calls: what each step may choose; the path is agreed, calls are each rank's own.
        routes: whom a step's rows may be for, as sets of distances from the sending rank; None for all sets of peers.
        compact: layout compact, whose senders or receivers wait for all counts first.
        weights: combine brings weights, so that its flags order.
        written_in_full: flagged rows contain EMPTY.
        late: how flags are compared with epochs.
        dispatch_waits, combine_waits: dispatch and combine wait for all flags of their own.
        releases: flags that order are posted behind a fence.
        launches_drain: a launch ends when its stores have come to where they belong ("What is physical").
        num_copies: copies of counts, flagged rows and what travels beside them, used in turn.
        shared_staging: the dispatch of many tokens writes its rows into the flagged rows' slots too.
        tags_are_compared: a word with an epoch is accepted for the step's epoch only.
        readers_empty: readers leave EMPTY behind.
    """

    num_ranks: int = 2
    num_steps: int = 3
    first_epoch: int = 6
    paths: tuple[Path, ...] = (Path.COUNTED, Path.FLAGGED)
    calls: tuple[Calls, ...] = (Calls.WHOLE,)
    routes: tuple[tuple[int, ...], ...] | None = None
    compact: bool = False
    weights: bool = False
    written_in_full: bool = False
    is_reduced: bool = False
    late: Callable[[int, int], bool] = wrapping_late
    dispatch_waits: bool = True
    combine_waits: bool = True
    releases: bool = True
    launches_drain: bool = True
    num_copies: int = 1
    shared_staging: bool = False
    tags_are_compared: bool = True
    readers_empty: bool = True


class IntraNode(Model):
    """Dispatch, experts and combine of several steps inside a node."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.num_ranks, self.num_steps = rules.num_ranks, rules.num_steps
        self.launches_drain, self.is_reduced = rules.launches_drain, rules.is_reduced
        self.words, ranks, copies = Words(), rules.num_ranks, rules.num_copies
        region = self.words.region
        self.agreed = region("path of step", rules.num_steps)
        self.dispatch_flags = region("DISPATCH_FLAGS", ranks, ranks)
        self.combine_flags = region("COMBINE_FLAGS", ranks, ranks)
        self.weight_epochs = region("WEIGHT_EPOCHS", ranks, ranks)
        first_read = len(self.words.names)
        self.counts = region("COUNTS", copies, ranks, ranks)
        self.tokens = region("TOKENS", ranks, ranks)
        self.flagged_rows = region("FLAGGED_ROWS", copies, ranks, ranks)
        self.sides = region("FLAGGED_SIDES", copies, ranks, ranks)
        self.combine_rows = region("COMBINE_ROWS", ranks, ranks)
        self._read_once = range(first_read, len(self.words.names))
        self._subsets = {rank: self._routes_of(rank) for rank in range(ranks)}

    # --- what the explorer asks ---

    def initial_memory(self) -> bytes:
        memory = bytearray(len(self.words.names))
        for rank, peer in itertools.product(range(self.num_ranks), repeat=2):
            for flags in (self.dispatch_flags, self.combine_flags):
                memory[flags(rank, peer)] = self.epoch(-1)
            memory[self.tokens(rank, peer)] = READ
            for copy in range(self.rules.num_copies):
                memory[self.counts(copy, rank, peer)] = memory[self.sides(copy, rank, peer)] = READ
        return bytes(memory)

    def choices(self, memory: bytearray, rank: int, step: int) -> Iterator[tuple[bytearray, Hashable]]:
        # the word counts the ranks that have begun the step, from the first one's path on, and is zero after the last
        word, ranks = self.agreed(step), self.num_ranks
        agreed = memory[word]
        for number, path in enumerate(self.rules.paths):
            if agreed and (agreed - 1) // ranks != number:
                continue
            after = bytearray(memory)
            begun = (agreed or 1 + number * ranks) + 1
            after[word] = 0 if (begun - 1) % ranks == 0 else begun
            for calls, routes in itertools.product(self.rules.calls, self._subsets[rank]):
                yield bytearray(after), Choice(path, calls, routes)

    def check_store(self, memory: bytearray, store: Store) -> None:
        if store.word in self._read_once and memory[store.word] not in (EMPTY, READ):
            raise Violation(f"unread data is overwritten: {self.words.names[store.word]}")

    def launches(self, rank: int, step: int, choice: Hashable) -> tuple[Launch, ...]:
        assert isinstance(choice, Choice)
        one = _Step(self, rank, step, choice)
        dispatch = one.counted_dispatch() if choice.path is Path.COUNTED else one.flagged_dispatch()
        return (*dispatch, ((one.experts_read(),),), *one.combine())

    # --- what the steps use ---

    def epoch(self, step: int) -> int:
        """begin_stage: 1 to EPOCHS - 1, then 1 again; 0 is never used."""
        return (self.rules.first_epoch - 1 + step) % (EPOCHS - 1) + 1

    def is_told(self, word: int, step: int) -> bool:
        """Whether a word that carries an epoch (here: a step, and one bit) is accepted in this step."""
        if word in (EMPTY, READ):
            return word == READ and not self.rules.tags_are_compared
        return not self.rules.tags_are_compared or (word - 1) // 2 == step

    def _routes_of(self, rank: int) -> list[tuple[int, ...]]:
        distances = self.rules.routes
        if distances is None:
            first = 0 if Calls.SPLIT in self.rules.calls else 1  # own rows travel in halves only
            everyone = range(first, self.num_ranks)
            distances = tuple(
                chosen for count in range(len(everyone) + 1) for chosen in itertools.combinations(everyone, count)
            )
        return [tuple(sorted((rank + distance) % self.num_ranks for distance in chosen)) for chosen in distances]


class _Step:
    """The launches of one rank in one step."""

    def __init__(self, model: IntraNode, rank: int, step: int, choice: Choice) -> None:
        self.model, self.rules, self.rank, self.step = model, model.rules, rank, step
        self.path, self.is_split, self.routes = choice.path, choice.calls is Calls.SPLIT, choice.routes
        self.peers = [peer for peer in range(model.num_ranks) if peer != rank]
        self.epoch, self.data, self.copy = model.epoch(step), step + 1, step % model.rules.num_copies

    def received(self, rank: int, source: int, path: Path) -> int:
        """Where the experts of a rank read the row of a source."""
        if self.rules.shared_staging and path is Path.COUNTED:
            return self.model.flagged_rows(self.copy, rank, source)
        return self.model.tokens(rank, source)

    # --- actions ---

    def does(self, name: str, act: Callable[[Turn], None]) -> Action:
        """Hands over stores or changes own words: nobody else can tell when."""

        def take(turn: Turn) -> bool:
            act(turn)
            return True

        return Action(f"{name} (step {self.step})", take, is_local=True)

    def waits(self, name: str, take: Callable[[Turn], bool], *, is_stable: bool = False) -> Action:
        return Action(f"{name} (step {self.step})", take, is_stable=is_stable)

    def fence(self, *, of_all_programs: bool) -> Program:
        if not self.rules.releases:
            return ()
        return (Action("fence", lambda turn: turn.has_drained(of_all_programs), is_local=True),)

    def posts_flags(self, flags: Callable[..., int]) -> Action:
        """post_all."""

        def act(turn: Turn) -> None:
            for peer in self.peers:
                turn.signal(flags(peer, self.rank), self.epoch)

        return self.does(f"posts {self.model.words.names[flags(0, 0)].split('[')[0]}", act)

    def awaits_flags(self, flags: Callable[..., int]) -> Action:
        """wait_all."""
        mine = [flags(self.rank, peer) for peer in self.peers]
        late, epoch = self.rules.late, self.epoch
        name = self.model.words.names[mine[0]].split("[")[0]

        def take(turn: Turn) -> bool:
            return not any(late(turn.memory[word], epoch) for word in mine)

        return self.waits(f"has seen all {name}", take, is_stable=True)

    def posts_counts(self, *, awaited: bool) -> Action:
        """post_counts; awaited: no reader looks at them before they are there."""

        def act(turn: Turn) -> None:
            for peer in self.peers:
                word = self.model.counts(self.copy, peer, self.rank)
                (turn.signal if awaited else turn.store)(word, 1 + 2 * self.step + (peer in self.routes))

        return self.does("posts COUNTS", act)

    def told_counts(self, turn: Turn) -> list[int] | None:
        """Which peers send rows, None when not all have told."""
        words = {peer: turn.memory[self.model.counts(self.copy, self.rank, peer)] for peer in self.peers}
        if not all(self.model.is_told(word, self.step) for word in words.values()):
            return None
        return [peer for peer, word in words.items() if (word - 1) % 2]

    def awaits_counts(self) -> Action:
        """wait_counts."""
        return self.waits("has seen all COUNTS", lambda turn: self.told_counts(turn) is not None, is_stable=True)

    def accepts_rows(self, *, waits: bool) -> Action:
        """accept_rows publishes RECV_COUNTS: behind acquired flags the counts must be there, else they are awaited."""

        def take(turn: Turn) -> bool:
            told = self.told_counts(turn)
            if told is None:
                if waits:
                    return False
                raise Violation("stale read: COUNTS")
            turn.known = tuple(told)
            return True

        return self.waits("publishes RECV_COUNTS", take, is_stable=True)

    # --- dispatch ---

    def counted_dispatch(self) -> list[Launch]:
        """dispatch_kernel."""

        def write_rows(turn: Turn) -> None:
            for peer in self.routes:
                if peer != self.rank:
                    turn.store(self.received(peer, self.rank, Path.COUNTED), self.data)

        counts = (self.posts_counts(awaited=self.rules.compact),)
        counts += (self.awaits_counts(),) if self.rules.compact else ()
        send = (*counts, self.does("writes TOKENS", write_rows))
        send += (*self.fence(of_all_programs=True), self.posts_flags(self.model.dispatch_flags))
        waits = (self.awaits_flags(self.model.dispatch_flags),) if self.rules.dispatch_waits else ()
        receive = (*waits, self.accepts_rows(waits=False))
        return [(send,), (receive,)] if self.is_split else [((*send, *receive),)]

    def flagged_dispatch(self) -> list[Launch]:
        """flagged_dispatch_kernel: keeper, herald, senders, receivers."""
        send = (
            (self.posts_counts(awaited=True),),
            (self.posts_flags(self.model.dispatch_flags),),
            (self.pushes_rows(), *self.pushes_sides()),
        )
        before = (self.awaits_counts(),) if self.rules.compact else ()
        receive = (
            (self.accepts_rows(waits=True),),
            (self.awaits_flags(self.model.dispatch_flags),) if self.rules.dispatch_waits else (),
            *((*before, self.moves_row(peer)) for peer in self.peers),
        )
        if self.is_split:
            return [send, receive]
        return [(*(post + wait for post, wait in zip(send[:2], receive[:2])), send[2], *receive[2:])]

    def pushes_rows(self) -> Action:
        def act(turn: Turn) -> None:
            for peer in self.routes:
                if peer != self.rank:
                    push = turn.store if self.rules.written_in_full else turn.signal
                    push(self.model.flagged_rows(self.copy, peer, self.rank), self.data)

        return self.does("pushes FLAGGED_ROWS", act)

    def pushes_sides(self) -> Program:
        """push_position: released when the row cannot be its own flag."""
        full = FULL if self.rules.written_in_full else 0

        def act(turn: Turn) -> None:
            for peer in self.routes:
                if peer != self.rank:
                    turn.signal(self.model.sides(self.copy, peer, self.rank), 1 + 2 * self.step + full)

        fence = self.fence(of_all_programs=False) if full else ()
        return (*fence, self.does("pushes FLAGGED_SIDES", act))

    def moves_row(self, peer: int) -> Action:
        """take_row_block and what follows: waits for the row or the count that there is none; leaves EMPTY."""
        row, side = (region(self.copy, self.rank, peer) for region in (self.model.flagged_rows, self.model.sides))
        count, target = self.model.counts(self.copy, self.rank, peer), self.model.tokens(self.rank, peer)

        def take(turn: Turn) -> bool:
            memory = turn.memory
            if self.model.is_told(memory[count], self.step) and (memory[count] - 1) % 2 == 0:
                return True
            beside = memory[side]
            is_full = beside != READ and bool(beside & FULL)
            told = self.model.is_told(beside - FULL if is_full else beside, self.step)
            if not told or (memory[row] == EMPTY and not is_full):
                return False
            if memory[row] != self.data or (beside - 1 & ~FULL) // 2 != self.step:
                raise Violation(f"stale read: {self.model.words.names[row]}")
            memory[row] = memory[side] = READ
            if memory[target] not in (EMPTY, READ):
                raise Violation(f"unread data is overwritten: {self.model.words.names[target]}")
            memory[target] = self.data
            if self.rules.readers_empty:
                turn.store(row, EMPTY)
            return True

        return self.waits(f"takes the row of rank {peer}, or hears of none", take)

    def experts_read(self) -> Action:
        """The experts' launch: reads all received rows, and the counts again where steps are counted."""

        def take(turn: Turn) -> bool:
            for peer in self.peers:
                count = self.model.counts(self.copy, self.rank, peer)
                if not self.model.is_told(turn.memory[count], self.step):
                    raise Violation(f"stale read: {self.model.words.names[count]}")
                turn.memory[count] = READ
            for peer in turn.known:
                word = self.received(self.rank, peer, self.path)
                if turn.memory[word] != self.data:
                    raise Violation(f"stale read: {self.model.words.names[word]}")
                turn.memory[word] = READ
            return True

        return self.waits("experts read TOKENS", take)

    # --- combine ---

    def combine(self) -> list[Launch]:
        """combine_kernel: keeper, senders, receivers."""
        flags = self.model.combine_flags
        tells: Program = (self.posts_flags(flags),)
        hears: Program = (self.awaits_flags(flags),) if self.rules.combine_waits else ()
        if self.rules.weights:
            tells = (self.tells_weights(), *self.fence(of_all_programs=False), *tells)
            hears = (*hears, self.checks_weights())
        if self.is_split:
            return [(tells, (self.pushes_results(),)), (hears, (self.adds_results(),))]
        return [((*tells, *hears), (self.pushes_results(),), (self.adds_results(),))]

    def tells_weights(self) -> Action:
        def act(turn: Turn) -> None:
            for peer in self.peers:
                turn.store(self.model.weight_epochs(peer, self.rank), self.epoch)

        return self.does("writes WEIGHT_EPOCHS", act)

    def checks_weights(self) -> Action:
        def take(turn: Turn) -> bool:
            for peer in self.peers:
                word = self.model.weight_epochs(self.rank, peer)
                if turn.memory[word] != self.epoch:
                    raise Violation(f"stale read: {self.model.words.names[word]}")
            return True

        return self.waits("sees that all bring weights", take)

    def pushes_results(self) -> Action:
        """push_results; own rows only in halves (OWN_IN_PLACE)."""

        def act(turn: Turn) -> None:
            own = (self.rank,) if self.is_split and self.rank in self.routes else ()
            for peer in (*turn.known, *own):
                turn.signal(self.model.combine_rows(peer, self.rank), self.data)

        return self.does("pushes COMBINE_ROWS", act)

    def adds_results(self) -> Action:
        """add_results: waits for the rows of the routes that dispatch has recorded; leaves EMPTY."""
        words = [self.model.combine_rows(self.rank, peer) for peer in self.routes if self.is_split or peer != self.rank]

        def take(turn: Turn) -> bool:
            memory = turn.memory
            if any(memory[word] == EMPTY for word in words):
                return False
            for word in words:
                if memory[word] != self.data:
                    raise Violation(f"stale read: {self.model.words.names[word]}")
                memory[word] = READ
                if self.rules.readers_empty:
                    turn.store(word, EMPTY)
            return True

        return self.waits("adds COMBINE_ROWS", take)
