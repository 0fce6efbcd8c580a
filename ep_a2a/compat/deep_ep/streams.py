"""DeepEP's communication stream, on which the calls of normal mode run, and low-latency ones with async_finish."""

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
    """Runs calls in their order on a stream of its own.

    All normal calls are on it, as in DeepEP: a call may read what an earlier one returned, even if its `previous_event`
    is older than that.

    On CPU a call's work is done when it returns. Events exist there and wait for nothing.

    Args:
        device: the buffer's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def stream(self) -> Any:
        """The stream; on CPU torch's placeholder for a stream."""
        if self._device.type != "cuda":
            return torch.cpu.current_stream()
        return torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]

    def run(
        self,
        work: Callable[[], T],
        inputs: Any,
        previous_event: EventOverlap | None,
        async_finish: bool,
        *,
        here: bool = False,
    ) -> tuple[T, EventOverlap]:
        """Returns the result of `work`, and the event after it, which is empty without `async_finish`.

        Args:
            work: launches the call; returns tensors, also in tuples and lists.
            inputs: the tensors that `work` reads, likewise.
            previous_event: with async_finish, the event to wait for in place of all work of the current stream. None or
                an empty one changes nothing.
            async_finish: the current stream does not wait for the call.
            here: run on the current stream instead; without async_finish.
        """
        with torch.no_grad():
            if self._device.type != "cuda":
                return work(), EventOverlap(EventHandle() if async_finish else None)
            if here:
                return work(), EventOverlap()
            return self._run_beside(work, inputs, previous_event, async_finish)

    def _run_beside(
        self, work: Callable[[], T], inputs: Any, previous_event: EventOverlap | None, async_finish: bool
    ) -> tuple[T, EventOverlap]:
        current = torch.cuda.current_stream(self._device)
        previous = None if previous_event is None else previous_event.event
        if previous is None or not async_finish:
            self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            if previous is not None:
                previous.current_stream_wait()
            result = work()
            event = EventHandle()
        for tensor in tensors_of(result):
            tensor.record_stream(current)
        if not async_finish:
            current.wait_stream(self.stream)
            return result, EventOverlap()
        for tensor in tensors_of(inputs):
            tensor.record_stream(self.stream)
        return result, EventOverlap(event)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yields all tensors in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_of(each)
