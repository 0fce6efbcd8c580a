"""Bodies of the tests of profiling: run on every rank, on CPU and on GPUs alike."""

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from ep_a2a.memory.arena import Arena
from ep_a2a.telemetry import COMBINE_NAMES, DISPATCH_NAMES
from ep_a2a.testing import RankContext
from tests.cases.low_latency_cases import make_layer, run_step
from tests.cases.op_cases import Case

NUM_STEPS = 3
NAMES = {"dispatch": {*DISPATCH_NAMES}, "combine": {*COMBINE_NAMES}}
BULK_NAMES = {"post"}
"""What a low-latency dispatch has not: it posts flags before its rows."""
CLOCK_SLACK_US = 50.0
"""How far apart the clocks of two GPUs may be taken to be; on CPU they are one."""


def profiled_layer(context: RankContext, case: Case, folder: Path) -> None:
    """Steps of a layer that records them are right, and each rank writes a trace of dispatch and one of combine."""
    with Arena(context.group, context.device) as arena:
        layer = make_layer(context, case, arena, enable_profiling=True)
        for number in range(NUM_STEPS):
            run_step(case, layer, number, context)
        paths = [layer.dump_dispatch_trace(folder), layer.dump_combine_trace(folder)]
        assert paths == [folder / f"ll_{phase}_RANK_{context.rank}.json" for phase in NAMES]
        arena.rendezvous.barrier("traces written")
        layer.reset()
        assert not any(profiler.spans() for profiler in layer._profilers)
        run_step(case, layer, 0, context)
        assert {each.step for each in layer._profilers[0].spans() if each.program >= 0} == {1}


def layer_without_profiling(context: RankContext, case: Case, folder: Path) -> None:
    """Nothing is recorded and nothing written."""
    with Arena(context.group, context.device) as arena:
        layer = make_layer(context, case, arena)
        run_step(case, layer, 0, context)
        assert layer.dump_dispatch_trace(folder) is None
        assert layer.dump_combine_trace(folder) is None
        for buffers in layer.dispatch_ctx.phases:
            assert buffers.op.memory.acquired.spans is None
            assert buffers.op.memory.spans_address.tolist() == [0]


def check_traces(folder: Path, world_size: int, device: str, *, is_bulk: bool) -> None:
    """What the ranks of profiled_layer have written; is_bulk: whether steps had too many tokens for flagged rows."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"ll_{phase}_RANK_{rank}.json" for phase in NAMES for rank in range(world_size)
    )
    slack_us = CLOCK_SLACK_US if device == "cuda" else 0.0
    bars = [
        (rank, phase, *bar)
        for rank in range(world_size)
        for phase in NAMES
        for bar in read_bars(folder / f"ll_{phase}_RANK_{rank}.json", rank, phase)
    ]
    for rank in range(world_size):
        for phase, names in NAMES.items():
            own = [bar for bar in bars if bar[:2] == (rank, phase)]
            in_kernels = [bar for bar in own if "program" in bar[2]]
            assert {bar[4]["name"] for bar in in_kernels} == (names if is_bulk else names - BULK_NAMES)
            assert len([bar for bar in own if "host" in bar[2]]) == NUM_STEPS
        check_steps_follow(bars, rank)
    for rank in range(world_size):
        for other in range(world_size):
            # whoever has heard from all has heard from each
            for lane, step in {(bar[2].split(" program")[0], bar[3]) for bar in bars if "program" in bar[2]}:
                heard = [end_of(bar[4]) for bar in of(bars, rank, lane, step) if bar[4]["name"] == "wait"]
                told = [bar[4]["ts"] for bar in of(bars, other, lane, step) if bar[4]["name"] == "count_put"]
                assert max(heard) + slack_us >= min(told)


def read_bars(path: Path, rank: int, phase: str) -> list[tuple[str, int, dict[str, Any]]]:
    """(name of the thread, step, event) of each bar; what the format wants is checked."""
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {rank}
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [f"rank {rank}"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    bars = [event for event in events if event["ph"] == "X"]
    assert [event["ts"] for event in bars] == sorted(event["ts"] for event in bars)
    assert all(event["dur"] >= 0 and event["cat"] == phase for event in bars)
    return [(threads[event["tid"]], event["args"]["step"], event) for event in bars]


def check_steps_follow(bars: list[Any], rank: int) -> None:
    """Of each set of buffers every step's spans come after those of the step before, and combine after dispatch."""
    ends: dict[str, dict[tuple[int, bool], list[float]]] = defaultdict(lambda: defaultdict(list))
    starts: dict[str, dict[tuple[int, bool], list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, phase, thread, step, event in (bar for bar in bars if bar[0] == rank and "program" in bar[2]):
        lane, key = thread.split(" program")[0], (step, phase == "combine")
        starts[lane][key].append(event["ts"])
        ends[lane][key].append(end_of(event))
    assert sum(len({step for step, _ in keys}) for keys in starts.values()) == NUM_STEPS
    for lane, by_key in starts.items():
        keys = sorted(by_key)
        for before, after in itertools.pairwise(keys):
            assert max(ends[lane][before]) <= min(by_key[after]), (lane, before, after)


def of(bars: list[Any], rank: int, lane: str, step: int) -> list[Any]:
    return [bar for bar in bars if bar[0] == rank and bar[3] == step and bar[2].startswith(f"{lane} program")]


def end_of(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])
