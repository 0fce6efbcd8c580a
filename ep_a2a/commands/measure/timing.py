"""Times a session in microseconds: every op behind a device barrier, medians per rank, the slowest rank counts.

On a GPU a sleep holds up the stream first, so that the host has queued everything when the barrier releases all ranks.
On CPU the wall clock is read; such times say nothing about GPUs.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ep_a2a.commands.bench.contenders import Session
    from ep_a2a.memory.rendezvous import Rendezvous
    from ep_a2a.testing.worker import RankContext

HOLD_SECS = 1e-3
"""Seconds that a stream is held up while the host queues the barrier and the work behind it."""
FALLBACK_CLOCK_KHZ = 1_980_000
HOST_CALLS_PER_BATCH = 50
"""Round trips queued between two synchronisations; a full launch queue would make the host wait."""
CAPTURE_WARMUPS = 4
FLUSH_BYTES = 256 << 20
"""Bytes written to empty a GPU's L2 of everything else: twice the largest L2, or more."""


@dataclass(frozen=True)
class TimingSettings:
    """Numbers of runs.

    Attributes:
        num_warmups: untimed runs before the timed ones.
        num_runs: timed runs.
        num_round_trips: round trips in one CUDA graph (on CPU: between two readings of the clock).
        num_host_calls: eager calls over which host time is averaged; none on CPU.
        cold_cache: whether single round trips behind a flush of the L2 are timed, too, on GPUs. Where ranks share a
            GPU they always are.
    """

    num_warmups: int = 20
    num_runs: int = 50
    num_round_trips: int = 10
    num_host_calls: int = 200
    cold_cache: bool = False


@dataclass(frozen=True)
class Statistic:
    """Microseconds of one op or round trip over all runs and ranks.

    Attributes:
        p50_us: median over the runs of each rank, maximum over ranks.
        p99_us: 99th percentile over the runs of the maximum over ranks in each run.
    """

    p50_us: float
    p99_us: float


@dataclass(frozen=True)
class Timing:
    """Times of one session, the same on all ranks.

    Attributes:
        dispatch, combine: one op alone behind a barrier, whose skew is in it.
        round_trip: one of `num_round_trips` dispatch + combine in a row.
        in_graph: whether those were replayed from a CUDA graph.
        dispatch_host_us, combine_host_us: time that one eager call keeps the host busy; None on CPU.
        round_trip_cold: one dispatch + combine with nothing in the L2; None where it was not asked for, and on CPU.
    """

    dispatch: Statistic
    combine: Statistic
    round_trip: Statistic
    in_graph: bool
    dispatch_host_us: float | None
    combine_host_us: float | None
    round_trip_cold: Statistic | None = None


class Clock:
    """The wall clock and a barrier, for CPU ops, which are done when they return.

    Args:
        context: this rank's device and the group that takes part in barriers.
    """

    def __init__(self, context: RankContext) -> None:
        self._group = context.group
        self._token = torch.zeros(1, device=context.device)

    def align(self) -> None:
        """Queues a device barrier: what is queued next starts on all ranks at about the same time."""
        dist.all_reduce(self._token, group=self._group)

    def mark(self) -> Any:
        """Returns a point in time, where the device is in its queue."""
        return time.perf_counter_ns()

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Returns microseconds between two marks that the device has passed."""
        return float(end - start) / 1e3

    def synchronize(self) -> None:
        """Returns when the device has done what was queued."""

    def flush_cache(self) -> None:
        """Queues writes that replace what the device's cache holds; nothing on CPU."""


class CudaClock(Clock):
    """CUDA events on the current stream, behind a sleep and an NCCL all-reduce of one element.

    Making one is collective.
    """

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._device = context.device
        self._flushed: torch.Tensor | None = None
        clock_khz = getattr(torch.cuda.get_device_properties(context.device), "clock_rate", FALLBACK_CLOCK_KHZ)
        self._hold_cycles = int(HOLD_SECS * 1e3 * clock_khz)
        # the first one makes NCCL's communicator
        self.align()
        self.synchronize()

    def align(self) -> None:
        """Queues a sleep, then the barrier."""
        torch.cuda._sleep(self._hold_cycles)  # type: ignore[no-untyped-call]
        super().align()

    def mark(self) -> torch.cuda.Event:
        """Returns a recorded event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Returns microseconds between two events."""
        return float(start.elapsed_time(end)) * 1e3

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self._device)

    def flush_cache(self) -> None:
        """Queues the writes of a buffer that is larger than the L2."""
        if self._flushed is None:
            self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self._device)
        self._flushed.zero_()


class SharedCudaClock(CudaClock):
    """CUDA events where ranks share GPUs, which NCCL refuses: the barrier is the hosts', and a sleep follows it.

    Ranks begin as far apart as their hosts leave the barrier.
    """

    def align(self) -> None:
        """Waits for all ranks, then queues a sleep, during which the host queues the work."""
        self.synchronize()
        dist.barrier(group=self._group)
        torch.cuda._sleep(self._hold_cycles)  # type: ignore[no-untyped-call]


def make_clock(context: RankContext) -> Clock:
    """Returns the clock of the context's device."""
    if context.device.type == "cpu":
        return Clock(context)
    return SharedCudaClock(context) if context.ranks_per_gpu > 1 else CudaClock(context)


def measure(session: Session, context: RankContext, rendezvous: Rendezvous, settings: TimingSettings) -> Timing:
    """Times a session that has passed its check. Collective."""
    clock = make_clock(context)
    dispatch_us, combine_us = time_operations(session, clock, settings)
    on_gpu = context.device.type == "cuda"
    round_trip_us = time_round_trips(session, clock, settings, in_graph=on_gpu)
    cold: Statistic | None = None
    if on_gpu and (settings.cold_cache or context.ranks_per_gpu > 1):
        cold = summarize(
            rendezvous.exchange("cold times", time_cold_round_trips(session, clock, settings, in_graph=True))
        )
    host_us: list[float] | None = None
    if on_gpu:
        # Ranks that share cores slow each other down here, as they do in an engine.
        host_us = _host_times(session, clock, settings.num_host_calls)
        host_us = [max(column) for column in zip(*rendezvous.exchange("host time", host_us))]
    dispatch, combine, round_trip = (
        summarize(rendezvous.exchange("times", times)) for times in (dispatch_us, combine_us, round_trip_us)
    )
    dispatch_host_us, combine_host_us = host_us or (None, None)
    return Timing(dispatch, combine, round_trip, on_gpu, dispatch_host_us, combine_host_us, cold)


def summarize(times_us: Sequence[Sequence[float]]) -> Statistic:
    """Returns the statistic of `times_us` [ranks][runs]; every rank has as many runs."""
    slowest = sorted(max(run) for run in zip(*times_us, strict=True))
    nearest_rank = math.ceil(0.99 * len(slowest)) - 1
    return Statistic(max(statistics.median(of_rank) for of_rank in times_us), slowest[nearest_rank])


def time_operations(session: Session, clock: Clock, settings: TimingSettings) -> tuple[list[float], list[float]]:
    """Returns microseconds of this rank's dispatch and combine, each alone behind a barrier, per run."""
    for _ in range(settings.num_warmups):
        session.round_trip()
    clock.synchronize()
    marks = []
    for _ in range(settings.num_runs):
        clock.align()
        dispatch_start = clock.mark()
        dispatched = session.dispatch()
        dispatch_end = clock.mark()
        clock.align()
        combine_start = clock.mark()
        session.combine(dispatched)
        marks.append((dispatch_start, dispatch_end, combine_start, clock.mark()))
    clock.synchronize()
    dispatch_us = [clock.elapsed_us(start, end) for start, end, _, _ in marks]
    return dispatch_us, [clock.elapsed_us(start, end) for _, _, start, end in marks]


def time_round_trips(session: Session, clock: Clock, settings: TimingSettings, *, in_graph: bool) -> list[float]:
    """Returns microseconds of one of `num_round_trips` round trips behind a barrier, per run, on this rank."""
    return time_calls(session.round_trip, clock, settings, in_graph=in_graph)


def time_cold_round_trips(session: Session, clock: Clock, settings: TimingSettings, *, in_graph: bool) -> list[float]:
    """Returns microseconds of a single round trip behind a flush of the cache and a barrier, per run, on this rank."""
    single = replace(settings, num_round_trips=1)
    return time_calls(session.round_trip, clock, single, in_graph=in_graph, flushes=True)


def time_calls(
    call: Callable[[], Any], clock: Clock, settings: TimingSettings, *, in_graph: bool, flushes: bool = False
) -> list[float]:
    """Returns microseconds of one of `num_round_trips` calls in a row behind a barrier, per run, on this rank.

    With flushes, the cache is flushed before each barrier, outside the time.
    """

    def run_eagerly() -> None:
        for _ in range(settings.num_round_trips):
            call()

    graph = capture(run_eagerly, call, clock) if in_graph else None
    run = run_eagerly if graph is None else graph.replay
    for _ in range(settings.num_warmups):
        run()
    clock.synchronize()
    marks = []
    for _ in range(settings.num_runs):
        if flushes:
            clock.flush_cache()
        clock.align()
        start = clock.mark()
        run()
        marks.append((start, clock.mark()))
    clock.synchronize()
    if graph is not None:
        graph.reset()
    return [clock.elapsed_us(start, end) / settings.num_round_trips for start, end in marks]


def median_us(
    call: Callable[[], Any], clock: Clock, rendezvous: Rendezvous, settings: TimingSettings, *, in_graph: bool
) -> float:
    """Returns the median of `time_calls` on the slowest rank. Collective."""
    return summarize(rendezvous.exchange("times", time_calls(call, clock, settings, in_graph=in_graph))).p50_us


def capture(work: Callable[[], Any], warm_up: Callable[[], Any], clock: Clock) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph of `work`, after a few calls of `warm_up`."""
    for _ in range(CAPTURE_WARMUPS):
        warm_up()
    clock.synchronize()
    # A capture forbids frees, so memory of earlier sessions is freed before.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    # The thread that watches NCCL makes CUDA calls of its own, which a global capture would forbid.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    clock.synchronize()
    return graph


def _host_times(session: Session, clock: Clock, num_calls: int) -> list[float]:
    """Returns microseconds that one eager dispatch and one eager combine keep this host thread busy."""
    totals_ns = [0, 0]
    for call in range(num_calls):
        if call % HOST_CALLS_PER_BATCH == 0:
            clock.synchronize()
            clock.align()
        start_ns = time.perf_counter_ns()
        dispatched = session.dispatch()
        middle_ns = time.perf_counter_ns()
        session.combine(dispatched)
        end_ns = time.perf_counter_ns()
        totals_ns[0] += middle_ns - start_ns
        totals_ns[1] += end_ns - middle_ns
    clock.synchronize()
    return [total / max(1, num_calls) / 1e3 for total in totals_ns]
