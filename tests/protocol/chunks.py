"""InterNodeV1's chunks and credits as a model: one rank per node, and a ring of few slots for each pair and direction.

In dispatch the source writes a chunk into the peer's ring, and releases the head, a counter at the peer. The peer
forwards the chunk (here: to its experts), and then posts the tail, a counter at the source. The source writes chunk c
when c - tail is below the number of slots. Combine is mirrored: the peer writes into the source's ring as many chunks
as it has received, and the source adds them. Counters go on from step to step, and nothing else holds ranks together.

A program owns a channel and takes turns at its roles, each of which goes on when it can: roles are modelled as programs
that run at the same time. `blocking` makes them launches instead, of which each ends before the next one begins.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tests.protocol.machine import (
    OVERWRITTEN,
    STALE_READ,
    Action,
    Launch,
    Model,
    Program,
    Store,
    Turn,
    Violation,
    Words,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

READ = 255
COUNTERS = 8
"""Values of a counter: 32 bits in a kernel, 3 here, so that few steps wrap."""
FIRST_COUNTER = COUNTERS - 2


def wrapping_behind(counter: int, wanted: int) -> bool:
    """Whether a counter has not come to `wanted`: the difference, wrapped to the words' width, is negative."""
    return (counter - wanted) % COUNTERS >= COUNTERS // 2


def differs(counter: int, wanted: int) -> bool:
    """A mutant."""
    return counter != wanted


def plainly_less(counter: int, wanted: int) -> bool:
    """A mutant."""
    return counter < wanted


@dataclass(frozen=True)
class ChunkRules:
    """What is explored, and what mutants change.

    Attributes:
        num_ranks, num_steps, num_slots: sizes; num_slots of a ring.
        max_chunks: a source sends 1 to max_chunks chunks to each peer in a step, as it likes. The last one says so; a
            source with nothing to send sends one that is empty.
        head_behind, tail_behind: how counters are compared.
        extra_credits: a source writes when c - tail is below num_slots + extra_credits.
        releases: heads are posted behind a fence.
        credit_first: the tail is posted before the chunk has been read.
        blocking: a program ends a role before it begins the next.
    """

    num_ranks: int = 2
    num_steps: int = 3
    num_slots: int = 1
    max_chunks: int = 2
    is_reduced: bool = False
    head_behind: Callable[[int, int], bool] = wrapping_behind
    tail_behind: Callable[[int, int], bool] = wrapping_behind
    extra_credits: int = 0
    releases: bool = True
    credit_first: bool = False
    blocking: bool = False


class Sent(NamedTuple):
    """What a rank does in a step: chunks for each peer."""

    num_chunks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.num_chunks))} chunks to send"


class Ring:
    """A ring in the memory of `reader`, which `writer` fills."""

    def __init__(self, model: Chunks, phase: str, writer: int, reader: int) -> None:
        words = model.words
        self.slots = [words.region(f"{phase}_RING[{reader}][{writer}]", model.rules.num_slots)(n) for n in model.slots]
        self.head = words.region(f"{phase}_HEAD[{reader}][{writer}]")()
        self.tail = words.region(f"{phase}_TAIL[{writer}][{reader}]")()
        # in the memory of the rank itself, which keeps count
        self.written = words.region(f"{phase}_WRITTEN[{writer}][{reader}]")()
        self.taken = words.region(f"{phase}_TAKEN[{reader}][{writer}]")()

    @property
    def counters(self) -> tuple[int, ...]:
        """All words that count chunks."""
        return self.head, self.tail, self.written, self.taken


class Chunks(Model):
    """Dispatch, experts and combine of several steps between nodes."""

    def __init__(self, rules: ChunkRules) -> None:
        self.rules, self.slots = rules, range(rules.num_slots)
        self.num_ranks, self.num_steps, self.is_reduced = rules.num_ranks, rules.num_steps, rules.is_reduced
        self.words = Words()
        self.pairs = list(itertools.permutations(range(rules.num_ranks), 2))
        self.out = {(source, peer): Ring(self, "DISPATCH", source, peer) for source, peer in self.pairs}
        self.back = {(source, peer): Ring(self, "COMBINE", peer, source) for source, peer in self.pairs}
        chunks = range(rules.max_chunks)
        self.received = {
            (source, peer): [self.words.region(f"RECEIVED[{peer}][{source}][{n}]")() for n in chunks]
            for source, peer in self.pairs
        }
        rings = (*self.out.values(), *self.back.values())
        self._counters = [word for ring in rings for word in ring.counters]
        self._slots = {word for ring in rings for word in ring.slots}

    def initial_memory(self) -> bytes:
        memory = bytearray([READ] * len(self.words.names))
        for word in self._counters:
            memory[word] = FIRST_COUNTER
        return bytes(memory)

    def choices(self, memory: bytearray, rank: int, step: int) -> Iterator[tuple[bytearray, Hashable]]:
        for counts in itertools.product(range(1, self.rules.max_chunks + 1), repeat=self.num_ranks - 1):
            yield bytearray(memory), Sent(counts)

    def check_store(self, memory: bytearray, store: Store) -> None:
        if store.word in self._slots and memory[store.word] != READ:
            raise Violation(f"{OVERWRITTEN}: {self.words.names[store.word]}")

    def shown(self, word: int, value: int) -> str:
        if word in self._slots:
            step, chunk = divmod((value - 1) // 2, self.rules.max_chunks)
            return f"{self.words.names[word]} = chunk {chunk} of step {step}"
        return super().shown(word, value)

    def launches(self, rank: int, step: int, choice: Hashable) -> tuple[Launch, ...]:
        assert isinstance(choice, Sent)
        one = _Step(self, rank, step)
        others = [peer for peer in range(self.num_ranks) if peer != rank]
        sent = dict(zip(others, choice.num_chunks, strict=True))
        dispatch = [*(one.sends(peer, sent[peer]) for peer in others), *(one.forwards(source) for source in others)]
        combine = [*(one.returns(source) for source in others), *(one.adds(peer, sent[peer]) for peer in others)]
        experts = (one.experts_read(),)
        if self.rules.blocking:
            return (*((role,) for role in dispatch), experts, *((role,) for role in combine))
        return tuple(dispatch), experts, tuple(combine)


class _Step:
    """The roles of one rank in one step."""

    def __init__(self, model: Chunks, rank: int, step: int) -> None:
        self.model, self.rules, self.rank, self.step = model, model.rules, rank, step

    def data(self, chunk: int, *, is_last: bool) -> int:
        """What a chunk holds: which one it is, of which step, and in its header whether it is the last one."""
        return 1 + 2 * (self.step * self.rules.max_chunks + chunk) + is_last

    def writes(self, ring: Ring, chunk: int, is_last: Callable[[Turn], bool], what: str) -> Program:
        """Waits for a credit, writes a chunk, releases the head."""

        def write(turn: Turn) -> bool:
            count = turn.memory[ring.written]
            wanted = (count + 1 - self.rules.num_slots - self.rules.extra_credits) % COUNTERS
            if self.rules.tail_behind(turn.memory[ring.tail], wanted):
                return False
            turn.store(ring.slots[count % self.rules.num_slots], self.data(chunk, is_last=is_last(turn)))
            turn.memory[ring.written] = (count + 1) % COUNTERS
            return True

        def post(turn: Turn) -> bool:
            if self.rules.releases and not turn.has_drained():
                return False
            turn.signal(ring.head, turn.memory[ring.written])
            if is_last(turn):
                turn.leave()
            return True

        named = f"chunk {chunk} {what} (step {self.step})"
        return Action(f"writes {named}", write), Action(f"releases the head behind {named}", post, is_local=True)

    def reads(self, ring: Ring, chunk: int, keep: Callable[[Turn, int], None], what: str) -> Program:
        """Waits for a chunk, reads it, posts the tail; ends after the last one."""
        named = f"chunk {chunk} {what} (step {self.step})"

        def is_there(turn: Turn) -> bool:
            return not self.rules.head_behind(turn.memory[ring.head], (turn.memory[ring.taken] + 1) % COUNTERS)

        def post(turn: Turn) -> None:
            turn.signal(ring.tail, (turn.memory[ring.taken] + 1) % COUNTERS)

        def read(turn: Turn) -> bool:
            count = turn.memory[ring.taken]
            if not self.rules.credit_first:
                if not is_there(turn):
                    return False
                post(turn)
            word = ring.slots[count % self.rules.num_slots]
            found = turn.memory[word]
            if found not in (self.data(chunk, is_last=False), self.data(chunk, is_last=True)):
                raise Violation(f"{STALE_READ}: {self.model.words.names[word]}")
            turn.memory[word] = READ
            turn.memory[ring.taken] = (count + 1) % COUNTERS
            keep(turn, found)
            if found == self.data(chunk, is_last=True):
                turn.leave()
            return True

        def give_credit(turn: Turn) -> bool:
            if not is_there(turn):
                return False
            post(turn)
            return True

        before = (Action(f"posts the tail for {named}", give_credit),) if self.rules.credit_first else ()
        return *before, Action(f"reads {named}, and posts the tail" if not before else f"reads {named}", read)

    # --- roles ---

    def sends(self, peer: int, num_chunks: int) -> Program:
        """Dispatch at the source."""

        def is_last(chunk: int) -> Callable[[Turn], bool]:
            return lambda _turn: chunk == num_chunks - 1

        ring = self.model.out[self.rank, peer]
        return self.all_chunks(lambda chunk: self.writes(ring, chunk, is_last(chunk), f"for rank {peer}"))

    def forwards(self, source: int) -> Program:
        """Dispatch at the peer: hands chunks on to where the experts read them."""

        def keep_chunk(chunk: int) -> Callable[[Turn, int], None]:
            word = self.model.received[source, self.rank][chunk]

            def keep(turn: Turn, found: int) -> None:
                if turn.memory[word] != READ:
                    raise Violation(f"{OVERWRITTEN}: {self.model.words.names[word]}")
                turn.memory[word] = found

            return keep

        ring = self.model.out[source, self.rank]
        return self.all_chunks(lambda chunk: self.reads(ring, chunk, keep_chunk(chunk), f"of rank {source}"))

    def experts_read(self) -> Program:
        """Reads what has been forwarded, and remembers how many chunks each source is owed."""

        def take(turn: Turn) -> bool:
            owed = {}
            for source in range(self.model.num_ranks):
                for chunk, word in enumerate(self.model.received.get((source, self.rank), ())):
                    found = turn.memory[word]
                    if found not in (READ, self.data(chunk, is_last=False), self.data(chunk, is_last=True)):
                        raise Violation(f"{STALE_READ}: {self.model.words.names[word]}")
                    if found != READ:
                        owed[source] = chunk + 1
                    turn.memory[word] = READ
            turn.known = tuple(sorted(owed.items()))
            return True

        return (Action(f"experts read (step {self.step})", take, is_local=True),)

    def returns(self, source: int) -> Program:
        """Combine at the peer: sends back as many chunks as have come."""

        def is_last(chunk: int) -> Callable[[Turn], bool]:
            return lambda turn: dict(turn.known)[source] == chunk + 1

        ring = self.model.back[source, self.rank]
        return self.all_chunks(lambda chunk: self.writes(ring, chunk, is_last(chunk), f"back to rank {source}"))

    def adds(self, peer: int, num_chunks: int) -> Program:
        """Combine at the source: as many chunks must come as it has sent."""
        ring = self.model.back[self.rank, peer]

        def check_chunk(chunk: int) -> Callable[[Turn, int], None]:
            def check(_turn: Turn, found: int) -> None:
                if found != self.data(chunk, is_last=chunk == num_chunks - 1):
                    raise Violation(f"{STALE_READ}: COMBINE_RING, another number of chunks than were sent")

            return check

        return self.all_chunks(lambda chunk: self.reads(ring, chunk, check_chunk(chunk), f"back from rank {peer}"))

    def all_chunks(self, actions: Callable[[int], Program]) -> Program:
        """The actions for as many chunks as there may be; a program leaves behind the last one."""
        return tuple(itertools.chain(*(actions(chunk) for chunk in range(self.rules.max_chunks))))
