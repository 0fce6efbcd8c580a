"""When the programs of an op's kernels begin and end what they do, as they note it themselves in device memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.counter_kernels import LINE_WORDS, Counter, start_wait_kernel
from ep_a2a.kernels.layout import SPAN_PROGRAMS, SPAN_STEPS, SPAN_WORDS, Span
from ep_a2a.memory.allocator_isolation import outside_pools

if TYPE_CHECKING:
    from ep_a2a.ops.op import EpDispatchCombineOp

START, END, STEP = range(3)
"""Words of a span's line."""
NUM_CLOCK_READINGS = 64
CLOCK_TIMEOUT_SECS = 10.0


@dataclass(frozen=True)
class RecordedSpan:
    """What one program did in one step.

    Attributes:
        span: what it did. program: its number in its launch.
        step: the op's step, counted from 1 since the op was built or reset.
        start_ns, end_ns: by the device's clock.
    """

    span: Span
    program: int
    step: int
    start_ns: int
    end_ns: int


class SpanRecorder:
    """Makes an op's kernels note times from now on, and reads them. Local: other ranks need not do so.

    After the op's `reset`, which begins to count steps anew, `clear` must be called.

    The first SPAN_PROGRAMS programs of each launch are noted, of the latest SPAN_STEPS steps. Kernels that note are
    other ones than those that do not, compiled here: nothing is left of it in an op without a recorder. Graphs captured
    before go on without notes.

    Args:
        op: whose kernels; between two steps.
    """

    def __init__(self, op: EpDispatchCombineOp) -> None:
        self.op = op
        memory = op.memory.acquired
        if memory.spans is None:
            shape = (SPAN_STEPS, SPAN_PROGRAMS, len(Span), SPAN_WORDS)
            memory.spans = outside_pools(lambda: torch.zeros(shape, dtype=torch.int64, device=op.device), op.device)
        self.lines = memory.spans
        self.clear()
        op.memory.spans_address.fill_(self.lines.data_ptr())
        op.record_spans()

    def clear(self) -> None:
        """Forgets what was noted, on the current stream; between two steps."""
        self.lines.zero_()

    def read(self) -> list[RecordedSpan]:
        """The spans of the latest steps, by start. Waits for the current stream."""
        lines = self.lines.cpu()
        last = int(lines[..., STEP].max())
        whole = (lines[..., START] > 0) & (lines[..., END] >= lines[..., START])
        found = whole & (lines[..., STEP] > max(0, last - SPAN_STEPS))
        spans = [
            RecordedSpan(Span(span), program, words[STEP], words[START], words[END])
            for (_, program, span), words in zip(found.nonzero().tolist(), lines[found].tolist())
        ]
        return sorted(spans, key=lambda each: (each.start_ns, each.span, each.program))


@dataclass(frozen=True)
class ClockOffset:
    """How a device's clock stands to time.monotonic_ns of its host.

    Attributes:
        offset_ns: to be added to the device's times.
        width_ns: the true offset is at most this much lower.
    """

    offset_ns: int
    width_ns: int


def clock_offset(device: torch.device) -> ClockOffset:
    """Compares a device's clock with the host's: 0 on CPU, where kernels read the host's clock.

    On a GPU a program writes its time into host memory, which the host watches. It sees the time after it was taken, so
    the smallest difference of many is closest to the truth, and about as far from it on every GPU of a host.

    Raises:
        TimeoutError: the GPU is busy for longer than CLOCK_TIMEOUT_SECS.
    """
    if device.type == "cpu":
        return ClockOffset(0, 0)
    words = torch.zeros(LINE_WORDS, dtype=torch.int64, pin_memory=True)
    seen, variant = words.numpy(), CompiledKernel(start_wait_kernel, {}, num_warps=1)
    variant.compile((words,))
    highest, lowest = None, None
    for _ in range(NUM_CLOCK_READINGS):
        torch.cuda.synchronize(device)
        seen[Counter.STARTED_NS] = 0
        before_ns = time.monotonic_ns()
        variant.launch(1, (words,), device)
        while not seen[Counter.STARTED_NS]:
            if time.monotonic_ns() - before_ns > CLOCK_TIMEOUT_SECS * 1e9:
                raise TimeoutError(f"the GPU did not tell its time within {CLOCK_TIMEOUT_SECS:g} s")
        after_ns, told_ns = time.monotonic_ns(), int(seen[Counter.STARTED_NS])
        highest = after_ns - told_ns if highest is None else min(highest, after_ns - told_ns)
        lowest = before_ns - told_ns if lowest is None else max(lowest, before_ns - told_ns)
    assert highest is not None
    assert lowest is not None
    return ClockOffset(highest, highest - lowest)
