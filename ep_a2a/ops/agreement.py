"""Agreement of survivors on who is gone: what a rank does between a wait that expired and the error that it raises."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory.liveness import Fate, GivenUp, Presence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ep_a2a.memory.liveness import Liveness

PATIENCE_SECS = 2.0
"""How long whoever gives up waits for the others to do so; kernels that wait learn of it in a fraction of that."""
LOOK_SECS = 0.005
STANDSTILL_SECS = 0.25
"""A longer time between two looks was no waiting: this process stood still, and heard nothing of the others. It
listens for as long before it judges."""
MAX_STANDSTILLS = 8
"""How many count, so that a machine that is always slow comes to an end."""
HOST_HEAD_START_SECS = 0.3
"""How much earlier than others the host judges that has the lowest living rank, so that the others take its verdict."""

FATES_OF = {Presence.ENDED: Fate.ENDED, Presence.STOPPED: Fate.STOPPED, Presence.SILENT: Fate.SILENT}
GONE = (Fate.ENDED, Fate.STOPPED, Fate.SILENT, Fate.UNSEEN)
IN_WORDS = {
    Fate.ENDED: "its process has ended",
    Fate.STOPPED: "its process is stopped",
    Fate.UNSEEN: "it did not come, and its process cannot be seen from here",
    Fate.SILENT: "its host has not been heard for the bound of a wait",
    Fate.LATE: "its process runs, and it has not come",
}


RESET = "Then op.reset() on every rank makes the op usable again."
NOBODY_NAMED = (
    "Raise timeout_secs (EP_A2A_TIMEOUT_SECS), or for an op's first step first_timeout_secs "
    f"(EP_A2A_FIRST_TIMEOUT_SECS). {RESET}"
)
"""Remedy of a time-out that no rank is to blame for."""


class Verdict(tuple[Fate, ...]):
    """The fate of each rank, as survivors agree on it."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are gone, ascending."""
        return tuple(rank for rank, fate in enumerate(self) if fate in GONE)

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks that live and did not come, ascending."""
        return tuple(rank for rank, fate in enumerate(self) if fate is Fate.LATE)

    @property
    def remedy(self) -> str | None:
        """What to do; None: as RankTimeoutError says, since ranks are named."""
        return None if self.missing or self.late else NOBODY_NAMED

    def __str__(self) -> str:
        named = [
            f"rank {rank} is {'late' if fate is Fate.LATE else 'gone'} ({IN_WORDS[fate]})"
            for rank, fate in enumerate(self)
            if fate is not Fate.FINE
        ]
        return ", ".join(named) or "no rank is gone or late by now; the time-out may be short for this machine"


def with_verdict(error: RankTimeoutError, verdict: Verdict) -> RankTimeoutError:
    """The error of a wait with the survivors' verdict in place of whom the wait itself could name."""
    got = f"{verdict}. Seen here: {error.got}"
    remedy = verdict.remedy or error.remedy
    return RankTimeoutError(error.expected, got, remedy, verdict.missing, late_ranks=verdict.late)


class _AwakeClock:
    """time.monotonic() without the time for which this process stood still.

    Whoever had stood still for the whole of its patience would judge by what it had heard before.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._still_secs = 0.0
        self._num_standstills = 0
        self.judges_from = 0.0

    def look(self) -> float:
        """Seconds by this clock; whoever judges before `judges_from` has not listened since it stood still."""
        now = time.monotonic()
        gap, self._last = now - self._last, now
        if gap > STANDSTILL_SECS and self._num_standstills < MAX_STANDSTILLS:
            self._num_standstills += 1
            self._still_secs += gap
            self.judges_from = now - self._still_secs + STANDSTILL_SECS
        return now - self._still_secs


class Agreement:
    """What the ranks of an op agree on when one of its steps fails; made on all ranks in the same order.

    Args:
        liveness: of the op's arena; None where this rank sees nobody.
        rank, world_size: this rank's place.
    """

    def __init__(self, liveness: Liveness | None, rank: int, world_size: int) -> None:
        self._liveness, self._rank, self._world_size = liveness, rank, world_size
        self._verdict: Verdict | None = None
        self._failure = 0

    def begin_anew(self, *, none_waits: bool = True) -> None:
        """Forgets a failure. On all ranks in the same order.

        Args:
            none_waits: whether the ranks meet before and after this, so that no rank is in a call that it gave up.
        """
        if none_waits and self._liveness is not None:
            self._liveness.wait_no_more()
        self._failure = 0 if self._liveness is None else self._liveness.new_failure()
        self._verdict = None

    def verdict(self, own: GivenUp, bound_secs: float, left_secs: float = 0.0) -> Verdict:
        """The verdict on the failure of this op, the same at every call until `begin_anew`.

        The first rank to judge waits until each other one is gone or has given up, too, for PATIENCE_SECS at most;
        where one is stopped, until that has lasted for `bound_secs`. On several hosts, where somebody is gone, a rank
        that runs may wait itself, and gets `bound_secs` more. The others take the verdict.

        Args:
            own: what this rank says of the call that it gives up.
            bound_secs: of a wait. A rank that is stopped for less is not gone.
            left_secs: what was left of this rank's own wait: a lost connection ends it before its bound, at which the
                others may come to give up.
        """
        if self._verdict is None:
            if self._liveness is None:
                unseen = dict.fromkeys(range(self._world_size), Presence.UNSEEN)
                self._verdict = Verdict(judge(unseen | {self._rank: Presence.RUNS}, {self._rank: own}))
            else:
                self._verdict = Verdict(self._agree(self._liveness, own, bound_secs, left_secs))
        return self._verdict

    def _agree(self, liveness: Liveness, own: GivenUp, bound_secs: float, left_secs: float) -> tuple[Fate, ...]:
        """See `verdict`; of several hosts, that with the lowest living rank judges, the others where it is silent."""
        liveness.give_up(self._failure, own.lacked, began=own.began)
        clock = _AwakeClock()
        start = clock.look()
        expiry = start + left_secs
        patience_secs = PATIENCE_SECS - (HOST_HEAD_START_SECS if liveness.others is not None else 0.0)
        ready: float | None = None
        while (found := liveness.verdict(self._failure)) is None:
            seen = {rank: liveness.presence(rank, bound_secs) for rank in range(self._world_size)}
            # a rank that waits for the same one in another op is not late here
            elsewhere = liveness.gave_up_since(start - 2 * bound_secs)
            given_up = dict.fromkeys(elsewhere, GivenUp((), began=True)) | liveness.given_up(self._failure)
            silent = [seen[rank] for rank in seen if rank not in given_up]
            now = clock.look()
            # on one host a kernel hears of this failure at once; on another host its own wait must end
            is_apart = liveness.others is not None and any(each in FATES_OF for each in seen.values())
            waits_for_some = Presence.RUNS in silent and now < expiry + patience_secs + bound_secs * is_apart
            watches_some = Presence.PAUSED in silent and now < expiry + bound_secs + patience_secs
            # the last word of a host that has ended may be that a rank waits
            may_be_old = liveness.others is not None and Presence.WAITS in silent and now < start + patience_secs
            # whoever stood still beside this process, as where a whole job is stopped, may wake a moment later
            may_wake = any(each in (Presence.STOPPED, Presence.SILENT) for each in seen.values())
            judges_from = max(clock.judges_from, start + STANDSTILL_SECS * may_wake)
            if not waits_for_some and not watches_some and not may_be_old and now >= judges_from:
                ready = ready or now
                living = [rank for rank in seen if seen[rank] not in FATES_OF and seen[rank] is not Presence.UNSEEN]
                if liveness.is_first_host(living) or now >= ready + HOST_HEAD_START_SECS:
                    return liveness.record(self._failure, judge(seen, given_up))
            time.sleep(LOOK_SECS)
        return found


def judge(seen: Mapping[int, Presence], given_up: Mapping[int, GivenUp]) -> tuple[Fate, ...]:
    """The fate of each rank. Pure.

    A rank is late when another lacked it and it has not given up; where nobody is gone, also when it has, but had not
    begun: it came when the others had given up. A rank that waited in vain is never named.

    Args:
        seen: of each rank, this one included.
        given_up: what ranks have said that gave up.
    """
    lacked = {other for rank, said in given_up.items() for other in said.lacked if other != rank}
    fates = [FATES_OF.get(seen[rank], Fate.FINE) for rank in sorted(seen)]
    somebody_is_gone = any(fate is not Fate.FINE for fate in fates)
    for rank in lacked:
        waited = rank in given_up and (given_up[rank].began or somebody_is_gone)
        waited = waited or seen[rank] is Presence.WAITS
        if fates[rank] is Fate.FINE and not waited:
            fates[rank] = Fate.LATE if seen[rank] is not Presence.UNSEEN else Fate.UNSEEN
    explained = any(fate in (Fate.ENDED, Fate.STOPPED, Fate.SILENT, Fate.LATE) for fate in fates)
    # a rank of another host may wait for one of these itself
    return tuple(Fate.FINE if fate is Fate.UNSEEN and explained else fate for fate in fates)
