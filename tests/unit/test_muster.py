"""Members that meet through a store: only those who are there at the same time, whatever has been before."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ep_a2a.errors import ConfigMismatchError, EpA2AError, RankTimeoutError
from ep_a2a.memory.muster import Muster
from ep_a2a.topology.facts import with_version

LABEL = "a meeting"
LONG_SECS = 60.0


class Parent:
    """Stands for a process group whose rank a thread is."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda parent: parent.rank)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def muster_of(store: dist.Store, rank: int, timeout_secs: float = LONG_SECS, num_members: int = 3) -> Muster:
    parent: Any = Parent(rank)
    return Muster(parent, timeout_secs, range(num_members), store)


def attempt(store: dist.Store, rank: int, timeout_secs: float = LONG_SECS) -> str | tuple[int, ...]:
    """The name of a meeting, or whom the rank missed."""
    muster = muster_of(store, rank, timeout_secs)
    try:
        name = muster.meet(LABEL)
        assert muster.tell(name, succeeded=True, deadline=time.monotonic() + LONG_SECS) == (True, ())
        return name
    except RankTimeoutError as error:
        return error.missing_ranks
    finally:
        muster.end()


def test_each_meeting_has_a_name_of_its_own(store):
    with ThreadPoolExecutor(3) as pool:
        names = [set(pool.map(lambda rank: attempt(store, rank), range(3))) for _ in range(4)]
    assert [len(each) for each in names] == [1] * 4
    assert len(set().union(*names)) == 4


def test_those_who_are_there_at_last_meet(store):
    """Ranks 0 and 1 have missed rank 2, alone and together, and it them."""
    assert attempt(store, 0, 0.1) == (1, 2)
    assert attempt(store, 0, 0.1) == (1, 2)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda rank: attempt(store, rank, 1.0), range(2))) == [(2,), (2,)]
        assert attempt(store, 2, 0.1) == (0, 1)
        names = list(pool.map(lambda rank: attempt(store, rank), range(3)))
    assert len(set(names)) == 1
    assert isinstance(names[0], str)


def test_a_member_that_gives_up_and_comes_again_brings_nobody_out_of_step(store):
    """Rank 1 has read rank 0's first ticket when rank 0 gives up and comes again, and rank 2 comes last of all."""
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(attempt, store, 1)
        assert attempt(store, 0, 0.5) == (2,)
        others = [pool.submit(attempt, store, rank) for rank in (0, 2)]
        names = {each.result() for each in (first, *others)}
    assert len(names) == 1


def test_the_ticket_of_a_member_that_died_meets_nobody(store):
    with ThreadPoolExecutor(3) as pool:
        dead = pool.submit(muster_of(store, 2, 0.1).meet, LABEL)
        assert isinstance(dead.exception(), RankTimeoutError)
        # its ticket stands: it has not said that it ends
        assert list(pool.map(lambda rank: attempt(store, rank, 1.0), range(2))) == [(2,), (2,)]
        names = set(pool.map(lambda rank: attempt(store, rank), range(3)))
    assert len(names) == 1


@pytest.mark.parametrize("has_come", [False, True])
def test_who_gives_up_a_moment_before_is_not_blamed(store, has_come):
    """The third stays away, or dies before it has read the others' tickets."""
    if has_come:
        keys = dist.PrefixStore("ep_a2a/of/0,1,2", store)
        keys.set("read/2", "")
        keys.set("ticket/2", json.dumps(with_version({"ticket": "of the dead"})))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda rank: attempt(store, rank, 1.0 + 0.3 * rank), range(2))) == [(2,), (2,)]


def test_all_hear_how_each_goes_on(store):
    """One that has failed, and one that says nothing."""

    def go_on(rank: int) -> tuple[bool, tuple[int, ...]]:
        return muster_of(store, rank).tell("a name", succeeded=rank != 1, deadline=time.monotonic() + LONG_SECS)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(go_on, range(3))) == [(False, ())] * 3
    assert muster_of(store, 0).tell("another", succeeded=True, deadline=time.monotonic()) == (False, (1, 2))


def test_of_those_who_were_never_there_together_the_absent_are_blamed(store):
    with ThreadPoolExecutor(3) as pool:
        waits = pool.submit(attempt, store, 0, 3.0)
        assert attempt(store, 1, 0.2) == (2,)
        third = pool.submit(attempt, store, 2)
        assert waits.result() == (1,)
        names = {*pool.map(lambda rank: attempt(store, rank), range(2)), third.result()}
    assert len(names) == 1


@pytest.mark.parametrize("text", [b"\xff", b"{}", b"[" * 100_000, b"3"])
def test_a_stranger_in_the_store_is_an_error(store, text):
    keys = dist.PrefixStore("ep_a2a/of/0,1", store)
    keys.set("read/1", "x")
    keys.set("ticket/1", text)
    muster = muster_of(store, 0, 0.2, num_members=2)
    with pytest.raises(EpA2AError, match=r"rank 1|ranks \[1\]"):
        muster.meet(LABEL)


def test_another_wire_format_is_told(store):
    keys = dist.PrefixStore("ep_a2a/of/0,1", store)
    keys.set("read/1", "")
    keys.set("ticket/1", '{"ticket": "of an older package"}')
    with pytest.raises(ConfigMismatchError, match="one wire format version"):
        muster_of(store, 0, num_members=2).meet(LABEL)
