"""TraceSpan: a bar of a trace; the names of a step's parts; and what a bulk dispatch does one after the other."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ep_a2a.kernels.layout import Span

if TYPE_CHECKING:
    from collections.abc import Iterable

HOST = -1
"""The program number of spans of the host."""
DISPATCH_NAMES = ("prepare", "quant_and_put", "count_put", "arrive", "post", "wait", "postprocess")
COMBINE_NAMES = ("copy_and_put", "recv_wait", "topk_reduce")
PARTS: dict[Span, tuple[str, str]] = {
    Span.PREPARE: ("prepare", "counts and routes before the first row"),
    Span.QUANT_AND_PUT: ("quant_and_put", "rows"),
    Span.ARRIVE: ("arrive", "stores are seen, and the program is counted"),
    Span.POST: ("post", "flags"),
    Span.ACCEPT_ROWS: ("postprocess", "counts and padding of rows on their way"),
    Span.FINISH: ("postprocess", "end of the stage"),
    Span.COUNT_PUT: ("count_put", "counts"),
    Span.WAIT: ("wait", "rows and flags"),
    Span.NUMBER_ROWS: ("postprocess", "number rows by expert"),
    Span.COPY_ROWS: ("postprocess", "copy rows by expert"),
    Span.EXCHANGE_WEIGHTS: ("copy_and_put", "exchange router weights"),
    Span.WEIGH_ROWS: ("copy_and_put", "weigh and add experts' rows"),
    Span.COPY_AND_PUT: ("copy_and_put", "rows"),
    Span.RECV_WAIT: ("recv_wait", "first rows and flags"),
    Span.TOPK_REDUCE: ("topk_reduce", "sums, and waits for later rows"),
}
"""Name in the trace, and the exact part of the step."""


@dataclass(frozen=True)
class TraceSpan:
    """One bar of a trace.

    Attributes:
        name: one of DISPATCH_NAMES or COMBINE_NAMES; on the host "dispatch" or "combine".
        part: the exact part of the step.
        phase: "dispatch" or "combine".
        step: counted from 1. On the host it counts its own calls, which are fewer where graphs are replayed.
        program: of the kernel, or HOST.
        start_ns, end_ns: by time.monotonic_ns of the host, also for a GPU's work.
        lane: a second name to tell bars apart by, for example the op's set of buffers.
    """

    name: str
    part: str
    phase: str
    step: int
    program: int
    start_ns: int
    end_ns: int
    lane: str = ""


MARKS = {
    "first store": (Span.QUANT_AND_PUT, min, "start_ns"),
    "last store": (Span.QUANT_AND_PUT, max, "end_ns"),
    "arrival": (Span.ARRIVE, max, "end_ns"),
    "post": (Span.POST, max, "end_ns"),
    "bookkeeping": (Span.ACCEPT_ROWS, max, "end_ns"),
    "flags seen": (Span.WAIT, max, "end_ns"),
    "end": (Span.FINISH, max, "end_ns"),
}
"""Points of a bulk dispatch on one rank, in order: the first or last edge of a span in any program."""


def dispatch_marks(spans: Iterable[TraceSpan]) -> list[dict[str, float]]:
    """Returns, for each step of one rank that has all MARKS, their microseconds since its first program began."""
    steps: defaultdict[tuple[str, int], list[TraceSpan]] = defaultdict(list)
    for each in spans:
        if each.phase == "dispatch" and each.program != HOST:
            steps[each.lane, each.step].append(each)
    found = []
    for of_step in steps.values():
        start_ns = min(each.start_ns for each in of_step)
        marks = {}
        for mark, (span, choose, edge) in MARKS.items():
            times_ns = [getattr(each, edge) for each in of_step if (each.name, each.part) == PARTS[span]]
            if times_ns:
                marks[mark] = (choose(times_ns) - start_ns) / 1000
        if len(marks) == len(MARKS):
            found.append(marks)
    return found
