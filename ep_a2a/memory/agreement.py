"""Agreement of the ranks on who is gone or late: between a wait that has expired and the error that is raised."""

from ep_a2a import clock
from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory.peers import Peers
from ep_a2a.memory.verdict import GivenUp, Verdict, judge

PATIENCE_SECS = 2.0
"""How long the first rank to give up waits for the others to give up, too, before it calls them late."""
LOOK_SECS = 0.02


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
    found = peers.verdict(given_up.failure)
    if found is None:
        peers.give_up(given_up)
    over_at = clock.now() + left_secs + PATIENCE_SECS
    while found is None:
        is_over = clock.now() >= over_at
        judged = judge(given_up.failure, peers.see(bound_secs), since=given_up.at - 2 * bound_secs, is_over=is_over)
        found = peers.verdict(given_up.failure) if judged is None else peers.record(given_up.failure, judged)
        if found is None:
            clock.sleep(LOOK_SECS)
    return found


def agreed_error(
    error: RankTimeoutError, peers: Peers, given_up: GivenUp, bound_secs: float, start: float
) -> RankTimeoutError:
    """Returns the error of a wait on the host with the verdict that the ranks agree on.

    Args:
        error: of the wait.
        peers: the group.
        given_up: the call that waited.
        bound_secs: of the wait, which began at `start`; a lost connection may have ended it before.
    """
    verdict = agree(peers, given_up, bound_secs, left_secs=max(0.0, start + bound_secs - given_up.at))
    return verdict.error(peers.rank, error.expected, error.got, error.remedy)
