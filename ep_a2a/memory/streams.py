"""Order among calls that use one piece of memory from different CUDA streams."""

from __future__ import annotations

from typing import Any

import torch


class StreamOrder:
    """Puts each call behind the one before it when that ran on another stream."""

    def __init__(self) -> None:
        self._last: tuple[Any, bool] | None = None

    def follow(self, device: torch.device) -> None:
        """Makes the current stream wait for the previous call; to be called before anything is launched."""
        if device.type != "cuda":
            return
        stream, capturing = torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing()
        if self._last is not None:
            last, last_capturing = self._last
            # a capture begins with a device synchronisation and cannot wait for streams outside of it
            if last != stream and capturing == last_capturing:
                stream.wait_stream(last)
        self._last = (stream, capturing)
