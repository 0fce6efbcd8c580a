"""A launch that notes the time of the clock that kernels read."""

import triton.language as tl

from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import clock_ns


@portable
def note_clock_kernel(word):
    """Notes the time at which the launch before this one has ended. word: int64 [1]."""
    tl.store(word, clock_ns())
