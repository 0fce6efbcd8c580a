"""Ranks of several hosts hear who lives elsewhere, and take one verdict; see memory/other_hosts.py."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_a2a.memory import liveness, other_hosts
from ep_a2a.memory.liveness import GivenUp, Liveness, Presence
from ep_a2a.memory.other_hosts import Report, Said, Seen
from ep_a2a.ops import agreement
from ep_a2a.ops.agreement import Agreement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORLD_SIZE = 3
BOUND_SECS = 5.0
"""Longer than a loaded machine keeps threads waiting."""
PATIENCE_SECS = 20.0
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
)


class Meeting:
    """Stands for the Rendezvous of ranks that are threads of this process, each on a host of its own."""

    store_host = "127.0.0.1"
    world_size = WORLD_SIZE

    def __init__(self, rank: int, barrier: threading.Barrier, messages: dict[tuple[str, int], Any]) -> None:
        self.rank, self._barrier, self._messages = rank, barrier, messages

    def exchange(self, label: str, message: Any) -> list[Any]:
        self._messages[label, self.rank] = message
        self._barrier.wait(PATIENCE_SECS)
        return [self._messages[label, rank] for rank in range(WORLD_SIZE)]


@pytest.fixture
def ranks(monkeypatch) -> Iterator[list[Liveness]]:
    """Three hosts of one rank each, which have heard each other."""
    # threads of a loaded machine may be late to give up; shorter than the joins wait for verdicts
    monkeypatch.setattr(agreement, "PATIENCE_SECS", 0.75 * PATIENCE_SECS)
    monkeypatch.setattr(liveness, "_open_first", lambda names, own, descriptor, size: (own, descriptor))
    barrier, messages = threading.Barrier(WORLD_SIZE), {}
    found: dict[int, Liveness] = {}

    def meet(rank: int) -> None:
        found[rank] = Liveness.meet(Meeting(rank, barrier, messages))

    in_threads([lambda rank=rank: meet(rank) for rank in range(WORLD_SIZE)])
    ranks = [found[rank] for rank in range(WORLD_SIZE)]
    assert all(becomes(each, other, Presence.RUNS) for each in ranks for other in range(WORLD_SIZE))
    yield ranks
    for each in found.values():
        each.close()


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    results: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda place=place, call=call: results.update({place: call()}))
        for place, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECS)
    return [results.get(place) for place in range(len(calls))]


def begun(ranks: list[Liveness]) -> list[Agreement]:
    """Each rank's agreement on a first failure."""
    agreements = [Agreement(each, rank, WORLD_SIZE) for rank, each in enumerate(ranks)]
    for each in agreements:
        each.begin_anew()
    return agreements


def fall_silent(rank: Liveness) -> None:
    """As if the host were gone: nothing more is sent."""
    rank.others._mouth.peers.clear()
    rank.others._mouth.socket.close()


def becomes(rank: Liveness, other: int, presence: Presence, bound_secs: float = BOUND_SECS) -> bool:
    deadline = time.monotonic() + PATIENCE_SECS
    while time.monotonic() < deadline:
        if rank.presence(other, bound_secs) is presence:
            return True
        time.sleep(0.01)
    return False


def test_presence_on_other_hosts(ranks):
    assert all(becomes(ranks[0], rank, Presence.RUNS) for rank in range(WORLD_SIZE))
    with ranks[1].waiting():
        assert becomes(ranks[0], 1, Presence.WAITS)
    fall_silent(ranks[2])
    assert becomes(ranks[0], 2, Presence.PAUSED, 60.0)
    assert becomes(ranks[0], 2, Presence.SILENT)
    assert becomes(ranks[0], 1, Presence.RUNS)


def test_a_rank_that_has_left_is_not_gone(ranks):
    ranks[2].close()
    time.sleep(BOUND_SECS + other_hosts.SILENCE_SECS)
    assert ranks[0].presence(2, BOUND_SECS) is Presence.RUNS


@pytest.mark.parametrize("silent_secs", [0.0, BOUND_SECS])
def test_survivors_of_several_hosts_take_one_verdict(ranks, silent_secs):
    """Rank 1 lacks rank 0, which waits itself; rank 2 is gone. A lost connection may be seen as soon as it is lost."""
    agreements = begun(ranks)
    fall_silent(ranks[2])
    time.sleep(silent_secs)
    said = {0: GivenUp((2,), began=True), 1: GivenUp((0, 2), began=True)}
    start = time.monotonic()
    verdicts = in_threads([lambda rank=rank: agreements[rank].verdict(said[rank], BOUND_SECS) for rank in said])
    assert time.monotonic() - start < BOUND_SECS + PATIENCE_SECS
    assert [(each.missing, each.late) for each in verdicts] == [((2,), ())] * 2, verdicts
    assert "has not been heard" in str(verdicts[0])


def test_a_wait_that_another_host_spoke_of_may_have_ended_with_the_host(ranks):
    agreements = begun(ranks)
    with ranks[2].waiting():
        assert all(becomes(each, 2, Presence.WAITS) for each in ranks[:2])
        fall_silent(ranks[2])
        lacks = GivenUp((2,), began=True)
        verdicts = in_threads([lambda each=each: each.verdict(lacks, BOUND_SECS) for each in agreements[:2]])
    assert [(each.missing, each.late) for each in verdicts] == [((2,), ())] * 2, verdicts


def test_a_rank_of_another_host_that_waits_for_one_that_is_gone_is_not_late(ranks):
    """Rank 0 lacks rank 1 of another host, which waits for rank 2 in a kernel and gives up a bound later."""
    agreements = begun(ranks)
    fall_silent(ranks[2])
    # its neighbours on its host have said that it ended
    for each in ranks[:2]:
        each.others._heard[2] = time.monotonic(), Report({2: Seen(int(Presence.ENDED), 0.0)}, (), {})

    def later() -> Any:
        time.sleep(3)
        return agreements[1].verdict(GivenUp((2,), began=True), BOUND_SECS)

    verdicts = in_threads([lambda: agreements[0].verdict(GivenUp((1,), began=True), BOUND_SECS), later])
    assert [(each.missing, each.late) for each in verdicts] == [((2,), ())] * 2, verdicts


@settings(max_examples=200)
@given(value=JSON)
def test_any_report_is_read_or_refused(value):
    try:
        report = Report.from_json(value, WORLD_SIZE)
    except (ValueError, TypeError, OverflowError):
        return
    assert isinstance(report, Report)


def test_a_report_comes_as_it_was_sent():
    report = Report({1: Seen(1, 0.25)}, (Said(7, 1, (0, 2), True),), {7: (0, 1, 2)})
    assert Report.from_json(json.loads(json.dumps(report.to_json())), WORLD_SIZE) == report


def test_a_socket_beyond_the_descriptors_of_select_is_heard(ranks):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = 1100
    if hard != resource.RLIM_INFINITY and hard <= number:
        pytest.skip(f"the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number + 1), hard))
    mouth, stopping = ranks[0].others._mouth, threading.Event()
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as low,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer,
    ):
        low.bind(("127.0.0.1", 0))
        own = socket.socket(fileno=os.dup2(low.fileno(), number))
        report = Report({1: Seen(1, 0.0)}, (), {})
        ear = other_hosts._Mouth(own, {1: peer.getsockname()}, mouth.token, 0, lambda: lambda: report)
        heard: dict[int, Any] = {}
        listener = threading.Thread(target=other_hosts._listen, args=(ear, heard, [0.0], WORLD_SIZE, stopping))
        listener.start()
        peer.sendto(json.dumps([mouth.token, 1, report.to_json()]).encode(), own.getsockname())
        deadline = time.monotonic() + PATIENCE_SECS
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)
        stopping.set()
        listener.join(PATIENCE_SECS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(heard) == [1]


def test_nothing_undoes_a_goodbye():
    """The listener may be about to speak when the thread that closes says goodbye."""
    report = Report({1: Seen(1, 0.0)}, (), {})
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer,
    ):
        peer.bind(("127.0.0.1", 0))
        peer.settimeout(PATIENCE_SECS)
        mouth = other_hosts._Mouth(own, {1: peer.getsockname()}, "token", 0, lambda: lambda: report)
        mouth.speak()
        mouth.speak(leaves=True)
        mouth.speak()
        said = [Report.from_json(json.loads(peer.recv(5000))[2], WORLD_SIZE).leaves for _ in range(3)]
    assert said == [False, True, True]


def test_a_goodbye_may_come_from_within_a_report():
    """Garbage collection may close an arena there."""
    report, mouths = Report({1: Seen(1, 0.0)}, (), {}), []

    def close_meanwhile() -> Report:
        if len(mouths) == 1:
            mouths.append(None)
            mouths[0].speak(leaves=True)
        return report

    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer,
    ):
        peer.bind(("127.0.0.1", 0))
        mouths.append(other_hosts._Mouth(own, {1: peer.getsockname()}, "token", 0, lambda: close_meanwhile))
        speaker = threading.Thread(target=mouths[0].speak, daemon=True)
        speaker.start()
        speaker.join(PATIENCE_SECS)
        assert not speaker.is_alive()
        peer.settimeout(PATIENCE_SECS)
        assert Report.from_json(json.loads(peer.recv(5000))[2], WORLD_SIZE).leaves
        peer.settimeout(0.2)
        with pytest.raises(TimeoutError):
            peer.recv(5000)


def test_a_report_leaves_out_failures_where_it_does_not_fit():
    everybody = tuple(range(1024))
    said = tuple(Said(failure, rank, everybody, True) for failure in (3, 4, 5) for rank in range(8))
    report = Report({1: Seen(1, 0.0)}, said, {4: (0,) * 1024, 5: (0,) * 1024})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        text = other_hosts._Mouth(own, {}, "token", 0, lambda: None)._datagram(report)
    told = Report.from_json(json.loads(text)[2], 1024)
    assert len(text) <= other_hosts.MAX_DATAGRAM_BYTES
    # the first has no verdict yet
    assert {each.failure for each in told.said} == {3}
    assert (told.seen, told.verdicts) == (report.seen, {})


def test_foreign_datagrams_change_nothing(ranks):
    port = ranks[0].others._mouth.socket.getsockname()[1]
    token = ranks[0].others._mouth.token
    report = Report({1: Seen(int(Presence.ENDED), 0.0)}, (), {}).to_json()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for text in (
            b"\xff",
            b"[]",
            json.dumps(["other", 1, report]).encode(),
            json.dumps([token, 1, 3]).encode(),
            json.dumps([token, [], report]).encode(),
            b"[" * 5000,
        ):
            stranger.sendto(text, ("127.0.0.1", port))
    time.sleep(2 * other_hosts.SPEAK_SECS)
    # not as a stranger has said: at most a loaded machine lets it pause
    assert ranks[0].presence(1, 60.0) in (Presence.RUNS, Presence.PAUSED)
