"""Times calls in microseconds: behind a device barrier, medians of each rank, and the slowest rank counts.

On a GPU a sleep holds up the stream first, so that the host has queued everything when the barrier releases all ranks.
On CPU the wall clock is read; such times say nothing about GPUs.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing.worker import RankContext

HOLD_SECS = 1e-3
"""Seconds that a stream is held up while the host queues the barrier and the work behind it."""
FALLBACK_CLOCK_KHZ = 1_980_000
HOST_CALLS_PER_BATCH = 50
"""Calls queued between two synchronisations; a full launch queue would make the host wait."""
CAPTURE_WARMUPS = 4
PAIRS_IN_A_ROW = 128
"""Round trips in one graph whose period is taken; as many before them, untimed, fill the pipeline."""
NUM_CHAINS = 4
"""Times that such a graph is replayed."""
FLUSH_BYTES = 256 << 20
"""Bytes written to empty a GPU's L2 of everything else: twice the largest L2, or more."""


@dataclass(frozen=True)
class TimingSettings:
    """Numbers of runs.

    Attributes:
        num_warmups: untimed runs before the timed ones.
        num_runs: timed runs.
        num_round_trips: round trips, or layers, in one CUDA graph (on CPU: between two readings of the clock).
        num_host_calls: eager calls over which host time is averaged; none on CPU.
        num_rounds: times that all contenders of a workload are measured in turn.
    """

    num_warmups: int = 20
    num_runs: int = 50
    num_round_trips: int = 10
    num_host_calls: int = 200
    num_rounds: int = 1


class Clock:
    """A barrier of all ranks, and points in time: CUDA events on the current stream, on CPU the wall clock.

    On GPUs the barrier is an NCCL all-reduce of one element behind a sleep. NCCL refuses ranks that share a GPU: there
    the hosts meet, and a sleep follows. Making one is collective.

    Args:
        context: this rank's device and the group that takes part in barriers.

    Attributes:
        on_gpu: whether calls only queue work.
    """

    on_gpu = False

    def __init__(self, context: RankContext) -> None:
        self.on_gpu = context.device.type == "cuda"
        self._shares_gpu = self.on_gpu and context.ranks_per_gpu > 1
        self._device, self._group = context.device, context.group
        self._token = torch.zeros(1, device=context.device)
        self._flushed: torch.Tensor | None = None
        if self.on_gpu:
            clock_khz = getattr(torch.cuda.get_device_properties(context.device), "clock_rate", FALLBACK_CLOCK_KHZ)
            self._hold_cycles = int(HOLD_SECS * 1e3 * clock_khz)
            # the first one makes NCCL's communicator
            self.align()
            self.synchronize()

    def align(self) -> None:
        """Queues a device barrier: what is queued next starts on all ranks at about the same time."""
        if self._shares_gpu:
            self.synchronize()
            dist.barrier(group=self._group)
        if self.on_gpu:
            torch.cuda._sleep(self._hold_cycles)  # type: ignore[no-untyped-call]
        if not self._shares_gpu:
            dist.all_reduce(self._token, group=self._group)

    def mark(self) -> Any:
        """Returns a point in time, where the device is in its queue."""
        if not self.on_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Returns microseconds between two marks that the device has passed."""
        return float(start.elapsed_time(end)) * 1e3 if self.on_gpu else float(end - start) / 1e3

    def synchronize(self) -> None:
        """Returns when the device has done what was queued."""
        if self.on_gpu:
            torch.cuda.synchronize(self._device)

    def flush_cache(self) -> None:
        """Queues the writes of a buffer that is larger than the L2; nothing on CPU."""
        if self.on_gpu:
            if self._flushed is None:
                self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self._device)
            self._flushed.zero_()


class Timer:
    """Measures on all ranks of a context and gives each the same figures. All methods are collective.

    Args:
        context: this rank.
        settings: numbers of runs.
    """

    def __init__(self, context: RankContext, settings: TimingSettings) -> None:
        self._clock, self._settings = Clock(context), settings
        # Graphs that are replayed one after another need the memory of the largest only.
        self._pool = torch.cuda.graph_pool_handle() if self._clock.on_gpu else None
        self._rendezvous = Rendezvous(context.group)

    def median_us(self, call: Callable[[], Any]) -> float:
        """Returns microseconds of one of `num_round_trips` calls in a row: medians of each rank, the slowest rank."""
        return self._over_ranks(time_calls(call, self._clock, self._settings))[0]

    def queue(self, call: Callable[[], Any]) -> CallsInARow:
        """Returns `num_round_trips` calls in a row, to be timed several times, until they are closed."""
        return CallsInARow(call, self._clock, self._settings.num_round_trips, self._pool)

    def time(self, calls: CallsInARow) -> float:
        """Returns what `median_us` does, of calls from `queue`."""
        return self._over_ranks(calls.times_us(self._settings))[0]

    def measure(self, dispatch: Callable[[], Any], combine: Callable[[Any], Any]) -> dict[str, Any]:
        """Times a dispatch, and a combine of what it returns, each alone and as round trips in a row.

        Returns:
            `dispatch_us` and `combine_us` behind a barrier, whose skew is in them; `round_trip_us`; the same with
            `_p99_us`; `round_trip_cold_us` with nothing in the L2, None on CPU;
            `pair_period_us` of PAIRS_IN_A_ROW round trips behind as many others, the median of the ranks, None on CPU;
            `in_graph`; on GPUs `dispatch_host_us` and `combine_host_us`, which an eager call keeps the host busy.
        """

        def round_trip() -> None:
            combine(dispatch())

        clock, settings = self._clock, self._settings
        dispatch_us, combine_us = time_apart(dispatch, combine, clock, settings)
        times_us = {"dispatch": dispatch_us, "combine": combine_us}
        times_us["round_trip"] = time_calls(round_trip, clock, settings)
        found: dict[str, Any] = {"round_trip_cold_us": None, "pair_period_us": None, "in_graph": clock.on_gpu}
        if clock.on_gpu:
            found["round_trip_cold_us"] = self._over_ranks(time_calls(round_trip, clock, settings, flushes=True))[0]
            # Ranks that share cores slow each other down here, as they do in an engine.
            own = time_on_host(dispatch, combine, clock, settings.num_host_calls)
            slowest = map(max, zip(*self._rendezvous.exchange("host time", own)))
            found["dispatch_host_us"], found["combine_host_us"] = slowest
            periods_us = self._rendezvous.exchange("periods", pair_periods(round_trip, clock))
            # A rate, which ranks that wait for each other share: the median, where a latency is that of the slowest.
            found["pair_period_us"] = statistics.median(map(statistics.median, periods_us))
        for phase, own_us in times_us.items():
            found[f"{phase}_us"], found[f"{phase}_p99_us"] = self._over_ranks(own_us)
        return found

    def _over_ranks(self, times_us: list[float]) -> tuple[float, float]:
        return summarize(self._rendezvous.exchange("times", times_us))


def summarize(times_us: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns two figures of a call over all runs and ranks.

    Args:
        times_us: microseconds [ranks][runs]; every rank has as many runs.

    Returns:
        The median over the runs of each rank, of these the largest; and the 99th percentile over the runs of the
        slowest rank in each.
    """
    slowest = sorted(max(run) for run in zip(*times_us, strict=True))
    nearest_rank = math.ceil(0.99 * len(slowest)) - 1
    return max(statistics.median(of_rank) for of_rank in times_us), slowest[nearest_rank]


def time_apart(
    dispatch: Callable[[], Any], combine: Callable[[Any], Any], clock: Clock, settings: TimingSettings
) -> tuple[list[float], list[float]]:
    """Returns microseconds of this rank's dispatch and combine, each alone behind a barrier, per run."""
    for _ in range(settings.num_warmups):
        combine(dispatch())
    clock.synchronize()
    marks = []
    for _ in range(settings.num_runs):
        clock.align()
        dispatch_start = clock.mark()
        dispatched = dispatch()
        dispatch_end = clock.mark()
        clock.align()
        combine_start = clock.mark()
        combine(dispatched)
        marks.append((dispatch_start, dispatch_end, combine_start, clock.mark()))
    clock.synchronize()
    dispatch_us = [clock.elapsed_us(start, end) for start, end, _, _ in marks]
    return dispatch_us, [clock.elapsed_us(start, end) for _, _, start, end in marks]


class CallsInARow:
    """Calls that run one after another, on a GPU replayed from a CUDA graph.

    Args:
        call: what to call.
        clock: of the ranks.
        num_calls: calls in a row.
        pool: memory that graphs share which are all alive and never run at once; None for memory of its own.
    """

    def __init__(self, call: Callable[[], Any], clock: Clock, num_calls: int, pool: Any = None) -> None:
        self._clock, self._num_calls = clock, num_calls
        # A replay uses the tensors of the call at their addresses, and the next capture unmaps what was freed.
        self._kept = call

        def run_eagerly() -> None:
            for _ in range(num_calls):
                call()

        self._graph = capture(run_eagerly, call, clock, pool) if clock.on_gpu else None
        self._run: Callable[[], None] = run_eagerly if self._graph is None else self._graph.replay

    def times_us(self, settings: TimingSettings, *, flushes: bool = False) -> list[float]:
        """Returns microseconds of one call behind a barrier, per run, on this rank, after untimed runs.

        With flushes, the cache is flushed before the barrier, outside the time.
        """
        for _ in range(settings.num_warmups):
            self._run()
        self._clock.synchronize()
        before = [self._clock.flush_cache] if flushes else []
        return self._times(settings.num_runs, [*before, self._clock.align])

    def periods_us(self, num_chains: int) -> list[float]:
        """Returns microseconds of one call of a row that follows another row at once, per chain, on this rank."""
        return self._times(num_chains, [self._clock.align, self._run])

    def _times(self, num_runs: int, before: Sequence[Callable[[], None]]) -> list[float]:
        """Returns microseconds of one call per run, each run behind what `before` queues."""
        clock, marks = self._clock, []
        for _ in range(num_runs):
            for prepare in before:
                prepare()
            start = clock.mark()
            self._run()
            marks.append((start, clock.mark()))
        clock.synchronize()
        return [clock.elapsed_us(start, end) / self._num_calls for start, end in marks]

    def close(self) -> None:
        """Frees the graph."""
        if self._graph is not None:
            self._graph.reset()


def time_calls(
    call: Callable[[], Any], clock: Clock, settings: TimingSettings, *, flushes: bool = False
) -> list[float]:
    """Returns the times of `num_round_trips` calls in a row, as CallsInARow; with flushes, of a single call."""
    calls = CallsInARow(call, clock, 1 if flushes else settings.num_round_trips)
    times_us = calls.times_us(settings, flushes=flushes)
    calls.close()
    return times_us


def pair_periods(round_trip: Callable[[], Any], clock: Clock) -> list[float]:
    """Returns the period of round trips that never stop, per chain, on this rank, in microseconds."""
    calls = CallsInARow(round_trip, clock, PAIRS_IN_A_ROW)
    periods_us = calls.periods_us(NUM_CHAINS)
    calls.close()
    return periods_us


def capture(
    work: Callable[[], Any], warm_up: Callable[[], Any], clock: Clock, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph of `work`, after a few calls of `warm_up`; pool: memory to capture into, None for new.

    All are captured on torch's one stream for that: what one frees in a pool is for the next on the same stream only.
    """
    for _ in range(CAPTURE_WARMUPS):
        warm_up()
    clock.synchronize()
    # A capture forbids frees, so memory of earlier sessions is freed before.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    # The thread that watches NCCL makes CUDA calls of its own, which a global capture would forbid.
    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
        work()
    clock.synchronize()
    return graph


def time_on_host(
    dispatch: Callable[[], Any], combine: Callable[[Any], Any], clock: Clock, num_calls: int
) -> list[float]:
    """Returns microseconds that one eager dispatch and one eager combine keep this host thread busy."""
    totals_ns = [0, 0]
    for call in range(num_calls):
        if call % HOST_CALLS_PER_BATCH == 0:
            clock.synchronize()
            clock.align()
        start_ns = time.perf_counter_ns()
        dispatched = dispatch()
        middle_ns = time.perf_counter_ns()
        combine(dispatched)
        end_ns = time.perf_counter_ns()
        totals_ns[0] += middle_ns - start_ns
        totals_ns[1] += end_ns - middle_ns
    clock.synchronize()
    return [total / max(1, num_calls) / 1e3 for total in totals_ns]
