"""Collects the spans of an op on this rank, on the host's clock."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

from ep_a2a.kernels.layout import SPAN_STEPS
from ep_a2a.telemetry.span_recorder import SpanRecorder, clock_offset
from ep_a2a.telemetry.spans import DISPATCH_NAMES, HOST, PARTS, TraceSpan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.ops.op import EpDispatchCombineOp


class StepProfiler:
    """Records what an op's kernels do and how long the host takes to call them. Local; see SpanRecorder.

    Args:
        op: between two steps.
        lane: told apart by this in a trace with several ops.
    """

    def __init__(self, op: EpDispatchCombineOp, lane: str = "") -> None:
        self._recorder, self._lane = SpanRecorder(op), lane
        self._calls: deque[TraceSpan] = deque(maxlen=2 * SPAN_STEPS)
        self._num_calls = {"dispatch": 0, "combine": 0}

    @contextlib.contextmanager
    def call(self, phase: str) -> Iterator[None]:
        """Around a call of the op: records the host's time. phase: "dispatch" or "combine"."""
        start_ns = time.monotonic_ns()
        yield
        end_ns = time.monotonic_ns()
        self._num_calls[phase] += 1
        step = self._num_calls[phase]
        self._calls.append(TraceSpan(phase, "call", phase, step, HOST, start_ns, end_ns, self._lane))

    def clear(self) -> None:
        """Forgets what was recorded; between two steps."""
        self._recorder.clear()
        self._calls.clear()

    def spans(self) -> list[TraceSpan]:
        """What was recorded of the latest steps. Waits for the device."""
        offset_ns = clock_offset(self._recorder.op.device).offset_ns
        found = list(self._calls)
        for each in self._recorder.read():
            name, part = PARTS[each.span]
            phase = "dispatch" if name in DISPATCH_NAMES else "combine"
            start_ns, end_ns = each.start_ns + offset_ns, each.end_ns + offset_ns
            found.append(TraceSpan(name, part, phase, each.step, each.program, start_ns, end_ns, self._lane))
        return found
