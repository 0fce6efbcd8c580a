"""Runs steps with recorded spans on all ranks, writes the traces and the picture, and prints a summary."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ep_a2a.commands.bench.native import make_config
from ep_a2a.commands.ranks import call_ranks, joined_pool
from ep_a2a.commands.trace.steps import trace_steps
from ep_a2a.commands.trace.timeline import last_step, plot_timeline
from ep_a2a.telemetry.spans import COMBINE_NAMES, DISPATCH_NAMES
from ep_a2a.telemetry.trace import write_trace

if TYPE_CHECKING:
    from pathlib import Path

    from ep_a2a.commands.bench.workload import Workload
    from ep_a2a.telemetry.spans import TraceSpan

WRITTEN = re.compile(r"trace(_RANK_\d+)?\.json|timeline(\.dark)?\.png")
"""Names of the files that the command writes."""


def execute(workload: Workload, device: str, num_steps: int, folder: Path, *, plot: bool) -> None:
    """Runs the steps on all ranks, writes the traces and prints a summary."""
    make_config(workload, 0)
    with joined_pool(workload.world_size, device) as pool:
        spans = dict(enumerate(call_ranks(pool, trace_steps, workload, num_steps)))
    removed = remove_earlier(folder)
    for rank, own in spans.items():
        write_trace({rank: own}, folder / f"trace_RANK_{rank}.json")
    write_trace(spans, folder / "trace.json")
    if plot:
        note = (
            f"{workload.num_tokens} tokens per rank, hidden {workload.hidden_dim}, top-{workload.topk} of "
            f"{workload.num_experts} experts, {workload.quant_type}, {workload.layout}, {device} · ep-a2a trace"
        )
        plot_timeline(last_step(spans), folder / "timeline.png", note, device=device)
    console = Console()
    _show(console, spans, device)
    written = "trace_RANK_*.json, trace.json" + (", timeline.png, timeline.dark.png" if plot else "")
    console.print(f"{folder}: {written}", markup=False, soft_wrap=True)
    if left_over := [name for name in removed if not (folder / name).exists()]:
        console.print(f"removed there, of an earlier run: {', '.join(left_over)}", markup=False, soft_wrap=True)


def remove_earlier(folder: Path) -> list[str]:
    """Removes only files that this command wrote into the folder before; returns their names, sorted."""
    earlier = sorted(each.name for each in folder.iterdir() if WRITTEN.fullmatch(each.name) and not each.is_dir())
    for name in earlier:
        (folder / name).unlink()
    return earlier


def _show(console: Console, spans: dict[int, list[TraceSpan]], device: str) -> None:
    """Prints a row per name: how often it was recorded, its median and its longest time."""
    table = Table("span", "recorded", "median µs", "longest µs", title=f"{len(spans)} ranks on {device}")
    for name in (*DISPATCH_NAMES, *COMBINE_NAMES, "dispatch", "combine"):
        times = [(each.end_ns - each.start_ns) / 1000 for own in spans.values() for each in own if each.name == name]
        if times:
            title = f"{name} (call on the host)" if name in ("dispatch", "combine") else name
            table.add_row(title, str(len(times)), f"{statistics.median(times):.1f}", f"{max(times):.1f}")
    console.print(table)
