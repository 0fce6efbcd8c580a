"""Who is to blame for a wait that has expired: judged from what a rank sees of its group, and said in words. Pure."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from ep_a2a.errors import RankTimeoutError

RESET = "Then op.reset() on every rank makes the op usable again."
NOBODY_NAMED = (
    "Raise timeout_secs (EP_A2A_TIMEOUT_SECS), or for an op's first step first_timeout_secs "
    f"(EP_A2A_FIRST_TIMEOUT_SECS). {RESET}"
)
"""Remedy of a time-out that no rank is to blame for."""
OTHER_ORDER = f"Make the same calls in the same order on every rank, of all ops. {RESET}"


class GivenUp(NamedTuple):
    """A call that a rank has given up, or a meeting in which it has waited for a while.

    Attributes:
        failure: the key of the failure; see Peers.verdict.
        call: the call, for a reader.
        awaited: ranks that had not come to it here.
        waited: whether this rank had sent its part of the call, so that it waited for others.
        at: when, by the host's clock.
        is_meeting: whether it is a meeting. The rank may be awaited in a step meanwhile, and is late there.
    """

    failure: str
    call: str
    awaited: tuple[int, ...]
    waited: bool
    at: float
    is_meeting: bool = False


class Seen(NamedTuple):
    """A rank's view of its group at one time.

    Attributes:
        world_size: the number of its ranks.
        gone: ranks that have ended, or are of another host and have been silent for long.
        unheard: those that are perhaps gone: they have just ended, or have been silent for a while.
        given_up: by rank, the last call that it has given up. Those of other hosts are not known.
        local: ranks of this host.
        blocked: ranks of this host that wait for others outside of kernels, where nothing is given up yet.
    """

    world_size: int
    gone: frozenset[int]
    unheard: frozenset[int]
    given_up: Mapping[int, GivenUp]
    local: frozenset[int] = frozenset()
    blocked: frozenset[int] = frozenset()

    def waiting(self, since: float) -> dict[int, str]:
        """By rank, the calls in which ranks waited for others at `since` or later."""
        return {rank: each.call for rank, each in self.given_up.items() if each.waited and each.at >= since}


class Verdict(NamedTuple):
    """The cause of a failure.

    Attributes:
        missing: ranks that are gone, ascending.
        late: where nobody is gone: ranks that live, that others waited for and that did not wait, ascending.
        calls: where nobody is gone: by rank, the different calls in which ranks wait for each other.
    """

    missing: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    calls: tuple[tuple[int, str], ...] = ()

    @classmethod
    def from_json(cls, value: Any) -> Verdict:
        """Returns the verdict that JSON has turned into lists; TypeError or ValueError where there is none."""
        missing, late, calls = value
        named = tuple((operator.index(rank), str(call)) for rank, call in calls)
        return cls(tuple(map(operator.index, missing)), tuple(map(operator.index, late)), named)

    def described(self, rank: int) -> str:
        """This verdict in words, for the error of `rank`."""
        if self.missing:
            return f"{_named(self.missing)} gone (ended, or not heard any more)"
        causes = []
        if self.late:
            causes.append(f"{_named(self.late)} late (alive, and had not come)")
        if self.calls:
            calls = ", ".join(f"rank {other} in {call}" for other, call in self.calls)
            causes.append(f"ranks that wait for each other in different calls: {calls}")
        elif rank in self.late:
            causes.append(f"this rank, {rank}, came after the others had given up")
        return "; ".join(causes) or "no rank is gone or late by now; the time-out may be short for this machine"

    def error(
        self,
        rank: int,
        expected: str,
        seen_here: str,
        remedy: str | None = None,
        *,
        wanted: int | None = None,
        epochs: Mapping[str, tuple[int, ...]] | None = None,
    ) -> RankTimeoutError:
        """Returns the error of `rank`, which names the ranks of this verdict.

        Args:
            rank: this rank.
            expected: what the wait was for.
            seen_here: what this rank itself has seen.
            remedy: where ranks are named; None says to look at their logs.
            wanted, epochs: `wanted` and `seen` of the error.
        """
        if self.calls:
            remedy = OTHER_ORDER
        elif not self.missing and not self.late:
            remedy = NOBODY_NAMED
        got = f"{self.described(rank)}. Seen here: {seen_here}"
        return RankTimeoutError(expected, got, remedy, self.missing, wanted, epochs, self.late)


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def judge(failure: str, seen: Seen, *, since: float = 0.0, is_over: bool = False) -> Verdict | None:
    """Returns the verdict on a call that this rank has given up; None where it is too early.

    Args:
        failure: its key.
        seen: what this rank sees.
        since: calls that were given up before this time are ignored.
        is_over: whether the time has passed in which others may still give up.
    """
    if seen.unheard:
        return None
    if seen.gone:
        return Verdict(missing=tuple(sorted(seen.gone)))
    if not is_over and len(seen.given_up) < seen.world_size:
        return None
    here = {rank for rank, each in seen.given_up.items() if each.failure == failure}
    awaited = {other for rank in here for other in seen.given_up[rank].awaited}
    waiting = seen.waiting(since)
    in_meeting = {rank for rank in waiting if seen.given_up[rank].is_meeting}
    late = awaited - (waiting.keys() - in_meeting) - seen.blocked
    if late & in_meeting or (not late and awaited & waiting.keys() - here):
        return Verdict(late=tuple(sorted(late)), calls=tuple(sorted(waiting.items())))
    if not late and awaited:
        # ranks were awaited that wait themselves, for one that nobody has named
        late = set(seen.local) - seen.given_up.keys() - seen.blocked
    return Verdict(late=tuple(sorted(late)))


def judge_meeting(rank: int, meeting: GivenUp, seen: Seen, since: float) -> Verdict:
    """Returns the verdict on a meeting to which ranks have not come, or in which ranks have died.

    Args:
        rank: this rank.
        meeting: its wait, for at least one rank.
        seen: what it sees.
        since: when the wait began. Calls that others gave up before say nothing about the present.
    """
    gone, unheard = (tuple(each for each in meeting.awaited if each in ranks) for ranks in (seen.gone, seen.unheard))
    if gone:
        return Verdict(gone)
    alive = tuple(each for each in meeting.awaited if each not in unheard)
    if unheard:
        # of a rank that was never seen nobody can say whether it lives
        return Verdict(unheard, alive)
    calls = seen.waiting(since)
    if not calls.keys() & set(alive):
        return Verdict(late=alive)
    return Verdict(late=alive, calls=tuple(sorted({**calls, rank: meeting.call}.items())))


def judge_trial(trial: str, seen: Seen, spared: set[int]) -> Verdict:
    """Returns which ranks are to be masked: those that ranks on trial await for too long, and that await nobody."""
    waiting = {rank: each for rank, each in seen.given_up.items() if each.failure == trial and each.waited}
    awaited = {rank for each in waiting.values() for rank in each.awaited}
    return Verdict(late=tuple(sorted(awaited - waiting.keys() - seen.blocked - spared)))
