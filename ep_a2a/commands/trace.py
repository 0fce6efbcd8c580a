"""Runs steps with recorded spans on all ranks, writes the trace, and prints a summary."""

import contextlib
import statistics
from pathlib import Path

import torch

from ep_a2a.commands import messages
from ep_a2a.commands.files import check_can_write, write_bytes
from ep_a2a.commands.measure.session import OpRoundTrip, make_config
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.commands.options import check_topk
from ep_a2a.commands.ranks import call_ranks, joined_pool
from ep_a2a.commands.tables import new_table
from ep_a2a.telemetry.profiler import StepProfiler
from ep_a2a.telemetry.spans import COMBINE_NAMES, DISPATCH_NAMES, TraceSpan
from ep_a2a.telemetry.trace import trace_json
from ep_a2a.testing.worker import RankContext

HOST_NAMES = ("dispatch", "combine")
"""Spans of the host: calls of the op."""
CPU_READING = "CPU, Triton's interpreter: the times say nothing about GPUs"


def execute(workload: Workload, device: str, num_steps: int, path: Path, *, as_json: bool = False) -> None:
    """Runs the steps on all ranks, writes the trace and prints a summary."""
    check_topk(workload.topk, workload.experts)
    make_config(workload, 0)
    check_can_write(path)
    with joined_pool(workload.ranks, device) as pool:
        spans = dict(enumerate(call_ranks(pool, trace_steps, workload, num_steps)))
        sharing = pool.note
    write_bytes(path, trace_json(spans))
    if as_json:
        about = {"trace": str(path), "device": device, "ranks": len(spans), "note": sharing}
        messages.print_json(about | {"spans": _summary(spans)})
    else:
        _show(spans, device)


def trace_steps(context: RankContext, workload: Workload, num_steps: int) -> list[TraceSpan]:
    """Runs steps with identity experts and returns this rank's spans of the latest ones. Collective.

    One checked step runs before them and compiles the kernels.

    Args:
        num_steps: steps; of more than SPAN_STEPS the latest are returned.

    Raises:
        CheckFailedError: dispatch and combine do not give the right result.
    """
    with contextlib.closing(OpRoundTrip(workload, context)) as session:
        profiler = StepProfiler(session.op)
        session.check()
        profiler.clear()
        for _ in range(num_steps):
            with profiler.call("dispatch"):
                dispatched = session.dispatch()
            with profiler.call("combine"):
                session.combine(dispatched)
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        session.check_timed()
        return profiler.spans()


def _summary(spans: dict[int, list[TraceSpan]]) -> dict[str, dict[str, float]]:
    """Returns, by name of a span, how often it was recorded, its median and its longest time."""
    found: dict[str, dict[str, float]] = {}
    for name in (*DISPATCH_NAMES, *COMBINE_NAMES, *HOST_NAMES):
        times = [(each.end_ns - each.start_ns) / 1000 for own in spans.values() for each in own if each.name == name]
        if times:
            found[name] = {"recorded": len(times), "median_us": statistics.median(times), "longest_us": max(times)}
    return found


def _show(spans: dict[int, list[TraceSpan]], device: str) -> None:
    """Prints a row for each name of the summary."""
    numbers = ("recorded", "median µs", "longest µs")
    table = new_table(f"{len(spans)} ranks on {device}", ("span", *numbers), right=numbers)
    for name, row in _summary(spans).items():
        title = f"{name} (call on the host)" if name in HOST_NAMES else name
        table.add_row(title, str(row["recorded"]), f"{row['median_us']:.1f}", f"{row['longest_us']:.1f}")
    messages.output().print(table)
    if device == "cpu":
        messages.output().print(CPU_READING)
