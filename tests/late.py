"""A rank that comes last to a meeting, without a clock."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

from torch.distributed import distributed_c10d

from ep_a2a import clock
from ep_a2a.testing import RankContext
from tests.waiting import PATIENCE_SECS


def come_last(context: RankContext, late_rank: int, meeting: str) -> None:
    """Returns on `late_rank` once all others have returned, which go on to the meeting and wait there.

    Args:
        meeting: its name, which no other meeting of these processes has.
    """
    if context.rank == late_rank:
        await_others(context, meeting)
    else:
        tell(context, meeting)


@contextlib.contextmanager
def last_of_those_who_wait(context: RankContext, late_rank: int, meeting: str) -> Iterator[None]:
    """Lets `late_rank` in once each other rank waits inside, on its host, by the clock of the package.

    Args:
        meeting: as of come_last.
    """
    if context.rank == late_rank:
        await_others(context, meeting)
        yield
        return
    plain_sleep, waits = clock.sleep, False

    def tell_and_sleep(secs: float) -> None:
        nonlocal waits
        if not waits:
            waits = True
            tell(context, meeting)
        plain_sleep(secs)

    with mock.patch.object(clock, "sleep", tell_and_sleep):
        yield


def tell(context: RankContext, meeting: str) -> None:
    """Says that this rank has come."""
    _store(context, meeting).set(str(context.rank), "")


def await_others(context: RankContext, meeting: str) -> None:
    """Returns when all other ranks have come."""
    store, names = _store(context, meeting), [str(rank) for rank in range(context.world_size) if rank != context.rank]
    store.wait(names, timedelta(seconds=PATIENCE_SECS))
    for name in names:
        store.delete_key(name)


def _store(context: RankContext, meeting: str) -> Any:
    return distributed_c10d.PrefixStore(f"late for {meeting}", distributed_c10d._get_process_group_store(context.group))
