"""`deep_ep.utils`: DeepEP's events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class EventHandle:
    """An event on the current CUDA stream, recorded by the constructor. Without a GPU it is always over."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream())

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the recorded event."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """DeepEP's wrapper of an event; a `with` block waits for it at its end.

    Args:
        event: the event to wait for; None after a call without async_finish.
        extra_tensors: tensors to keep alive as long as this object.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: Sequence[torch.Tensor] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.current_stream_wait()
