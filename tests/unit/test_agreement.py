"""Who is gone, who is late and who waits elsewhere, by a clock that only the test moves."""

import functools
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_a2a import clock
from ep_a2a.errors import RankTimeoutError
from ep_a2a.kernels.layout import Record
from ep_a2a.memory import host_record, peers, rendezvous
from ep_a2a.memory.agreement import agree
from ep_a2a.memory.peers import Peers
from ep_a2a.memory.verdict import GivenUp, Seen, Verdict, judge, judge_meeting
from ep_a2a.ops.memory import FIRST_JUDGED_WAIT, PoisonWord
from tests.waiting import await_until

BOUND_SECS, CPU = 10.0, torch.device("cpu")
HERE, THERE = "the step", "a step of another op"


def gave_up(*awaited: int, failure: str = HERE, waited: bool = True, at: float = 100.0) -> GivenUp:
    return GivenUp(failure, f"dispatch of {failure}", awaited, waited, at)


CAME_LATE = gave_up(waited=False)
ELSEWHERE = gave_up(0, failure=THERE)
CALLS = ((0, f"dispatch of {HERE}"), (1, f"dispatch of {THERE}"))
CASES: dict[str, tuple[str, dict[int, GivenUp], Verdict | None]] = {
    "one has ended": ("aag", {0: gave_up(1, 2)}, Verdict((2,))),
    "two have ended": ("agag", {0: gave_up(1)}, Verdict((1, 3))),
    "one has ended, and another one is late": ("aag", {0: gave_up(1)}, Verdict((2,))),
    "one of another host may be gone": ("aau", {0: gave_up(1, 2)}, None),
    "others may still give up": ("aa", {0: gave_up(1)}, None),
    "one is late and has come meanwhile": ("aa", {0: gave_up(1), 1: CAME_LATE}, Verdict(late=(1,))),
    "a late one awaits itself": ("aa", {0: gave_up(1), 1: gave_up(1, waited=False)}, Verdict(late=(1,))),
    "a rank that waits is never late": ("aa", {0: gave_up(1), 1: gave_up(0)}, Verdict()),
    "two calls in another order": ("aa", {0: gave_up(1), 1: ELSEWHERE}, Verdict(calls=CALLS)),
    "all but a late one wait": (
        "aaa",
        {0: gave_up(1, 2), 1: gave_up(2, failure=THERE), 2: CAME_LATE},
        Verdict(late=(2,)),
    ),
    "what was given up long ago": ("aa", {0: gave_up(1), 1: ELSEWHERE._replace(at=1.0)}, Verdict(late=(1,))),
}
OVER_CASES: dict[str, tuple[dict[int, GivenUp], set[int], set[int], Verdict]] = {
    # given up, ranks of this host, and those that wait on the host
    "who says nothing is late": ({0: gave_up(1, 2)}, set(), set(), Verdict(late=(1, 2))),
    "unless it waits on the host": ({0: gave_up(1, 2)}, set(), {2}, Verdict(late=(1,))),
    "nobody who was awaited": ({0: gave_up(1), 1: gave_up(0)}, {0, 1, 2}, set(), Verdict(late=(2,))),
    "nobody of this host": ({0: gave_up(1), 1: gave_up(0)}, {0, 1}, set(), Verdict()),
}


def seen(states: str, *args: Any) -> Seen:
    """What a rank sees of ranks that are a(live), u(nheard) or g(one)."""
    gone, unheard = (frozenset(rank for rank, each in enumerate(states) if each == state) for state in "gu")
    return Seen(len(states), gone, unheard, *args)


@pytest.mark.parametrize("name", CASES)
def test_judge(name: str) -> None:
    states, given_up, expected = CASES[name]
    assert judge(HERE, seen(states, given_up), since=50.0) == expected


@pytest.mark.parametrize("name", OVER_CASES)
def test_judge_in_the_end(name: str) -> None:
    given_up, local, blocked, expected = OVER_CASES[name]
    assert judge(HERE, seen("aaa", given_up, frozenset(local), frozenset(blocked)), is_over=True) == expected


@pytest.mark.parametrize(
    ("states", "given_up", "expected"),
    [
        ("aga", {}, Verdict((1,))),
        # nobody has seen rank 1
        ("aua", {}, Verdict((1,), (2,))),
        ("aaa", {}, Verdict(late=(1, 2))),
        ("aaa", {1: ELSEWHERE}, Verdict(late=(1, 2), calls=((0, "the meeting"), CALLS[1]))),
        # before the meeting
        ("aaa", {1: ELSEWHERE._replace(at=1.0)}, Verdict(late=(1, 2))),
    ],
)
def test_judge_a_meeting(states: str, given_up: dict[int, GivenUp], expected: Verdict) -> None:
    meeting = GivenUp("meeting", "the meeting", (1, 2), waited=True, at=100.0, is_meeting=True)
    assert judge_meeting(0, meeting, seen(states, given_up), since=50.0) == expected


def test_words() -> None:
    for verdict, rank, said, remedy in (
        (Verdict((1, 2)), 0, "ranks 1, 2 are gone", RankTimeoutError.remedy),
        (Verdict(late=(1,)), 0, "rank 1 is late", RankTimeoutError.remedy),
        (Verdict(late=(1,)), 1, "this rank, 1, came after the others had given up", RankTimeoutError.remedy),
        (Verdict(calls=CALLS), 0, f"rank 0 in {CALLS[0][1]}, rank 1 in {CALLS[1][1]}", "in the same order"),
        (Verdict(), 0, "no rank is gone or late", "EP_A2A_TIMEOUT_SECS"),
    ):
        told = verdict.error(rank, "every rank", "nobody")
        assert (told.missing_ranks, told.late_ranks) == (verdict.missing, verdict.late)
        assert said in str(told)
        assert "Seen here: nobody" in str(told)
        assert remedy in told.remedy


# --- ranks of one host and of several ---


class Time:
    """A clock that stands still but for sleeps; `at` a time something happens."""

    def __init__(self) -> None:
        self.now, self.at = 100.0, {}

    def sleep(self, secs: float) -> None:
        self.now += secs
        for moment in sorted(self.at):
            if moment <= self.now:
                self.at.pop(moment)()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(clock, "now", lambda: made.now)
    monkeypatch.setattr(clock, "sleep", made.sleep)
    # the test looks and beats itself
    ended = threading.Thread()
    ended.start()
    monkeypatch.setattr(peers, "_start", lambda *_: ended)
    return made


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def view(store: dist.Store, time: Time, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Peers]:
    """Makes the view of a rank. All are in one process, which sees its own locks as free: `dead` says who has ended."""
    dead: set[int] = set()
    monkeypatch.setattr(host_record.HostRecord, "has_ended", lambda record, rank: rank in dead)

    def make(rank: int, host: str = "a", world_size: int = 3) -> Peers:
        monkeypatch.setattr(host_record, "host_identity", lambda: host)
        return Peers(rank, world_size, store)

    make.dead = dead
    return make


def beat(ranks: Sequence[Peers]) -> None:
    for each in ranks:
        each.look()
        each.beat()


def all_of(view: Callable[..., Peers], hosts: str = "aaa") -> list[Peers]:
    made = [view(rank, host, len(hosts)) for rank, host in enumerate(hosts)]
    for _ in range(2):
        beat(made)
    return made


HOST_SECS = 100.0 + BOUND_SECS
DEATHS: dict[str, tuple[str, dict[int, float], tuple[int, ...], float, float]] = {
    # hosts, times of deaths by rank, ranks that go on beating, and when there is a verdict
    "two of a host": ("aaa", {2: 100.0, 1: 100.5}, (0,), 101.3, 101.5),
    "seen on another host": ("abb", {2: 100.0}, (1, 0), 101.8, 102.8),
    "a silent host": ("abc", {2: 100.0}, (1, 0), HOST_SECS, HOST_SECS + peers.HEART_SECS + 0.2),
}


@pytest.mark.parametrize("name", DEATHS)
def test_who_is_gone_is_written_down(name: str, view: Any, time: Time) -> None:
    hosts, deaths, living, least_secs, most_secs = DEATHS[name]
    ranks = all_of(view, hosts)
    beats = [ranks[rank] for rank in living]
    time.at = {100.0 + turn * peers.HEART_SECS: functools.partial(beat, beats) for turn in range(1, 50)}
    time.at |= {at + 0.01: functools.partial(view.dead.add, rank) for rank, at in deaths.items()}
    verdict = Verdict(tuple(sorted(deaths)))
    assert agree(ranks[0], gave_up(1, 2), BOUND_SECS) == verdict
    assert least_secs <= time.now < most_secs
    # nothing is judged anew
    view.dead.add(1)
    assert agree(ranks[living[0]], gave_up(0), BOUND_SECS) == verdict


def test_the_first_verdict_counts(view: Any) -> None:
    first, second, _ = all_of(view)
    assert first.record(HERE, Verdict((1,))) == Verdict((1,))
    # it has judged before it could read the first one's verdict
    assert second.record(HERE, Verdict((2,))) == Verdict((1,)) == first.verdict(HERE)


@pytest.mark.parametrize("wait", ["on the host", "given up", "in a meeting"])
def test_a_stopped_rank_is_late_whatever_it_waited_for(wait: str, view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = all_of(view)
    second.give_up(gave_up(2))
    if wait != "on the host":
        third.give_up(gave_up(0)._replace(is_meeting=wait == "in a meeting"))
    holders = {1: 100, 2: 200} | ({5: 200} if wait == "on the host" else {})
    monkeypatch.setattr(host_record.HostRecord, "_holder", lambda _, byte: holders.get(byte))
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"1 (a b) c) %c 1" % b"ST"["200" in str(path)])
    assert agree(first, gave_up(2), BOUND_SECS) == Verdict(late=(2,))


LOOKS = math.ceil(2 * peers.TRIAL_SECS / peers.BEAT_SECS)
TRIALS: dict[str, tuple[dict[int, set[int] | None], tuple[int, ...]]] = {
    # by rank whom it awaits for too long, None where it waits for nobody; and who is masked
    "one hangs": ({0: {2}, 1: {2}, 2: None}, (2,)),
    "one that waits itself is never masked": ({0: {1}, 1: set(), 2: None}, ()),
    "ranks that wait for each other": ({0: {1}, 1: {2}, 2: {0}}, ()),
    "two hang": ({0: {1}, 1: None, 2: None}, (1,)),
    "nobody for too long": ({0: set(), 1: set(), 2: None}, ()),
}


def losses_of(peer: Peers, *awaited: set[int]) -> list[Any]:
    """What a rank that awaits others loses from now on."""
    losses: list[Any] = []
    arena = SimpleNamespace(awaited=lambda: [*awaited], lose=lambda *lost: losses.append(lost), device=CPU)
    peer.alarms = [arena]  # type: ignore[assignment]
    return losses


def watch(ranks: Sequence[Peers], time: Time) -> None:
    """For as long as a trial lasts."""
    for _ in range(LOOKS):
        for each in ranks:
            each.watch()
        time.sleep(peers.BEAT_SECS)


@pytest.mark.parametrize("name", TRIALS)
def test_who_is_masked(name: str, view: Any, time: Time) -> None:
    awaited, expected = TRIALS[name]
    ranks = all_of(view)
    losses = [losses_of(each, *[] if found is None else [found]) for each, found in zip(ranks, awaited.values())]
    watch(ranks, time)
    assert losses == [[((), {*expected})] if expected else []] * 3


def test_a_rank_that_computes_on_the_cpu_is_not_masked(view: Any, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy host may leave it no core for long."""
    first, *_ = all_of(view)
    losses = losses_of(first, {2})
    monkeypatch.setattr(host_record.HostRecord, "computes", lambda _, rank: rank == 2)
    watch([first], time)
    assert losses == []
    monkeypatch.setattr(host_record.HostRecord, "computes", lambda *_: False)
    watch([first], time)
    assert losses == [((), {2})]


def test_a_process_that_is_stopped_does_not_wait(time: Time) -> None:
    config: Any = SimpleNamespace(masks=True, rank=0, world_size=3, mask_after_secs=10.0)
    record = torch.zeros(Record.RANKS + 2 * 3, dtype=torch.int32).numpy()
    word = PoisonWord(config, torch.zeros(3, dtype=torch.int32), record)

    def look() -> set[int] | None:
        record[Record.WAITS], record[Record.RANKS + 3 + 1] = FIRST_JUDGED_WAIT, 1
        return word.awaited()

    assert look() == set()
    time.sleep(30)
    assert look() == set()
    found = []
    for _ in range(math.ceil(10 / peers.BEAT_SECS)):
        time.sleep(peers.BEAT_SECS)
        found.append(look())
    assert (found[0], found[-1]) == (set(), {1})


def test_a_masked_rank_accuses_nobody(view: Any, time: Time) -> None:
    first, *_ = all_of(view)
    losses = losses_of(first, {2})
    first.masked = {0}
    watch([first], time)
    assert losses == []


def test_a_death_masks_at_once(view: Any, time: Time) -> None:
    first, *_ = all_of(view)
    losses = losses_of(first)
    view.dead.add(2)
    first.watch()
    time.sleep(peers.GRACE_SECS)
    first.watch()
    assert losses == [((), {2}), ((2,), {2})]


def test_a_store_that_ends_silences_other_hosts(view: Any, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = all_of(view, "abc")

    def fail(*_: Any) -> Any:
        raise RuntimeError("connection refused")

    monkeypatch.setattr(first, "_store", type("Ended", (), {"set": fail, "compare_set": fail})())
    assert not first.beat()
    assert agree(first, gave_up(1), BOUND_SECS) == Verdict((1, 2))


def test_what_a_stranger_writes_into_the_store_is_no_death(view: Any, store: dist.Store) -> None:
    first, *_ = all_of(view, "abb")
    for text in ("", "[]", "[1, [7, -1]]", "[1, 2]", "{", "[1, [0]]", "[" * 100_000):
        store.set("ep_a2a/peers/beat/1", text)
        assert first.beat()
    assert first.settle() == ()


def test_lines_of_another_group_change_nothing(view: Any) -> None:
    """A stranger who writes to the store can name any record of this user."""
    first, second, *_ = all_of(view, "aaa")
    for line in (
        "{",
        "[1]",
        "[" * 100_000,
        "\xff{}",
        '{"joined": 7}',
        '{"joined": [0]}',
        '{"rank": 9, "given_up": ["f", "c", [], true, 1.0, false]}',
        '{"rank": 1, "given_up": ["f", "c", ["x"], true, 1.0, false]}',
        '{"rank": 1, "given_up": ["f", "c", [], true, "now", false]}',
        '{"rank": 1, "given_up": 3}',
        '{"failure": "f", "verdict": [["x"], [], []]}',
        '{"failure": [], "verdict": [[], [], []]}',
        '{"another": 1}',
    ):
        os.write(first.host_record._descriptor, line.encode("latin-1") + b"\n")
    assert second.look() == ()
    assert second.see().local == {0, 1, 2}
    assert second.see().given_up == {}
    assert second.verdict("f") is None


def test_a_meeting_of_some_ranks_names_those_of_them_that_die(
    view: Any, store: dist.Store, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = all_of(view, "aaaaa")
    monkeypatch.setattr(rendezvous, "peers_of", lambda _: first)
    group: Any = None
    meeting = rendezvous.Rendezvous(group, ranks=(0, 2, 3))
    # rank 2 has come
    store.set("ep_a2a/of/0,2,3/1/1", "")
    deaths = {1: 101.0, 2: 101.2, 3: 101.5}
    time.at = {at: functools.partial(view.dead.add, rank) for rank, at in deaths.items()}
    with pytest.raises(RankTimeoutError) as caught:
        meeting.barrier("a meeting")
    assert caught.value.missing_ranks == (2, 3)
    assert time.now < 101.5 + peers.GRACE_SECS + 0.2


@pytest.fixture
def meetings(view: Any, monkeypatch: pytest.MonkeyPatch) -> list[rendezvous.Rendezvous]:
    """Of two ranks of one host."""
    group: Any = None
    made = []
    for each in all_of(view, "aa"):
        monkeypatch.setattr(rendezvous, "peers_of", lambda _, each=each: each)
        made.append(rendezvous.Rendezvous(group))
    return made


def test_a_meeting_against_a_step_is_told_to_both(meetings: Any, time: Time) -> None:
    first, second = meetings[0].peers, meetings[1].peers
    verdicts = []
    # after more than two bounds: the meeting still lasts
    time.at = {150.0: lambda: verdicts.append(agree(second, gave_up(0, failure=THERE, at=150.0), BOUND_SECS))}
    with pytest.raises(RankTimeoutError, match="rank 0 in the meeting 'reset', rank 1 in dispatch") as caught:
        meetings[0].barrier("reset")
    assert (caught.value.missing_ranks, caught.value.late_ranks) == ((), (1,))
    assert "in the same order on every rank" in caught.value.remedy
    assert verdicts == [Verdict(late=(0,), calls=((0, "the meeting 'reset'"), CALLS[1]))]
    assert first.verdict(THERE) == verdicts[0]


def test_a_meeting_that_ends_is_no_wait_any_more(meetings: Any, time: Time) -> None:
    time.at = {105.0: lambda: meetings[1].barrier("build")}
    meetings[0].barrier("build")
    assert meetings[1].peers.see().given_up == {}


def test_ranks_without_the_file_count_as_another_host(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = view(0)
    first.host_record.unlink()
    second = view(1)
    second.look()
    assert (first._joined, second._joined) == ({0}, {1})
    monkeypatch.setattr(host_record, "create_private", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    third = view(2)
    third.give_up(gave_up(0))
    assert third.record(HERE, Verdict((1,))) == Verdict((1,)) == third.verdict(HERE)


HOLDER = """
import sys, time
import torch.distributed as dist
from ep_a2a.memory.peers import Peers
there = Peers(1, 2, dist.FileStore(sys.argv[1]))
with there.host_record.waiting():
    print("waits", flush=True)
    sys.stdin.readline()
print("goes on", flush=True)
sys.stdin.readline()
"""


def test_the_lock_of_a_process_falls_with_it(tmp_path: Any) -> None:
    own = Peers(0, 2, dist.FileStore(str(tmp_path / "store")))
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waits\n"
        own.look()
        assert own.host_record.waits(1)
        for number, stops in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
            process.send_signal(number)
            await_until(lambda stops=stops: own.host_record.is_stopped(1) == stops, "the signal to arrive")
            assert own.host_record.waits(1) != stops
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "goes on\n"
        assert not own.host_record.waits(1)
        assert own.settle() == ()
        process.kill()
        process.wait()
        assert own.settle() == (1,)
