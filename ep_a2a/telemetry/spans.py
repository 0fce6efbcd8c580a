"""TraceSpan: a bar of a trace; and the names of a step's parts."""

from dataclasses import dataclass

from ep_a2a.kernels.layout import Span

HOST = -1
"""The program number of spans of the host."""
DISPATCH_NAMES = ("prepare", "quant_and_put", "count_put", "post", "wait", "postprocess")
COMBINE_NAMES = ("copy_and_put", "recv_wait", "topk_reduce")
PARTS: dict[Span, tuple[str, str]] = {
    Span.PREPARE: ("prepare", "counts and routes before the first row"),
    Span.QUANT_AND_PUT: ("quant_and_put", "rows"),
    Span.POST: ("post", "stores are seen, and the program is counted at every rank"),
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
