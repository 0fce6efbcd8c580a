"""Writes traces as Chrome's trace events in JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ep_a2a.telemetry.spans import HOST, TraceSpan
from ep_a2a.whole_files import resolved, write_whole

NS_PER_US = 1000


def trace_events(spans: Sequence[TraceSpan], rank: int) -> list[dict[str, Any]]:
    """Returns the trace events of one rank: a process per rank, a thread per program, and one for the host."""
    lanes = sorted({(each.lane, each.program) for each in spans})
    threads = {lane: number for number, lane in enumerate(lanes)}
    named = {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    events: list[dict[str, Any]] = [named]
    for (lane, program), thread in threads.items():
        title = " ".join(filter(None, (lane, "host" if program == HOST else f"program {program}")))
        events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": title}})
    for each in sorted(spans, key=lambda each: each.start_ns):
        events.append(
            {
                "name": each.name,
                "cat": each.phase,
                "ph": "X",
                "pid": rank,
                "tid": threads[each.lane, each.program],
                "ts": each.start_ns / NS_PER_US,
                "dur": (each.end_ns - each.start_ns) / NS_PER_US,
                "args": {"step": each.step, "part": each.part},
            }
        )
    return events


def trace_json(spans_by_rank: Mapping[int, Sequence[TraceSpan]]) -> bytes:
    """Returns the file that `write_trace` writes."""
    events = [event for rank, spans in spans_by_rank.items() for event in trace_events(spans, rank)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}).encode()


def write_trace(spans_by_rank: Mapping[int, Sequence[TraceSpan]], path: Path) -> None:
    """Writes the spans of one rank or of several into one file; makes its folder.

    Times are microseconds of the host's monotonic clock, so ranks of one host are aligned, also from file to file.

    Raises:
        UntrustedFolderError: the path leads through a link of another user.
    """
    resolved(path.parent).mkdir(parents=True, exist_ok=True)
    write_whole(path, trace_json(spans_by_rank))
