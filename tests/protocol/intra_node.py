"""IntraNode's protocol as a model: its memory, and what ranks choose.

One word of data for each pair of ranks and step. A word of data is EMPTY, or names its step and its source, or is READ.
READ is the model's own mark, which the kernels do not have: what is not READ yet must not be overwritten, and what is
READ must not be read again. docs/protocol.md says what stands for what.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tests.protocol.intra_node_step import Step
from tests.protocol.machine import OVERWRITTEN, STALE_READ, Launch, Model, Store, Violation, Words
from tests.protocol.rules import EMPTY, EPOCHS, FULL, READ, Calls, Choice, Rules

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence


class IntraNode(Model):
    """Dispatch, experts and combine of several steps inside a node."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.num_ranks, self.num_steps = rules.num_ranks, rules.num_steps
        self.launches_drain, self.is_reduced = rules.launches_drain, rules.is_reduced
        self.words, ranks, ops, copies = Words(), rules.num_ranks, rules.num_ops, rules.num_ops * rules.num_copies
        region = self.words.region
        self.agreed = region("path of step", rules.num_steps)
        self.dispatch_flags = region("DISPATCH_FLAGS", ops, ranks, ranks)
        self.combine_flags = region("COMBINE_FLAGS", ops, ranks, ranks)
        self.weight_epochs = region("WEIGHT_EPOCHS", ops, ranks, ranks)
        first_read = len(self.words.names)
        self.counts = region("COUNTS", copies, ranks, ranks)
        self.tokens = region("TOKENS", ranks, ranks)
        self.flagged_rows = region("LOW_LATENCY_ROWS", copies, ranks, ranks)
        self.sides = region("LOW_LATENCY_SIDES", copies, ranks, ranks)
        self.combine_rows = region("COMBINE_ROWS", ranks, ranks)
        self._read_once = range(first_read, len(self.words.names))
        self._empty_before = {
            word for word, name in enumerate(self.words.names) if name.startswith(("LOW_LATENCY_ROWS", "COMBINE_ROWS"))
        }
        self._subsets = {rank: self._routes_of(rank) for rank in range(ranks)}

    # --- what the explorer asks ---

    def initial_memory(self) -> bytes:
        memory = bytearray(len(self.words.names))
        for rank, peer in itertools.product(range(self.num_ranks), repeat=2):
            for flags, op in itertools.product((self.dispatch_flags, self.combine_flags), range(self.rules.num_ops)):
                memory[flags(op, rank, peer)] = self.epoch(-1)
            memory[self.tokens(rank, peer)] = READ
            for copy in range(self.rules.num_ops * self.rules.num_copies):
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
        name, found = self.words.names[store.word], memory[store.word]
        if store.word in self._read_once and found not in (EMPTY, READ):
            raise Violation(f"{OVERWRITTEN}: {name}")
        # a reader would not wait for this store, so that it matters when it drains: nothing to be left out
        if self.is_reduced and store.is_signal and store.word in self._empty_before and found != EMPTY:
            raise Violation(f"{STALE_READ}: {name} is not EMPTY")

    def shown(self, word: int, value: int) -> str:
        name = self.words.names[word]
        if name.startswith("COUNTS"):
            step, mask = divmod(value - 1, 1 << self.num_ranks)
            peers = [peer for peer in range(self.num_ranks) if mask >> peer & 1]
            return f"{name} = step {step}, rows for {peers or 'nobody'}"
        if word not in self._read_once:
            return f"{name} = epoch {value}"
        if value in (EMPTY, READ):
            return f"{name} = {'EMPTY' if value == EMPTY else 'padding'}"
        return f"{name} = row of step {((value & ~FULL) - 1) // self.num_ranks}"

    def launches(self, rank: int, step: int, choice: Hashable) -> tuple[Launch, ...]:
        assert isinstance(choice, Choice)
        return Step(self, rank, step, choice).launches()

    # --- what the steps use ---

    def epoch(self, step: int) -> int:
        """begin_stage, by the steps of one op: 1 to EPOCHS - 1, then 1 again; 0 is never used."""
        return (self.rules.first_epoch - 1 + step // self.rules.num_ops) % (EPOCHS - 1) + 1

    def row(self, step: int, source: int) -> int:
        """The data of a row."""
        return 1 + step * self.num_ranks + source

    def counts_of(self, step: int, destinations: Sequence[int]) -> int:
        """A line of COUNTS: of which step, and whom there are rows for."""
        return 1 + (step << self.num_ranks) + sum(1 << peer for peer in destinations)

    def sources(self, memory: bytearray, copy: int, reader: int, step: int) -> dict[int, int] | None:
        """The lines of COUNTS that a rank sees, as masks of destinations by source; None if one is not accepted."""
        words = {
            source: memory[self.counts(copy, reader, source)] for source in range(self.num_ranks) if source != reader
        }
        if any(self.is_late(word, (word - 1) >> self.num_ranks, step) for word in words.values()):
            return None
        return {source: (word - 1) & ((1 << self.num_ranks) - 1) for source, word in words.items()}

    def is_late(self, word: int, step_of_word: int, step: int) -> bool:
        """Whether a word that carries an epoch (here: a step) is not accepted."""
        if not self.rules.tags_are_compared:
            return word == EMPTY
        return word == READ or step_of_word != step

    def _routes_of(self, rank: int) -> list[tuple[int, ...]]:
        distances = self.rules.routes
        if distances is None:
            first = 0 if Calls.SPLIT in self.rules.calls else 1  # own rows travel in halves only
            everyone = range(first, self.num_ranks)
            distances = tuple(
                chosen for count in range(len(everyone) + 1) for chosen in itertools.combinations(everyone, count)
            )
        return [tuple(sorted((rank + distance) % self.num_ranks for distance in chosen)) for chosen in distances]
