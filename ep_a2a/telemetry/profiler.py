"""StepProfiler: records when an op's kernels and the host's calls begin and end on this rank."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.layout import SPAN_PROGRAMS, SPAN_STEPS, SPAN_WORDS, Span
from ep_a2a.kernels.span_kernels import note_clock_kernel
from ep_a2a.memory.allocator_isolation import outside_pools
from ep_a2a.ops.op import EpDispatchCombineOp
from ep_a2a.telemetry.spans import DISPATCH_NAMES, HOST, PARTS, TraceSpan

START, END, STEP = range(3)
"""Words of a span's line."""


class StepProfiler:
    """Lets an op's kernels note times from now on, and times the host's calls. Local: other ranks need no profiler.

    Kernels note the first SPAN_PROGRAMS programs of each launch and the latest SPAN_STEPS steps. Kernels that note are
    variants of their own, compiled here; an op without a profiler has none of them. Graphs captured before go on
    without notes. `clear` must follow the op's `reset`, which counts steps anew.

    Args:
        op: between two steps.
        lane: tells the ops of a trace apart.
    """

    def __init__(self, op: EpDispatchCombineOp, lane: str = "") -> None:
        self._op, self._lane = op, lane
        self._calls: deque[TraceSpan] = deque(maxlen=2 * SPAN_STEPS)
        self._num_calls = {"dispatch": 0, "combine": 0}
        memory = op.memory.acquired
        if memory.spans is None:
            shape = (SPAN_STEPS, SPAN_PROGRAMS, len(Span), SPAN_WORDS)
            memory.spans = outside_pools(lambda: torch.zeros(shape, dtype=torch.int64, device=op.device), op.device)
        self._lines = memory.spans
        self.clear()
        op.memory.spans_address.fill_(self._lines.data_ptr())
        op.record_spans()

    @contextlib.contextmanager
    def call(self, phase: str) -> Iterator[None]:
        """Record the host's time of the op's call in the block; phase is "dispatch" or "combine"."""
        start_ns = time.monotonic_ns()
        yield
        end_ns = time.monotonic_ns()
        self._num_calls[phase] += 1
        step = self._num_calls[phase]
        self._calls.append(TraceSpan(phase, "call", phase, step, HOST, start_ns, end_ns, self._lane))

    def clear(self) -> None:
        """Forget all spans, on the current stream. Call it between two steps."""
        self._lines.zero_()
        self._calls.clear()

    def spans(self) -> list[TraceSpan]:
        """The spans of the last steps: the host's, then the kernels' by start. The host waits for the device."""
        offset_ns, lines = clock_offset(self._op.device).offset_ns, self._lines.cpu()
        last = int(lines[..., STEP].max())
        whole = (lines[..., START] > 0) & (lines[..., END] >= lines[..., START])
        noted = whole & (lines[..., STEP] > max(0, last - SPAN_STEPS))
        found = []
        for (_, program, span), words in zip(noted.nonzero().tolist(), lines[noted].tolist()):
            name, part = PARTS[Span(span)]
            phase = "dispatch" if name in DISPATCH_NAMES else "combine"
            times_ns = (words[START] + offset_ns, words[END] + offset_ns)
            found.append(TraceSpan(name, part, phase, words[STEP], program, *times_ns, self._lane))
        return [*self._calls, *sorted(found, key=lambda each: each.start_ns)]


NUM_CLOCK_READINGS = 64
CLOCK_TIMEOUT_SECS = 10.0


class ClockOffset(NamedTuple):
    """The offset of a device's clock from time.monotonic_ns of its host."""

    offset_ns: int  # to be added to the device's times
    width_ns: int  # the true offset is at most this much lower


def clock_offset(device: torch.device) -> ClockOffset:
    """Measure the offset of a device's clock; 0 on CPU, where kernels read the host's clock.

    On a GPU a program writes its time into host memory, which the host watches. The host sees the time after it was
    taken. So the smallest of many differences is closest to the truth, about equally close on every GPU of a host.

    Raises:
        TimeoutError: the GPU is busy for longer than CLOCK_TIMEOUT_SECS.
    """
    if device.type == "cpu":
        return ClockOffset(0, 0)
    words = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
    seen, variant = words.numpy(), CompiledKernel(note_clock_kernel, (torch.int64,), {}, num_warps=1)
    variant.compile()
    highest_ns, lowest_ns = [], []
    for _ in range(NUM_CLOCK_READINGS):
        torch.cuda.synchronize(device)
        seen[0] = 0
        before_ns = time.monotonic_ns()
        variant.launch(1, (words,), device)
        while not seen[0]:
            if time.monotonic_ns() - before_ns > CLOCK_TIMEOUT_SECS * 1e9:
                raise TimeoutError(f"the GPU did not tell its time within {CLOCK_TIMEOUT_SECS:g} s")
        after_ns, device_ns = time.monotonic_ns(), int(seen[0])
        highest_ns.append(after_ns - device_ns)
        lowest_ns.append(before_ns - device_ns)
    return ClockOffset(min(highest_ns), min(highest_ns) - max(lowest_ns))
