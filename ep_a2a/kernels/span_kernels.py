"""Device helpers that note when a program begins and ends a part of a step, for traces (telemetry/profiler.py)."""

import triton.language as tl

from ep_a2a.kernels.layout import SPAN_PROGRAMS, SPAN_STEPS, SPAN_WORDS, Span
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import NUM_REGIONS, NUM_STAGES, clock_ns, num_steps
from ep_a2a.kernels.target import barrier

NUM_SPANS = tl.constexpr(len(Span))


@portable
def note_span(SPANS: tl.constexpr, op, ended: tl.constexpr = -1, begun: tl.constexpr = -1):
    """Notes when this program ends one span of the op's current step and begins another; nothing without SPANS."""
    if SPANS:
        note_time(op, ended, begun)


@portable
def note_time(op, ended: tl.constexpr, begun: tl.constexpr):
    """Notes the time as the end of one span and the start of another, -1 for none; all threads must come here.

    A step's number is that of the combines that have ended, so it is the same in all launches of the step. A note takes
    a barrier and some loads, about as long as what is noted for the shortest spans.
    """
    barrier()
    now = clock_ns()
    steps = op.table + NUM_REGIONS * op.WORLD_SIZE
    step = num_steps(op)
    program = tl.program_id(0)
    if program < SPAN_PROGRAMS:
        lines = tl.load(steps + NUM_STAGES).to(tl.pointer_type(tl.int64))
        line = lines + ((step & (SPAN_STEPS - 1)) * SPAN_PROGRAMS + program) * NUM_SPANS * SPAN_WORDS
        if ended >= 0:
            tl.store(line + ended * SPAN_WORDS + 1, now)
        if begun >= 0:
            tl.store(line + begun * SPAN_WORDS, now)
            tl.store(line + begun * SPAN_WORDS + 2, step + 1)


@portable
def note_clock_kernel(word):
    """Notes the time at which the launch before this one has ended. word: int64 [1]."""
    tl.store(word, clock_ns())
