"""Draws a step of all ranks: a row of bars per rank and part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands import plots
from ep_a2a.commands.plots import TIME_UNITS, Caption, unit_for
from ep_a2a.telemetry.spans import COMBINE_NAMES, DISPATCH_NAMES, HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ep_a2a.telemetry.spans import TraceSpan

NS_PER_US = 1000
PUSHES, WAITS, WORK = range(3)
COLOURS = {
    "quant_and_put": PUSHES,
    "count_put": PUSHES,
    "copy_and_put": PUSHES,
    "wait": WAITS,
    "recv_wait": WAITS,
    "postprocess": WORK,
    "topk_reduce": WORK,
}
KEY = "Blue: pushes; orange: waits; green: work on own memory; grey: the host's calls"
CPU_READING = "CPU, Triton's interpreter: the times say nothing about GPUs"
GPU_READING = "stronger: more programs at once. Kernels that note times are slower than those that serve"


def plot_timeline(
    spans_by_rank: Mapping[int, Sequence[TraceSpan]], path: Path, note: str = "", *, device: str = "cuda"
) -> tuple[Path, Path]:
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
                if _row_name(each) == name
            ]
            if bars:
                rows.append((group, name, COLOURS.get(name), bars))
                group = ""
    reading = CPU_READING if device == "cpu" else GPU_READING
    caption = Caption("What each rank does in the last step", f"{KEY}; {reading}", note)
    return plots.write(path, plots.bars, rows, f"{unit} since the first bar", caption)


def _row_name(span: TraceSpan) -> str:
    return "host" if span.program == HOST else span.name


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
