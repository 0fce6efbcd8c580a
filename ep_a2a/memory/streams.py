"""Order among calls that use one piece of memory from different CUDA streams; whether a stream is being captured."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_recorded_on_cpu = False


def is_capturing(device: torch.device) -> bool:
    """Whether what this thread launches on `device` is captured and not run: on CPU, inside of `recording_on_cpu`."""
    return torch._C._cuda_isCurrentStreamCapturing() if device.type == "cuda" else _recorded_on_cpu


@contextlib.contextmanager
def recording_on_cpu() -> Iterator[None]:
    """What needs memory or code that a capture cannot make fails inside, as it would on a GPU."""
    global _recorded_on_cpu
    _recorded_on_cpu = True
    try:
        yield
    finally:
        _recorded_on_cpu = False


class StreamOrder:
    """Puts each call behind the one before it when that ran on another stream."""

    def __init__(self) -> None:
        self._last: tuple[int, bool, torch.cuda.Stream] | None = None

    def follow(self, device: torch.device) -> None:
        """Makes the current stream wait for the previous call; to be called before anything is launched."""
        if device.type != "cuda":
            return
        # Asking for the stream's number costs a tenth of the host time that its Python object costs.
        number, capturing = torch._C._cuda_getCurrentRawStream(device.index), is_capturing(device)
        last = self._last
        if last is not None and last[0] == number and last[1] == capturing:
            return
        stream = torch.cuda.current_stream(device)
        # a capture begins with a device synchronisation and cannot wait for streams outside of it
        if last is not None and last[0] != number and last[1] == capturing:
            stream.wait_stream(last[2])
        self._last = (number, capturing, stream)
