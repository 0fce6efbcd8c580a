"""On which streams a call waits for the one before it, with streams that are made up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ep_a2a.memory import guards
from ep_a2a.memory.guards import StreamOrder

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, number: int) -> None:
        self.number, self.captures = number, False
        self.waited_for: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.number)


class Streams:
    """Two streams of which one is the current one."""

    def __init__(self) -> None:
        self.both = Stream(1), Stream(2)
        self.current = self.both[0]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def capture(self, stream: Stream) -> Iterator[None]:
        stream.captures = True
        with self.on(stream):
            yield
        stream.captures = False


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: made.current.number, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(guards, "is_capturing", lambda _: made.current.captures)
    return made


def calls(order: StreamOrder, streams: Streams, *on: Stream) -> None:
    for stream in on:
        with streams.on(stream):
            order.follow(GPU)


def test_a_call_waits_for_the_one_before_on_another_stream(streams: Streams) -> None:
    order, (a, b) = StreamOrder(), streams.both
    calls(order, streams, a, a, b, b, a)
    assert (a.waited_for, b.waited_for) == ([2], [1])
    assert not order.has_captured


def test_a_capture_waits_for_no_stream_outside(streams: Streams) -> None:
    order, (a, b) = StreamOrder(), streams.both
    calls(order, streams, a)
    with streams.capture(b):
        order.follow(GPU)
    calls(order, streams, a)
    assert a.waited_for == b.waited_for == []
    assert order.has_captured


def test_streams_of_one_capture_wait_for_each_other(streams: Streams) -> None:
    order, (a, b) = StreamOrder(), streams.both
    with streams.capture(a):
        order.follow(GPU)
        b.captures = True
        calls(order, streams, b)
        b.captures = False
    assert b.waited_for == [1]


def test_a_capture_does_not_wait_for_an_earlier_one(streams: Streams) -> None:
    order, (a, b) = StreamOrder(), streams.both
    for stream in (a, b, a):
        with streams.capture(stream):
            order.follow(GPU)
    assert a.waited_for == b.waited_for == []


def test_a_record_is_read_without_a_wait_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronising would end the capture with an error of CUDA's, in place of the one that the record tells of."""
    from types import SimpleNamespace

    from ep_a2a.ops import memory

    def synchronize(_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    bound: Any = SimpleNamespace(
        acquired=SimpleNamespace(local_own=SimpleNamespace(device=GPU)), record_words=[1, 3, 2]
    )
    monkeypatch.setattr(memory, "is_capturing", lambda _: True)
    assert memory.BoundMemory.synchronized_record(bound) == [1, 3, 2]
    monkeypatch.setattr(memory, "is_capturing", lambda _: False)
    with pytest.raises(RuntimeError, match="capturing"):
        memory.BoundMemory.synchronized_record(bound)
