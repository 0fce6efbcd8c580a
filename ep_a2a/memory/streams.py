"""Orders calls that use one piece of memory from different CUDA streams, and detects captures."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_recorded_on_cpu = False


def is_capturing(device: torch.device) -> bool:
    """Whether this thread's launches on `device` are captured instead of run; on CPU, inside of `recording_on_cpu`."""
    return torch._C._cuda_isCurrentStreamCapturing() if device.type == "cuda" else _recorded_on_cpu


@contextlib.contextmanager
def recording_on_cpu() -> Iterator[None]:
    """Makes calls on CPU fail as in a GPU's capture where they need memory or code that a capture cannot make."""
    global _recorded_on_cpu
    _recorded_on_cpu = True
    try:
        yield
    finally:
        _recorded_on_cpu = False


class StreamOrder:
    """Orders each call behind the previous one when that ran on another stream."""

    def __init__(self) -> None:
        self._last: tuple[int, bool, torch.cuda.Stream] | None = None

    def follow(self, device: torch.device) -> None:
        """Makes the current stream wait for the previous call; to be called before anything is launched."""
        if device.type != "cuda":
            return
        # The stream's number costs a tenth of the host time of its Python object.
        number, capturing = torch._C._cuda_getCurrentRawStream(device.index), is_capturing(device)
        last = self._last
        if last is not None and last[0] == number and last[1] == capturing:
            return
        stream = torch.cuda.current_stream(device)
        # a capture begins with a device synchronisation and cannot wait for streams outside
        if last is not None and last[0] != number and last[1] == capturing:
            stream.wait_stream(last[2])
        self._last = (number, capturing, stream)
