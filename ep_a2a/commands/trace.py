"""Runs steps with recorded spans on all ranks, writes the traces and the picture, and prints a summary."""

import contextlib
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ep_a2a.commands import messages, plots
from ep_a2a.commands.files import check_folder, write_bytes
from ep_a2a.commands.measure.session import OpRoundTrip, make_config
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.commands.options import check_topk
from ep_a2a.commands.plots import TIME_UNITS, Caption, check_can_plot, unit_for
from ep_a2a.commands.ranks import call_ranks, joined_pool
from ep_a2a.commands.tables import new_table
from ep_a2a.telemetry.profiler import StepProfiler
from ep_a2a.telemetry.spans import COMBINE_NAMES, DISPATCH_NAMES, HOST, TraceSpan
from ep_a2a.telemetry.trace import trace_json
from ep_a2a.testing.worker import RankContext

WRITTEN = re.compile(r"trace(_RANK_\d+)?\.json|timeline\.png")
"""Names of the files that the command writes."""
PICTURE = "timeline.png"
HOST_NAMES = ("dispatch", "combine")
"""Spans of the host: calls of the op."""
NS_PER_US = 1000
PUSHES, WAITS, WORK = range(3)
COLOURS = {
    **dict.fromkeys(("quant_and_put", "count_put", "post", "copy_and_put"), PUSHES),
    **dict.fromkeys(("wait", "recv_wait"), WAITS),
    **dict.fromkeys(("prepare", "postprocess", "topk_reduce"), WORK),
}
KEY = "Blue: pushes; orange: waits; green: work on own memory; grey: the host's calls"
CPU_READING = "CPU, Triton's interpreter: the times say nothing about GPUs"
GPU_READING = "stronger: more programs at once. Kernels that note times are slower than those that serve"


def execute(
    workload: Workload, device: str, num_steps: int, folder: Path, *, plot: bool, as_json: bool = False
) -> None:
    """Runs the steps on all ranks, writes the traces and prints a summary."""
    check_topk(workload.topk, workload.experts)
    make_config(workload, 0)
    check_folder(folder)
    if plot:
        check_can_plot(folder / PICTURE)
    with joined_pool(workload.ranks, device) as pool:
        spans = dict(enumerate(call_ranks(pool, trace_steps, workload, num_steps)))
        sharing = pool.note
    parts = {f"trace_RANK_{rank}.json": {rank: own} for rank, own in spans.items()} | {"trace.json": spans}
    for name, some in parts.items():
        write_bytes(folder / name, trace_json(some))
    if plot:
        shape = f"{workload.tokens} tokens per rank, hidden {workload.hidden}, top-{workload.topk} of "
        shape += f"{workload.experts} experts, {workload.quant}, {workload.layout}"
        note = f"{shape}, {device} · ep-a2a trace" + (f"\n{sharing}" if sharing else "")
        plot_timeline(last_step(spans), folder / PICTURE, note, device=device)
    # Only now: an error before this line leaves what an earlier run has written.
    removed = remove_earlier(folder, {*parts, *([PICTURE] if plot else [])})
    if as_json:
        about = {"folder": str(folder), "device": device, "ranks": len(spans), "note": sharing}
        messages.print_json(about | {"spans": _summary(spans)})
    else:
        _show(spans, device)
    if removed:
        messages.note(f"removed from {folder}, of an earlier run: {', '.join(removed)}")


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


def remove_earlier(folder: Path, written: set[str]) -> list[str]:
    """Removes what an earlier run of this command has left in the folder, but not the files that this run has written.

    Returns:
        the names of the removed files, sorted.
    """
    found = {each.name for each in folder.iterdir() if WRITTEN.fullmatch(each.name) and not each.is_dir()}
    earlier = sorted(found - written)
    for name in earlier:
        (folder / name).unlink()
    return earlier


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


def plot_timeline(
    spans_by_rank: Mapping[int, Sequence[TraceSpan]], path: Path, note: str = "", *, device: str = "cuda"
) -> None:
    """Draws the given spans, from the first start on; the programs of a rank lie over each other.

    Args:
        spans_by_rank: of one step, or a few. path: *.png or *.svg. note: the parameters, for the footer.
        device: "cpu" or "cuda", where the kernels ran.

    Raises:
        MissingPackageError, ConfigError: as ep_a2a.commands.plots.write.
    """
    times_ns = [time for spans in spans_by_rank.values() for each in spans for time in (each.start_ns, each.end_ns)]
    first_ns, last_ns = min(times_ns, default=0), max(times_ns, default=0)
    size, unit = unit_for((last_ns - first_ns) / NS_PER_US, TIME_UNITS)
    rows = []
    for rank, spans in spans_by_rank.items():
        group = f"rank {rank}"
        for name in ("host", *DISPATCH_NAMES, *COMBINE_NAMES):
            bars = [
                ((each.start_ns - first_ns) / NS_PER_US / size, (each.end_ns - each.start_ns) / NS_PER_US / size)
                for each in spans
                if name == ("host" if each.program == HOST else each.name)
            ]
            if bars:
                rows.append((group, name, COLOURS.get(name), bars))
                group = ""
    reading = CPU_READING if device == "cpu" else GPU_READING
    caption = Caption("What each rank does in the last step", f"{KEY}; {reading}", note)
    plots.write(path, plots.bars, rows, f"{unit} since the first bar", caption)


def last_step(spans_by_rank: Mapping[int, Sequence[TraceSpan]]) -> dict[int, list[TraceSpan]]:
    """Returns the spans of each rank's last step, and those of its host meanwhile."""
    found = {}
    for rank, spans in spans_by_rank.items():
        last = max((each.step for each in spans if each.program != HOST), default=0)
        chosen = [each for each in spans if each.program != HOST and each.step == last]
        first_ns = min((each.start_ns for each in chosen), default=0)
        last_ns = max((each.end_ns for each in chosen), default=0)
        host = [each for each in spans if each.program == HOST and each.start_ns < last_ns and each.end_ns > first_ns]
        found[rank] = [*host, *chosen]
    return found
