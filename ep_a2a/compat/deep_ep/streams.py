"""DeepEP's communication stream: where calls run that shall finish asynchronously."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ep_a2a.compat.deep_ep.utils import EventHandle, EventOverlap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
HIGH_PRIORITY = -1


class CommStream:
    """Runs calls on the current stream, or beside it on a stream of its own.

    On CPU, where work is done when a call returns, events are there and mean nothing.

    Args:
        device: the buffer's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def stream(self) -> Any:
        """The stream of asynchronous calls; torch's stand-in for one on CPU."""
        if self._device.type != "cuda":
            return torch.cpu.current_stream()
        return torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]

    def run(
        self, work: Callable[[], T], inputs: Any, previous_event: EventOverlap | None, async_finish: bool
    ) -> tuple[T, EventOverlap]:
        """What `work` returns, and the event after it, which is empty unless `async_finish`.

        Args:
            work: launches the call; what it returns may be tensors, also in tuples and lists.
            inputs: the tensors that it reads, likewise.
            previous_event: what to wait for; None, or an empty one: all work of the current stream.
            async_finish: run on the communication stream and let the current one go on.
        """
        with torch.no_grad():
            if self._device.type != "cuda":
                return work(), EventOverlap(EventHandle() if async_finish else None)
            previous = None if previous_event is None else previous_event.event
            if not async_finish:
                if previous is not None:
                    previous.current_stream_wait()
                return work(), EventOverlap()
            return self._run_beside(work, inputs, previous)

    def _run_beside(self, work: Callable[[], T], inputs: Any, previous: EventHandle | None) -> tuple[T, EventOverlap]:
        current = torch.cuda.current_stream(self._device)
        if previous is None:
            self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            if previous is not None:
                previous.current_stream_wait()
            result = work()
            event = EventHandle()
        for tensor in tensors_of(inputs):
            tensor.record_stream(self.stream)
        for tensor in tensors_of(result):
            tensor.record_stream(current)
        return result, EventOverlap(event)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_of(each)
