"""Traces of dispatch and combine: spans inside the kernels and on the host, as JSON for Perfetto."""

from ep_a2a.telemetry.profiler import StepProfiler
from ep_a2a.telemetry.spans import COMBINE_NAMES, DISPATCH_NAMES, TraceSpan
from ep_a2a.telemetry.trace import write_trace

__all__ = ["COMBINE_NAMES", "DISPATCH_NAMES", "StepProfiler", "TraceSpan", "write_trace"]
