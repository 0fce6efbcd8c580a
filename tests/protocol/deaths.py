"""The failure path: ranks that die at any point of a step, the records of those who survive, and their verdict.

Rows arrive at once and one by one, so that a rank may die with its row at one survivor and not at another. A wait
expires when nobody who lives can do anything else: bounds are longer than steps. The verdict is the product's `judge`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ep_a2a.memory.agreement import judge
from ep_a2a.memory.peers import GivenUp, Presence, Verdict
from tests.protocol.machine import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

DISPATCH, COMBINE, DONE = range(3)
WRONG_NAME = "a survivor names a rank that is not gone"
NOT_NAMED = "a survivor does not name a rank that is gone"
DISAGREEMENT = "survivors name different ranks"
LATE = "a rank that waits is called late"
FAILURE = "the step"


@dataclass(frozen=True)
class DeathRules:
    """What is explored.

    Attributes:
        num_deaths: ranks that may die. num_ranks: ranks.
        by_agreement: survivors go by the verdict; else each by the rank that the first kernel to give up accused, which
            is the rule of versions up to 0.2.
        first_counts: whoever records second takes the first one's verdict.
    """

    num_deaths: int = 1
    num_ranks: int = 3
    by_agreement: bool = True
    first_counts: bool = True
    num_steps = 1
    is_reduced = True


class Rank(NamedTuple):
    """One rank: what it does, and what has come to it.

    Attributes:
        lives: False once it has died.
        call: DISPATCH, COMBINE or DONE, what it is at. sent: to whom it has sent in this call.
        got: by call, from whom rows have come. poison: the rank that the first to give up has accused, -1 for none.
        said: what it writes down when it gives up, None before. wrote: whether others can read it.
        judged: the verdict that it is about to record. named: the one that its error tells, in the end.
    """

    lives: bool = True
    call: int = DISPATCH
    sent: frozenset[int] = frozenset()
    got: tuple[frozenset[int], ...] = (frozenset(), frozenset())
    poison: int = -1
    said: GivenUp | None = None
    wrote: bool = False
    judged: Verdict | None = None
    named: Verdict | None = None


class State(NamedTuple):
    """All ranks; the verdict that is recorded."""

    ranks: tuple[Rank, ...]
    recorded: Verdict | None = None


class Deaths:
    """The states of the failure path and what leads from one to the next."""

    def __init__(self, rules: DeathRules) -> None:
        self.rules = rules
        self.everyone = frozenset(range(rules.num_ranks))

    def initial(self) -> Iterator[tuple[State, list[str]]]:
        """All ranks begin a dispatch."""
        yield State((Rank(),) * self.rules.num_ranks), []

    def successors(self, state: State) -> Iterator[tuple[State, list[str]]]:
        """(what can come next, what was done)."""
        return ((after, [done]) for after, done in self._successors(state))

    def who_waits(self, _state: State) -> list[str]:
        """Nobody: every wait expires."""
        return []

    def _successors(self, state: State) -> Iterator[tuple[State, str]]:
        moved = list(self._progress(state))
        yield from moved
        if not moved:
            yield from self._expiries(state)
        if sum(not rank.lives for rank in state.ranks) < self.rules.num_deaths:
            for number, rank in enumerate(state.ranks):
                if rank.lives:
                    yield self._with(state, number, lives=False), f"rank {number}: dies"
        for number, rank in enumerate(state.ranks):
            if rank.lives and rank.said is not None and rank.named is None:
                yield from self._host(state, number, rank)

    def is_finished(self, state: State) -> bool:
        """Whether every rank that lives has ended its step, or has its error; and all errors if there is one."""
        living = [rank for rank in state.ranks if rank.lives]
        return all(rank.named is not None or (rank.call == DONE and rank.poison < 0) for rank in living)

    def _with(self, state: State, number: int, **changes: object) -> State:
        changed = state.ranks[number]._replace(**changes)
        return state._replace(ranks=(*state.ranks[:number], changed, *state.ranks[number + 1 :]))

    def _lacked(self, number: int, rank: Rank) -> frozenset[int]:
        return frozenset() if rank.call == DONE else self.everyone - rank.got[rank.call] - {number}

    def _progress(self, state: State) -> Iterator[tuple[State, str]]:
        """What kernels do: send a row, go on to the next call, leave because of poison."""
        for number, rank in enumerate(state.ranks):
            if not rank.lives or rank.said is not None:
                continue
            others = self.everyone - {number}
            at_start = not rank.sent or rank.call == DONE
            if rank.poison >= 0 and (at_start or rank.sent == others):
                # behind a failure a launch leaves at once
                lacked = () if at_start else tuple(sorted(self._lacked(number, rank)))
                said = GivenUp(FAILURE, "", lacked, waited=not at_start, at=0.0)
                yield self._with(state, number, said=said), f"rank {number}: leaves, since it is poisoned"
            elif rank.call != DONE and rank.sent != others:
                for peer in sorted(others - rank.sent):
                    yield self._row_sent(state, number, peer), f"rank {number}: sends rank {peer} a row"
            elif rank.call != DONE and not self._lacked(number, rank):
                after = self._with(state, number, call=rank.call + 1, sent=frozenset())
                yield after, f"rank {number}: has all rows"

    def _row_sent(self, state: State, number: int, peer: int) -> State:
        rank, other = state.ranks[number], state.ranks[peer]
        got = tuple(came | {number} if call == rank.call else came for call, came in enumerate(other.got))
        return self._with(self._with(state, peer, got=got), number, sent=rank.sent | {peer})

    def _expiries(self, state: State) -> Iterator[tuple[State, str]]:
        for number, rank in enumerate(state.ranks):
            lacked = tuple(sorted(self._lacked(number, rank)))
            if rank.lives and rank.said is None and rank.poison < 0 and lacked:
                ranks = (r._replace(poison=lacked[0] if r.poison < 0 else r.poison) for r in state.ranks)
                said = GivenUp(FAILURE, "", lacked, waited=True, at=0.0)
                after = self._with(state._replace(ranks=tuple(ranks)), number, said=said)
                yield after, f"rank {number}: gives up, lacks {list(lacked)}, poisons all"

    def _host(self, state: State, number: int, rank: Rank) -> Iterator[tuple[State, str]]:
        """What the host does between a kernel that has given up and the error."""
        if not self.rules.by_agreement:
            yield self._raised(state, number, Verdict((rank.poison,))), f"rank {number}: raises as its kernel says"
        elif not rank.wrote:
            yield self._with(state, number, wrote=True), f"rank {number}: writes down that it has given up"
        elif rank.judged is not None:
            found = state.recorded if self.rules.first_counts and state.recorded is not None else rank.judged
            after = self._raised(state._replace(recorded=found), number, found)
            yield after, f"rank {number}: records its verdict or finds one, raises"
        elif state.recorded is not None:
            yield self._raised(state, number, state.recorded), f"rank {number}: takes the verdict, raises"
        else:
            seen = {r: Presence.ALIVE if other.lives else Presence.GONE for r, other in enumerate(state.ranks)}
            given_up = {r: other.said for r, other in enumerate(state.ranks) if other.wrote and other.said}
            judged = judge(FAILURE, seen, given_up)
            if judged is not None:
                yield self._with(state, number, judged=judged), f"rank {number}: judges"

    def _raised(self, state: State, number: int, named: Verdict) -> State:
        """The state with a rank's error; raises Violation where that is wrong."""
        dead = {r for r, rank in enumerate(state.ranks) if not rank.lives}
        if not set(named.missing) <= dead:
            raise Violation(WRONG_NAME, [])
        if named.late:
            raise Violation(LATE, [])
        if not named.missing:
            raise Violation(NOT_NAMED, [])
        if any(rank.named not in (None, named) for rank in state.ranks if rank.lives):
            raise Violation(DISAGREEMENT, [])
        return self._with(state, number, named=named)
