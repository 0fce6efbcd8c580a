"""Ranks that share one GPU, as a model: which programs have a place on it, and which wait for a place.

A program that has a place keeps it until it ends. With programmatic dependent launches, the programs of a rank's next
launch may take free places before the launch before has ended; there they wait for its end. A program waits for
all programs of the same launch of every rank: a receiver adds what any sender may bring. So a launch that takes places
too early can keep the ranks out for which its rank waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.protocol.machine import Action, Launch, Model, Program, Store, Turn, Words

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

ENDED = 3
"""Values of a program's word: 0 has no place, 1 resident, 2 has let the next launch take places, 3 has ended."""
LETS_NEXT = 2
RESIDENT = 1


@dataclass(frozen=True)
class ResidencyRules:
    """What is explored, and what mutants change.

    Attributes:
        num_ranks: ranks that share the GPU.
        num_programs: programs of each launch. num_launches: launches of each rank, one after another.
        spare_places: places for programs on the GPU beyond one for each program of one launch of every rank.
        is_dependent: launches are dependent ones; else a launch begins when the one before has ended.
        is_early: a program lets the next launch take places before it waits for other ranks, which is a mutant.
    """

    num_ranks: int = 2
    num_programs: int = 2
    num_launches: int = 3
    spare_places: int = 0
    is_dependent: bool = True
    is_early: bool = False
    num_steps: int = 1
    is_reduced: bool = False


class Residency(Model):
    """Launches of several ranks on one GPU."""

    def __init__(self, rules: ResidencyRules) -> None:
        self.rules, self.num_ranks, self.num_steps = rules, rules.num_ranks, rules.num_steps
        self.is_reduced = rules.is_reduced
        self.words = Words()
        self.free = self.words.region("free places")()
        self.states = self.words.region("program", rules.num_ranks, rules.num_launches, rules.num_programs)
        self.posts = self.words.region("post", rules.num_ranks, rules.num_launches, rules.num_programs)

    def initial_memory(self) -> bytes:
        memory = bytearray(len(self.words.names))
        memory[self.free] = self.num_ranks * self.rules.num_programs + self.rules.spare_places
        return bytes(memory)

    def choices(self, memory: bytearray, rank: int, step: int) -> Iterator[tuple[bytearray, Hashable]]:
        yield bytearray(memory), "its launches"

    def launches(self, rank: int, step: int, choice: Hashable) -> tuple[Launch, ...]:
        rules = self.rules
        programs = (
            self._program(rank, launch, program)
            for launch in range(rules.num_launches)
            for program in range(rules.num_programs)
        )
        return (tuple(programs),)

    def check_store(self, memory: bytearray, store: Store) -> None:
        """No store destroys anything here."""

    def _program(self, rank: int, launch: int, program: int) -> Program:
        rules, own = self.rules, self.states(rank, launch, program)

        def before_has(memory: bytearray, state: int) -> bool:
            if launch == 0:
                return True
            return all(memory[self.states(rank, launch - 1, each)] >= state for each in range(rules.num_programs))

        def take_place(turn: Turn) -> bool:
            may_begin = before_has(turn.memory, LETS_NEXT if rules.is_dependent else ENDED)
            if not may_begin or turn.memory[self.free] == 0:
                return False
            turn.memory[self.free] -= 1
            turn.memory[own] = RESIDENT
            return True

        def let_next(turn: Turn) -> bool:
            turn.memory[own] = LETS_NEXT
            return True

        def post(turn: Turn) -> bool:
            turn.memory[self.posts(rank, launch, program)] = 1
            return True

        def see_posts(turn: Turn) -> bool:
            ranks, programs = range(self.num_ranks), range(rules.num_programs)
            return all(turn.memory[self.posts(peer, launch, each)] for peer in ranks for each in programs)

        def end(turn: Turn) -> bool:
            turn.memory[own] = ENDED
            turn.memory[self.free] += 1
            return True

        def named(name: str, take: Callable[[Turn], bool]) -> Action:
            return Action(f"program {program} of launch {launch} {name}", take)

        lets_next = named("lets the next launch begin", let_next)
        waits = named("sees all ranks' posts", see_posts)
        return (
            named("takes a place", take_place),
            named("sees the end of the launch before", lambda turn: before_has(turn.memory, ENDED)),
            named("posts", post),
            *((lets_next, waits) if rules.is_early else (waits, lets_next)),
            named("ends", end),
        )
