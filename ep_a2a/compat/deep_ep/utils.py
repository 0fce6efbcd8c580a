"""`deep_ep.utils`: DeepEP's events, and its communication stream, on which layouts and calls with async_finish run."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

import torch

from ep_a2a.ops.inputs import address_of

T = TypeVar("T")
HIGH_PRIORITY = -1


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


class CommStream:
    """Runs calls on the current stream, or on a stream of its own.

    A layout is always counted there: in DeepEP an asynchronous dispatch may read it, though its `previous_event` is
    older.

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
        beside: bool = False,
    ) -> tuple[T, EventOverlap]:
        """Returns the result of `work`, and the event after it, which is empty without `async_finish`.

        Args:
            work: launches the call; returns tensors, also in tuples and lists.
            inputs: the tensors that `work` reads, likewise.
            previous_event: an event to wait for; with async_finish in place of all work of the current stream. None or
                an empty one changes nothing.
            async_finish: the current stream does not wait for the call.
            beside: run on the communication stream without async_finish, too. Memory of such results is freed late, in
                a capture not before its end.
        """
        for tensor in tensors_of(inputs):
            address_of("each tensor", tensor)
        with torch.no_grad():
            if self._device.type != "cuda":
                return work(), EventOverlap(EventHandle() if async_finish else None)
            previous = None if previous_event is None else previous_event.event
            if not (async_finish or beside):
                if previous is not None:
                    previous.current_stream_wait()
                return work(), EventOverlap()
            return self._run_beside(work, inputs, previous, async_finish)

    def _run_beside(
        self, work: Callable[[], T], inputs: Any, previous: EventHandle | None, async_finish: bool
    ) -> tuple[T, EventOverlap]:
        current = torch.cuda.current_stream(self._device)
        if previous is None or not async_finish:
            self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            if previous is not None:
                previous.current_stream_wait()
            try:
                result = work()
            except BaseException:
                # a capture that the stream has joined ends with an error of its own unless the stream comes back
                current.wait_stream(self.stream)
                raise
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
