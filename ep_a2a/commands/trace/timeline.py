"""A step of all ranks as a picture: a row of bars per rank and part. matplotlib is optional and loaded here only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.bench.plot import check_can_plot
from ep_a2a.telemetry.spans import COMBINE_NAMES, DISPATCH_NAMES, HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ep_a2a.telemetry.spans import TraceSpan

DOTS_PER_INCH = 150
INCHES_PER_ROW, WIDTH_INCHES, MARGIN_INCHES = 0.22, 11.0, 1.4
NS_PER_US = 1000
BAR_HEIGHT, BAR_OPACITY = 0.8, 0.35


def plot_timeline(spans_by_rank: Mapping[int, Sequence[TraceSpan]], path: Path, note: str = "") -> None:
    """Draws what is given, from the first start on; the programs of a rank lie over each other.

    Args:
        spans_by_rank: one step's, or a few. path: *.png or *.svg. note: the title.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: path ends otherwise, or its folder does not exist.
    """
    check_can_plot(path)
    from matplotlib.figure import Figure

    rows = [
        (rank, name)
        for rank in spans_by_rank
        for name in ("host", *DISPATCH_NAMES, *COMBINE_NAMES)
        if any(_row_name(each) == name for each in spans_by_rank[rank])
    ]
    height = MARGIN_INCHES + INCHES_PER_ROW * len(rows)
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    axes = figure.add_subplot(xlabel="µs", title=note)
    first_ns = min((each.start_ns for spans in spans_by_rank.values() for each in spans), default=0)
    names = list(dict.fromkeys(name for _, name in rows))
    for place, (rank, name) in enumerate(rows):
        bars = [
            ((each.start_ns - first_ns) / NS_PER_US, (each.end_ns - each.start_ns) / NS_PER_US)
            for each in spans_by_rank[rank]
            if _row_name(each) == name
        ]
        color = f"C{names.index(name)}"
        axes.broken_barh(bars, (place - BAR_HEIGHT / 2, BAR_HEIGHT), alpha=BAR_OPACITY, color=color, linewidth=0)
    axes.set_yticks(range(len(rows)), [f"rank {rank}  {name}" for rank, name in rows], fontsize="small")
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x", alpha=0.3)
    figure.savefig(path, format=path.suffix[1:], dpi=DOTS_PER_INCH)


def _row_name(span: TraceSpan) -> str:
    return "host" if span.program == HOST else span.name


def last_step(spans_by_rank: Mapping[int, Sequence[TraceSpan]]) -> dict[int, list[TraceSpan]]:
    """The spans of each rank's last step, and what its host did meanwhile."""
    found = {}
    for rank, spans in spans_by_rank.items():
        last = max((each.step for each in spans if each.program != HOST), default=0)
        chosen = [each for each in spans if each.program != HOST and each.step == last]
        first_ns = min((each.start_ns for each in chosen), default=0)
        last_ns = max((each.end_ns for each in chosen), default=0)
        host = [each for each in spans if each.program == HOST and each.start_ns < last_ns and each.end_ns > first_ns]
        found[rank] = [*host, *chosen]
    return found
