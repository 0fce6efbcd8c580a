"""Looks at every state that a model can reach, breadth first, so that a counterexample is a shortest one."""

from __future__ import annotations

from dataclasses import dataclass

from tests.protocol.machine import Machine, Model, State, Violation

MAX_STATES = 2_000_000
DEADLOCK = "deadlock"


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
        return "\n".join([f"{self.violation or 'no violation'} ({self.num_states} states)", *self.trace])


def explore(model: Model, max_states: int = MAX_STATES) -> Outcome:
    """All states of a model, or those until the first violation."""
    machine = Machine(model)
    seen: dict[State, int] = {}
    parents: list[int] = []
    queue: list[State] = []
    starts: list[list[str]] = []
    for state, done in machine.initial():
        if state not in seen:
            seen[state] = len(queue)
            queue.append(state)
            parents.append(-1)
            starts.append(done)
    number = 0
    while number < len(queue):
        state = queue[number]
        stuck = True
        try:
            for after, _done in machine.successors(state):
                stuck = False
                if after not in seen:
                    seen[after] = len(queue)
                    queue.append(after)
                    parents.append(number)
        except Violation as violation:
            trace = _trace(machine, queue, parents, starts, number)
            return Outcome(len(queue), violation.args[0], (*trace, *violation.args[1]))
        if stuck and not machine.is_finished(state):
            return Outcome(len(queue), DEADLOCK, (*_trace(machine, queue, parents, starts, number), *_positions(machine, state)))
        if len(queue) > max_states:
            raise RuntimeError(f"more than {max_states} states")
        number += 1
    return Outcome(len(queue))


def _trace(machine: Machine, queue: list[State], parents: list[int], starts: list[list[str]], number: int) -> list[str]:
    path = [number]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    path.reverse()
    lines = list(starts[path[0]])
    for before, after in zip(path, path[1:]):
        lines += next(done for state, done in machine.successors(queue[before]) if state == queue[after])
    return lines


def _positions(machine: Machine, state: State) -> list[str]:
    """Who waits for what."""
    lines = []
    for number, rank in enumerate(state.ranks):
        if rank.step == machine.model.num_steps:
            lines.append(f"rank {number}: has ended")
            continue
        for _program, action in machine.next_actions(number, rank):
            lines.append(f"rank {number}: stuck before: {action.name}")
    return lines
