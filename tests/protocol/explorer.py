"""Looks at every state that a model can reach, breadth first, so that a counterexample is a shortest one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from tests.protocol.machine import DEADLOCK, Machine, Model, Violation

MAX_STATES = 500_000


@dataclass(frozen=True)
class Outcome:
    """What exploring a model has shown.

    Attributes:
        num_states: states that were reached.
        violation: what went wrong, None if nothing can.
        trace: what ranks did until then, a line each.
    """

    num_states: int
    violation: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.violation or 'nothing goes wrong'} ({self.num_states} states)", *self.trace])


def explore(model: Model, max_states: int = MAX_STATES) -> Outcome:
    """All states of a model, or those until the first violation."""
    return search(Machine(model), max_states)


def search(machine: Any, max_states: int = MAX_STATES) -> Outcome:
    """All states of a Machine, or of what has its `initial`, `successors`, `is_finished` and `who_waits`."""
    return _Search(machine).run(max_states)


class _Search:
    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.states: list[Any] = []
        self.parents: list[int] = []
        self.starts: list[list[str]] = []
        self.seen: set[Any] = set()

    def run(self, max_states: int) -> Outcome:
        try:
            for state, done in self.machine.initial():
                self.reach(state, -1)
                self.starts.append(done)
        except Violation as violation:
            return Outcome(0, *violation.args)
        number = 0
        while number < len(self.states):
            state, is_stuck = self.states[number], True
            try:
                for after, _done in self.machine.successors(state):
                    is_stuck = False
                    self.reach(after, number)
            except Violation as violation:
                what, done = violation.args
                return Outcome(len(self.states), what, (*self.trace(number), *done))
            if is_stuck and not self.machine.is_finished(state):
                return Outcome(len(self.states), DEADLOCK, (*self.trace(number), *self.machine.who_waits(state)))
            if len(self.states) > max_states:
                raise RuntimeError(f"more than {max_states} states")
            number += 1
        return Outcome(len(self.states))

    def reach(self, state: Any, parent: int) -> None:
        if state not in self.seen:
            self.seen.add(state)
            self.states.append(state)
            self.parents.append(parent)

    def trace(self, number: int) -> list[str]:
        """What was done until a state was reached; labels are made again instead of being kept for all states."""
        path = [number]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        path.reverse()
        lines = list(self.starts[path[0]])
        for before, after in itertools.pairwise(path):
            successors = self.machine.successors(self.states[before])
            lines += next(done for state, done in successors if state == self.states[after])
        return lines
