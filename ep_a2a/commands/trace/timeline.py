"""Draws a step of all ranks: a row of bars per rank and part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.plotting import plot_bars
from ep_a2a.telemetry.spans import COMBINE_NAMES, DISPATCH_NAMES, HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ep_a2a.telemetry.spans import TraceSpan

NS_PER_US = 1000


def plot_timeline(spans_by_rank: Mapping[int, Sequence[TraceSpan]], path: Path, note: str = "") -> None:
    """Draws the given spans, from the first start on; the programs of a rank lie over each other.

    Args:
        spans_by_rank: of one step, or a few. path: *.png or *.svg. note: the title.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: path ends otherwise, or its folder does not exist.
    """
    first_ns = min((each.start_ns for spans in spans_by_rank.values() for each in spans), default=0)
    colors: dict[str, int] = {}
    rows = []
    for rank, spans in spans_by_rank.items():
        for name in ("host", *DISPATCH_NAMES, *COMBINE_NAMES):
            bars = [
                ((each.start_ns - first_ns) / NS_PER_US, (each.end_ns - each.start_ns) / NS_PER_US)
                for each in spans
                if _row_name(each) == name
            ]
            if bars:
                rows.append((f"rank {rank}  {name}", colors.setdefault(name, len(colors)), bars))
    plot_bars(rows, "µs", note, path)


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
