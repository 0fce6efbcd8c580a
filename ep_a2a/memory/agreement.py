"""Agreement of the ranks on who is gone or late: between a wait that has expired and the error that is raised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a import clock
from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory.peers import GivenUp, Presence, Verdict, waiting_calls

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ep_a2a.memory.peers import Peers

PATIENCE_SECS = 2.0
"""How long the first rank to give up waits for the others to give up, too, before it calls them late."""
LOOK_SECS = 0.02

RESET = "Then op.reset() on every rank makes the op usable again."
NOBODY_NAMED = (
    "Raise timeout_secs (EP_A2A_TIMEOUT_SECS), or for an op's first step first_timeout_secs "
    f"(EP_A2A_FIRST_TIMEOUT_SECS). {RESET}"
)
"""Remedy of a time-out that no rank is to blame for."""
OTHER_ORDER = f"Make the same calls in the same order on every rank, of all ops. {RESET}"


def agree(peers: Peers, given_up: GivenUp, bound_secs: float, left_secs: float = 0.0) -> Verdict:
    """Returns the verdict on a failure, the same on all ranks of this host.

    The first rank to judge writes the verdict down, the others read it. Where a rank is gone it judges at once, else
    when all ranks that live have given up, after PATIENCE_SECS at the latest. A rank of another host that has not
    been heard for a while is waited for, until it is heard or has been silent for `bound_secs`.

    Args:
        peers: the group.
        given_up: the call that this rank gives up.
        bound_secs: of a wait.
        left_secs: the rest of this rank's own wait, where a lost connection has ended it before its bound.
    """
    failure = given_up.failure
    found = peers.verdict(failure)
    if found is None:
        peers.give_up(given_up)
    start = clock.now()
    while found is None:
        is_over = clock.now() >= start + left_secs + PATIENCE_SECS
        judged = judge(
            failure,
            {rank: peers.presence(rank, bound_secs) for rank in range(peers.world_size)},
            peers.given_up(),
            host=peers.host,
            on_host=[rank for rank in peers.host if peers.host_record.waits(rank)],
            since=given_up.at - 2 * bound_secs,
            is_over=is_over,
        )
        found = peers.verdict(failure) if judged is None else peers.record(failure, judged)
        if found is None:
            clock.sleep(LOOK_SECS)
    return found


def judge(
    failure: str,
    seen: Mapping[int, Presence],
    given_up: Mapping[int, GivenUp],
    *,
    host: Collection[int] = (),
    on_host: Collection[int] = (),
    since: float = 0.0,
    is_over: bool = False,
) -> Verdict | None:
    """The verdict on a failure; None where it is too early. Pure.

    Args:
        failure: its key.
        seen: of each rank.
        given_up: the last call that ranks have given up, of this failure or another one.
        host: ranks of this host, of which all that have given up are known.
        on_host: ranks that wait for others on the host, not in a kernel.
        since: timeouts before this time are ignored.
        is_over: whether the time has passed in which others may still give up.
    """
    if Presence.UNHEARD in seen.values():
        return None
    gone = tuple(rank for rank in sorted(seen) if seen[rank] is Presence.GONE)
    if gone:
        return Verdict(missing=gone)
    if not is_over and len(given_up) < len(seen):
        return None
    here = {rank for rank, each in given_up.items() if each.failure == failure}
    awaited = {other for rank in here for other in given_up[rank].awaited}
    waiting = waiting_calls(given_up, since)
    in_meeting = {rank for rank in waiting if given_up[rank].is_meeting}
    late = awaited - (waiting.keys() - in_meeting) - set(on_host)
    if late & in_meeting or (not late and awaited & waiting.keys() - here):
        return Verdict(late=tuple(sorted(late)), calls=tuple(sorted(waiting.items())))
    if not late and awaited:
        # ranks were awaited that wait themselves, for one that nobody has named
        late = set(host) - given_up.keys() - set(on_host)
    return Verdict(late=tuple(sorted(late)))


def described(verdict: Verdict, rank: int) -> str:
    """A verdict in words, for the error of `rank`."""
    if verdict.missing:
        return f"{_named(verdict.missing)} gone (ended, or not heard any more)"
    calls = ", ".join(f"rank {other} in {call}" for other, call in verdict.calls)
    elsewhere = f"ranks that wait for each other in different calls: {calls}"
    if verdict.late:
        if calls:
            return f"{_named(verdict.late)} late (alive, and had not come); {elsewhere}"
        came = f"; this rank, {rank}, came after the others had given up" if rank in verdict.late else ""
        return f"{_named(verdict.late)} late (alive, and had not come){came}"
    if verdict.calls:
        return elsewhere
    return "no rank is gone or late by now; the time-out may be short for this machine"


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def remedy_of(verdict: Verdict) -> str | None:
    """What to do; None: as RankTimeoutError says, since ranks are named."""
    if verdict.calls:
        return OTHER_ORDER
    return None if verdict.missing or verdict.late else NOBODY_NAMED


def with_verdict(error: RankTimeoutError, verdict: Verdict, rank: int) -> RankTimeoutError:
    """Copy of the error that names the agreed ranks."""
    got = f"{described(verdict, rank)}. Seen here: {error.got}"
    return RankTimeoutError(
        error.expected, got, remedy_of(verdict) or error.remedy, verdict.missing, late_ranks=verdict.late
    )


def agreed_error(
    error: RankTimeoutError,
    peers: Peers,
    failure: str,
    call: str,
    awaited: tuple[int, ...],
    bound_secs: float,
    start: float,
) -> RankTimeoutError:
    """Returns the error of a wait on the host with the verdict that the ranks agree on.

    Args:
        error: of the wait.
        peers: the group.
        failure, call, awaited: as in GivenUp.
        bound_secs: of the wait, which began at `start`; a lost connection may have ended it before.
    """
    now = clock.now()
    given_up = GivenUp(failure, call, awaited, waited=True, at=now)
    verdict = agree(peers, given_up, bound_secs, left_secs=max(0.0, start + bound_secs - now))
    return with_verdict(error, verdict, peers.rank)
