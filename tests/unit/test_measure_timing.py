"""Statistics of the benchmark, and the order of barriers, marks and calls, with a clock that records."""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ep_a2a.commands.measure import timing


def test_median_of_each_rank_then_the_slowest_rank():
    # rank 1 is slowest in the median, rank 0 has the outlier
    assert timing.summarize([[1.0, 2.0, 100.0], [4.0, 3.0, 5.0]]) == (4.0, 100.0)


def test_the_99th_percentile_is_that_of_the_slowest_rank_in_each_run():
    one = [float(run) for run in range(200)]
    other = [float(199 - run) for run in range(200)]
    # in run r the slower rank takes max(r, 199 - r): 100 to 199, each twice
    assert timing.summarize([one, other]) == (99.5, 198.0)


def test_ranks_have_as_many_runs():
    with pytest.raises(ValueError, match="shorter"):
        timing.summarize([[1.0, 2.0], [1.0]])


class RecordingClock(timing.Clock):
    """Counts microseconds in calls."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def align(self) -> None:
        self.events.append("align")

    def mark(self) -> int:
        self.events.append("mark")
        return len(self.events)

    def elapsed_us(self, start: int, end: int) -> float:
        return float(end - start)

    def synchronize(self) -> None:
        self.events.append("synchronize")

    def flush_cache(self) -> None:
        self.events.append("flush")


class Recording:
    """A dispatch and a combine that note their calls."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def dispatch(self) -> str:
        self.events.append("dispatch")
        return "handle"

    def combine(self, dispatched: str) -> None:
        assert dispatched == "handle"
        self.events.append("combine")

    def round_trip(self) -> None:
        self.combine(self.dispatch())


def test_each_op_stands_alone_behind_a_barrier():
    clock = RecordingClock()
    calls = Recording(clock.events)
    times = timing.time_apart(calls.dispatch, calls.combine, clock, timing.TimingSettings(num_warmups=2, num_runs=3))
    warmups = ["dispatch", "combine"] * 2
    run = ["align", "mark", "dispatch", "mark", "align", "mark", "combine", "mark"]
    assert clock.events == [*warmups, "synchronize", *run * 3, "synchronize"]
    assert times == ([2.0] * 3, [2.0] * 3)


def test_round_trips_follow_one_another_behind_one_barrier():
    clock = RecordingClock()
    settings = timing.TimingSettings(num_warmups=1, num_runs=2, num_round_trips=4)
    times = timing.time_calls(Recording(clock.events).round_trip, clock, settings)
    trips = ["dispatch", "combine"] * 4
    run = ["align", "mark", *trips, "mark"]
    assert clock.events == [*trips, "synchronize", *run * 2, "synchronize"]
    assert times == [9 / 4] * 2


def test_the_cache_is_flushed_before_each_round_trip_and_outside_its_time():
    clock = RecordingClock()
    settings = timing.TimingSettings(num_warmups=1, num_runs=2, num_round_trips=4)
    times = timing.time_calls(Recording(clock.events).round_trip, clock, settings, flushes=True)
    run = ["flush", "align", "mark", "dispatch", "combine", "mark"]
    assert clock.events == ["dispatch", "combine", "synchronize", *run * 2, "synchronize"]
    assert times == [3.0] * 2


def test_the_period_is_that_of_pairs_behind_others_without_a_barrier_between():
    clock = RecordingClock()
    periods = timing.pair_periods(Recording(clock.events).round_trip, clock)
    row = ["dispatch", "combine"] * timing.PAIRS_IN_A_ROW
    assert clock.events == [*["align", *row, "mark", *row, "mark"] * 4, "synchronize"]
    assert periods == [(2 * timing.PAIRS_IN_A_ROW + 1) / timing.PAIRS_IN_A_ROW] * 4


def test_what_a_graph_reads_is_kept_until_the_graph_is_freed(monkeypatch):
    """A replay reads the addresses that the call had; the next capture unmaps memory that was freed."""
    found: list[str] = []

    def made() -> tuple[weakref.ref[torch.Tensor], timing.CallsInARow]:
        copied = torch.zeros(1)
        kept = weakref.ref(copied)

        def replayed(label: str) -> None:
            found.append(f"{label} {'without' if kept() is None else 'with'} its input")

        graph = SimpleNamespace(replay=lambda: replayed("replay"), reset=lambda: replayed("reset"))
        monkeypatch.setattr(timing, "capture", lambda work, *_: work() or graph)
        clock = RecordingClock()
        clock.on_gpu = True
        return kept, timing.CallsInARow(lambda: copied.add_(1), clock, num_calls=2)

    kept, calls = made()
    calls.times_us(timing.TimingSettings(num_warmups=0, num_runs=2))
    calls.close()
    assert found == ["replay with its input"] * 2 + ["reset with its input"]
    del calls
    assert kept() is None


def test_graphs_of_one_timer_share_memory(monkeypatch):
    """A pool gives blocks that a capture has freed to captures on the same stream only."""
    places = []

    def captured(graph, pool=None, stream=None, **_):
        places.append((pool, stream))
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "graph", captured)
    for _ in range(2):
        timing.capture(lambda: None, lambda: None, RecordingClock(), "pool")
    assert places[0] == places[1]


def test_the_wall_clock_counts_microseconds(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    clock = timing.Clock(SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"), group=None))  # type: ignore[arg-type]
    clock.align()
    assert clock.elapsed_us(1_000, 3_500) == 2.5
    assert clock.mark() <= clock.mark()
