"""The rings of InterNodeV1 as a model: chunks and credits, one rank per node, a ring for each pair and direction.

In dispatch the source writes a chunk into the peer's ring, and releases a counter there. The peer forwards the chunk
(here: to its experts), and then raises a counter at the source, which gives the slot back. Combine is mirrored: the
peer writes as many chunks as it has received into the source's ring, and the source adds a chunk when all peers have
sent it. Counters go on from step to step, and nothing else holds ranks together here. docs/protocol.md says what stands
for what.

A channel takes its roles in turn, and each goes on when it can: roles are modelled as programs that run at the same
time. `blocking` makes them launches instead, of which each ends before the next one begins.
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
"""Values of a counter: 32 bits in the kernels, 3 here, so that few steps wrap."""
FIRST_COUNTER = COUNTERS - 2


def wrapping_behind(counter: int, target: int) -> bool:
    """has_reached, the other way round: the difference, wrapped to the words' width, is negative."""
    return (counter - target) % COUNTERS >= COUNTERS // 2


def differs(counter: int, target: int) -> bool:
    """A mutant."""
    return counter != target


def plainly_less(counter: int, target: int) -> bool:
    """A mutant."""
    return counter < target


@dataclass(frozen=True)
class ChunkRules:
    """What is explored, and what mutants change.

    Attributes:
        num_ranks, num_steps, num_slots: sizes; num_slots of a ring.
        max_chunks: a channel sends 1 to max_chunks chunks to every peer in a step, as it likes. The last one says so; a
            channel with nothing to send sends one that is empty.
        channels: in which order each rank serves its channels, each to its end, as the interpreter does.
        arrived_behind, taken_behind: how counters are compared.
        extra_slots: a chunk is written when c + 1 - (num_slots + extra_slots) have been taken.
        releases: arrivals are told behind a fence.
        taken_first: a slot is given back before it has been read.
        blocking: a channel ends a role before it begins the next.
    """

    num_ranks: int = 2
    num_steps: int = 3
    num_slots: int = 1
    max_chunks: int = 2
    channels: tuple[tuple[int, ...], ...] | None = None
    is_reduced: bool = False
    arrived_behind: Callable[[int, int], bool] = wrapping_behind
    taken_behind: Callable[[int, int], bool] = wrapping_behind
    extra_slots: int = 0
    releases: bool = True
    taken_first: bool = False
    blocking: bool = False

    def order(self, rank: int) -> tuple[int, ...]:
        """The channels of a rank, in the order in which it serves them."""
        return (0,) if self.channels is None else self.channels[rank]


class Sent(NamedTuple):
    """What a rank does in a step: chunks for every peer."""

    num_chunks: int

    def __str__(self) -> str:
        return f"{self.num_chunks} chunks to send"


class Ring:
    """A channel's ring in the memory of `reader`, which `writer` fills."""

    def __init__(self, model: Chunks, region: str, channel: int, writer: int, reader: int) -> None:
        number = f"[{channel}]" if len(model.rules.order(0)) > 1 else ""
        there, here = f"[{reader}][{writer}]{number}", f"[{writer}][{reader}]{number}"
        words = model.words
        slot = words.region(f"{region}{there}", model.rules.num_slots)
        self.slots = [slot(number) for number in range(model.rules.num_slots)]
        self.arrived = words.region(f"{region}_ARRIVED{there}")()
        self.taken = words.region(f"{region}_TAKEN{here}")()
        # CHANNEL_STATE: how many chunks a rank itself has written or taken
        self.num_written = words.region(f"{region}_written{here}")()
        self.num_taken = words.region(f"{region}_taken{there}")()

    @property
    def counters(self) -> tuple[int, ...]:
        """All words that count chunks."""
        return self.arrived, self.taken, self.num_written, self.num_taken


class Chunks(Model):
    """Dispatch, experts and combine of several steps between nodes."""

    def __init__(self, rules: ChunkRules) -> None:
        self.rules, self.words = rules, Words()
        self.num_ranks, self.num_steps, self.is_reduced = rules.num_ranks, rules.num_steps, rules.is_reduced
        places = [
            (c, *pair) for c in sorted(rules.order(0)) for pair in itertools.permutations(range(self.num_ranks), 2)
        ]
        self.out = {(c, source, peer): Ring(self, "CHUNKS", c, source, peer) for c, source, peer in places}
        self.back = {(c, source, peer): Ring(self, "CHUNKS_BACK", c, peer, source) for c, source, peer in places}
        self.received = {
            (c, source, peer): [
                self.words.region(f"TOKENS[{peer}][{source}][{c}][{chunk}]")() for chunk in range(rules.max_chunks)
            ]
            for c, source, peer in places
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
        for num_chunks in range(1, self.rules.max_chunks + 1):
            yield bytearray(memory), Sent(num_chunks)

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
        channels = [_Channel(self, rank, step, channel, choice.num_chunks) for channel in self.rules.order(rank)]
        dispatch = [(*map(one.sends, one.peers), *map(one.forwards, one.peers)) for one in channels]
        experts = tuple(one.experts_read() for one in channels)
        combine = [(*map(one.returns, one.peers), one.adds()) for one in channels]
        if self.rules.blocking:
            dispatch, combine = ([(role,) for roles in phase for role in roles] for phase in (dispatch, combine))
        return (*dispatch, experts, *combine)


class _Channel:
    """The roles of one rank's channel in one step."""

    def __init__(self, model: Chunks, rank: int, step: int, channel: int, num_chunks: int) -> None:
        self.model, self.rules, self.rank, self.step, self.channel = model, model.rules, rank, step, channel
        self.num_chunks = num_chunks
        self.peers = [peer for peer in range(model.num_ranks) if peer != rank]

    def data(self, chunk: int, *, is_last: bool) -> int:
        """What a chunk holds: which one it is, of which step, and in its header whether it is the last one."""
        return 1 + 2 * (self.step * self.rules.max_chunks + chunk) + is_last

    def named(self, chunk: int, what: str) -> str:
        return f"chunk {chunk} {what} (step {self.step}, channel {self.channel})"

    def all_chunks(self, actions: Callable[[int], Program]) -> Program:
        """The actions for as many chunks as there may be; a program leaves behind the last one."""
        return tuple(itertools.chain(*(actions(chunk) for chunk in range(self.rules.max_chunks))))

    def writes(self, ring: Ring, chunk: int, is_last: Callable[[Turn], bool], what: str) -> Program:
        """send_chunk and return_chunk: waits for room, writes a chunk, tells that it has arrived."""

        def write(turn: Turn) -> bool:
            count = turn.memory[ring.num_written]
            target = (count + 1 - self.rules.num_slots - self.rules.extra_slots) % COUNTERS
            if self.rules.taken_behind(turn.memory[ring.taken], target):
                return False
            turn.store(ring.slots[count % self.rules.num_slots], self.data(chunk, is_last=is_last(turn)))
            turn.memory[ring.num_written] = (count + 1) % COUNTERS
            return True

        def tell(turn: Turn) -> bool:
            if self.rules.releases and not turn.has_drained():
                return False
            turn.signal(ring.arrived, turn.memory[ring.num_written])
            if is_last(turn):
                turn.leave()
            return True

        name = self.named(chunk, what)
        return Action(f"writes {name}", write), Action(f"tells of {name}", tell, is_local=True)

    def reads(self, rings: list[Ring], chunk: int, keep: Callable[[Turn, int], None], what: str) -> Program:
        """forward_chunk and take_chunk: waits for a chunk in all rings, reads it, gives the slots back."""
        rules, name = self.rules, self.named(chunk, what)
        told_first = rules.taken_first

        def has_come(turn: Turn) -> bool:
            targets = ((ring.arrived, (turn.memory[ring.num_taken] + 1) % COUNTERS) for ring in rings)
            return not any(rules.arrived_behind(turn.memory[word], target) for word, target in targets)

        def give_back(turn: Turn) -> bool:
            if not has_come(turn):
                return False
            for ring in rings:
                turn.signal(ring.taken, (turn.memory[ring.num_taken] + 1) % COUNTERS)
            return True

        def read(turn: Turn) -> bool:
            if not told_first and not give_back(turn):
                return False
            for ring in rings:
                count = turn.memory[ring.num_taken]
                word = ring.slots[count % rules.num_slots]
                found = turn.memory[word]
                if found not in (self.data(chunk, is_last=False), self.data(chunk, is_last=True)):
                    raise Violation(f"{STALE_READ}: {self.model.words.names[word]}")
                turn.memory[word] = READ
                turn.memory[ring.num_taken] = (count + 1) % COUNTERS
                keep(turn, found)
                if found == self.data(chunk, is_last=True):
                    turn.leave()
            return True

        if told_first:
            return Action(f"gives back the slot of {name}", give_back), Action(f"reads {name}", read)
        return (Action(f"reads {name}, and gives the slot back", read),)

    # --- roles ---

    def sends(self, peer: int) -> Program:
        """Dispatch at the source."""

        def is_last(chunk: int) -> Callable[[Turn], bool]:
            return lambda _turn: chunk == self.num_chunks - 1

        ring = self.model.out[self.channel, self.rank, peer]
        return self.all_chunks(lambda chunk: self.writes(ring, chunk, is_last(chunk), f"for rank {peer}"))

    def forwards(self, source: int) -> Program:
        """Dispatch at the peer: hands chunks on to where the experts read them."""

        def keep_chunk(chunk: int) -> Callable[[Turn, int], None]:
            word = self.model.received[self.channel, source, self.rank][chunk]

            def keep(turn: Turn, found: int) -> None:
                if turn.memory[word] != READ:
                    raise Violation(f"{OVERWRITTEN}: {self.model.words.names[word]}")
                turn.memory[word] = found

            return keep

        ring = self.model.out[self.channel, source, self.rank]
        return self.all_chunks(lambda chunk: self.reads([ring], chunk, keep_chunk(chunk), f"of rank {source}"))

    def experts_read(self) -> Program:
        """Reads what has been forwarded, and remembers how many chunks each source is owed (FORWARDED_CHUNKS)."""

        def take(turn: Turn) -> bool:
            owed = dict(turn.known or ())
            for source in self.peers:
                for chunk, word in enumerate(self.model.received[self.channel, source, self.rank]):
                    found = turn.memory[word]
                    if found not in (READ, self.data(chunk, is_last=False), self.data(chunk, is_last=True)):
                        raise Violation(f"{STALE_READ}: {self.model.words.names[word]}")
                    if found != READ:
                        owed[self.channel, source] = chunk + 1
                    turn.memory[word] = READ
            turn.known = tuple(sorted(owed.items()))
            return True

        return (Action(f"experts read (step {self.step}, channel {self.channel})", take, is_local=True),)

    def returns(self, source: int) -> Program:
        """Combine at the peer: sends back as many chunks as have come."""

        def is_last(chunk: int) -> Callable[[Turn], bool]:
            return lambda turn: dict(turn.known)[self.channel, source] == chunk + 1

        ring = self.model.back[self.channel, source, self.rank]
        return self.all_chunks(lambda chunk: self.writes(ring, chunk, is_last(chunk), f"back to rank {source}"))

    def adds(self) -> Program:
        """Combine at the source: adds a chunk that has come back from all peers; as many must come as it has sent."""
        rings = [self.model.back[self.channel, self.rank, peer] for peer in self.peers]

        def check_chunk(chunk: int) -> Callable[[Turn, int], None]:
            def check(_turn: Turn, found: int) -> None:
                if found != self.data(chunk, is_last=chunk == self.num_chunks - 1):
                    raise Violation(f"{STALE_READ}: CHUNKS_BACK, another number of chunks than were sent")

            return check

        return self.all_chunks(lambda chunk: self.reads(rings, chunk, check_chunk(chunk), "back from all"))
