"""Measures the offset between the clock that kernels read and the host's clock."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from ep_a2a.kernels.clock_kernels import note_clock_kernel
from ep_a2a.kernels.compiled_kernel import CompiledKernel

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
    seen, variant = words.numpy(), CompiledKernel(note_clock_kernel, {}, num_warps=1)
    variant.compile((words,))
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
