"""DeepEP's interface where no other rank is needed: configs, events, layouts, handles, hooks."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ep_a2a.compat import deep_ep
from ep_a2a.compat.deep_ep import Buffer, Config, EventHandle, EventOverlap, utils
from ep_a2a.compat.deep_ep.buffer_base import BufferBase
from ep_a2a.compat.deep_ep.layouts import dispatch_layout, rank_ids, routed_ids
from ep_a2a.compat.deep_ep.low_latency import LowLatencyHandle
from ep_a2a.compat.deep_ep.ops import Hook, OpShape, Step, Steps
from ep_a2a.compat.deep_ep.utils import CommStream, tensors_of
from ep_a2a.config import Layout
from ep_a2a.errors import ConfigError, InputError, StateError
from tests.cases.tables import read_table

CPU = torch.device("cpu")
ARGUMENTS = read_table("deep_ep")["arguments"]
"""DeepEP's names in their order (deep_ep/buffer.py of V1, commit 567632d): positional calls must land where they do."""


@pytest.mark.parametrize("method", ARGUMENTS)
def test_arguments_are_those_of_deep_ep(method):
    parameters = inspect.signature(getattr(Buffer, method)).parameters.values()
    ours = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    assert ours == ARGUMENTS[method].split()


def test_names_that_callers_import():
    assert utils.EventHandle is EventHandle is deep_ep.EventHandle
    assert utils.EventOverlap is EventOverlap
    assert deep_ep.topk_idx_t is torch.int64


# --- configs ---


@pytest.mark.parametrize("hint", [Config.get_nvl_buffer_size_hint, Config.get_rdma_buffer_size_hint])
def test_hints_are_of_sizes_that_there_are(hint):
    assert hint(Config(num_sms=19), 1024, 8) >= 0
    for num_sms, hidden_bytes, num_ranks in (
        (20, 1024, 0),
        (20, 1024, -8),
        (20, 0, 8),
        (20, -2, 16),
        (19, 1024, 16),
        (20, 14336, 12),
    ):
        with pytest.raises(ConfigError):
            hint(Config(num_sms=num_sms), hidden_bytes, num_ranks)


def test_a_config_holds_whole_chunks():
    config = Config(20, 6, 256, 6, 128)
    assert (config.num_max_rdma_chunked_recv_tokens, config.num_rdma_ring_tokens) == (128, 132)
    assert Config() == Config(num_sms=20, num_max_nvl_chunked_send_tokens=6)


@pytest.mark.parametrize("values", [(-1,), (20, 0), (20, 256, 256), (20, 6, 256, 0), (20, 6, 256, 64, 64)])
def test_impossible_configs(values):
    with pytest.raises(ConfigError):
        Config(*values)


def test_num_sms_reach_the_configs(monkeypatch):
    base = BufferBase
    monkeypatch.setattr(base, "num_sms", 20)
    monkeypatch.setattr(base, "_max_sms", 0)
    Buffer.set_num_sms(24)
    assert Buffer.num_sms == Buffer.get_dispatch_config(8).num_sms == Buffer.get_combine_config(8).num_sms == 24
    monkeypatch.setattr(Buffer, "num_sms", 26)  # as callers assign it
    assert Buffer.get_dispatch_config(8).num_sms == Buffer.get_combine_config(8).num_sms == 26


# --- events ---


def test_events_without_a_gpu_mean_nothing():
    stream = CommStream(CPU)
    result, event = stream.run(lambda: torch.ones(1, requires_grad=True) * 2, None, EventOverlap(), True)
    assert not result.requires_grad
    assert event.event is not None
    with event as same:
        assert same is event
    assert stream.run(lambda: 3, None, Buffer.capture(), False)[1].event is None
    EventOverlap().current_stream_wait()
    assert stream.stream is stream.stream


class FakeStream:
    current: FakeStream

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def wait_stream(self, other: FakeStream) -> None:
        self.seen.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def comm_stream(monkeypatch):
    """A CommStream of a GPU whose streams write what they wait for into one list, `seen`."""
    FakeStream.current = main = FakeStream("main", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: mock.patch.object(FakeStream, "current", stream))
    stream = CommStream(torch.device("cuda", 0))
    vars(stream)["stream"] = FakeStream("side", main.seen)
    return stream


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # as in DeepEP behind the layout, which it reads, though the event that is waited for is older
        ({"async_finish": True}, ["event", "work on side"]),
        (
            {"async_finish": False, "beside": True},
            ["side waits for main", "event", "work on side", "main waits for side"],
        ),
        ({"async_finish": False}, ["event", "work on main"]),
    ],
)
def test_an_asynchronous_call_is_behind_the_layout_that_it_reads(comm_stream, options, expected):
    seen = comm_stream.stream.seen
    previous = EventOverlap(SimpleNamespace(current_stream_wait=lambda: seen.append("event")))
    _, event = comm_stream.run(lambda: seen.append(f"work on {FakeStream.current.name}"), None, previous, **options)
    assert seen == expected
    assert (event.event is None) != options["async_finish"]


def test_a_call_that_fails_on_the_communication_stream_comes_back(comm_stream):
    """A capture that a stream has joined cannot end while the stream is away."""
    seen = comm_stream.stream.seen
    with pytest.raises(InputError):
        comm_stream.run(lambda: dispatch_layout(torch.zeros(1, 1, dtype=torch.int32), 3, 2, 1), None, None, True)
    assert seen == ["side waits for main", "main waits for side"]


def test_tensors_are_found_where_they_are():
    one, two = torch.zeros(1), torch.ones(1)
    assert list(tensors_of((one, None, [3, (two,)]))) == [one, two]


# --- layouts ---


@st.composite
def routings(draw: Any) -> tuple[torch.Tensor, int, int]:
    num_ranks, per_rank = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    num_tokens, topk = draw(st.integers(0, 7)), draw(st.integers(1, 4))
    ids = draw(
        st.lists(st.integers(-2, num_ranks * per_rank + 1), min_size=num_tokens * topk, max_size=num_tokens * topk)
    )
    dtype = draw(st.sampled_from((torch.int64, torch.int32)))
    return torch.tensor(ids, dtype=dtype).view(num_tokens, topk), num_ranks, per_rank


@given(routings())
def test_layouts(routing):
    ids, num_ranks, per_rank = routing
    num_experts = num_ranks * per_rank
    per_rank_counts, none, per_expert, is_in_rank = dispatch_layout(ids, num_experts, num_ranks, 1)
    owners = [[e // per_rank for e in token if 0 <= e < num_experts] for token in ids.tolist()]
    assert none is None
    assert is_in_rank.tolist() == [[rank in token for rank in range(num_ranks)] for token in owners]
    assert per_rank_counts.tolist() == [sum(rank in token for token in owners) for rank in range(num_ranks)]
    assert per_expert.tolist() == [int((ids == expert).sum()) for expert in range(num_experts)]
    assert {per_rank_counts.dtype, per_expert.dtype} == {torch.int32}
    valid = torch.where((ids >= 0) & (ids < num_experts), ids, -1)
    assert routed_ids(ids, is_in_rank, num_experts).tolist() == valid.tolist()
    assert (rank_ids(is_in_rank) >= 0).tolist() == is_in_rank.tolist()


def test_a_token_goes_only_where_it_is_marked():
    ids = torch.tensor([[0, 2], [3, 1]])
    marked = torch.tensor([[True, False], [True, True]])
    assert routed_ids(ids, marked, 4).tolist() == [[0, -1], [3, 1]]


# --- handles, hooks ---


def test_a_low_latency_handle_is_a_sequence():
    handle = LowLatencyHandle(OpShape(torch.bfloat16, 512, 2, 8, 16, Layout.EXPERT_MAJOR), torch.zeros(1, 2))
    assert len(handle) == 5
    assert handle[2:] == (16, 512, 8)
    assert handle[-1] == 8
    vars(handle)["_sources"] = ("src_info", "layout_range")
    assert list(handle) == ["src_info", "layout_range", 16, 512, 8]
    with pytest.raises(IndexError):
        handle[5]


def test_a_hook_receives_on_the_stream_of_the_send(monkeypatch):
    """As DeepEP's: the caller may call it on another one, and reads the rows on the stream of its dispatch."""
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(seen.append(stream)))
    Hook(lambda: seen.append("received"), torch.device("cuda", 1))()
    assert seen == ["stream of cuda:1", "received"]


def test_rows_are_overwritten_by_any_low_latency_op_of_their_index():
    """Ops of one index share the memory of rows by expert, of whatever dtype and size they are."""
    op, other = (SimpleNamespace(config=SimpleNamespace(combined_dtype=torch.bfloat16), device=CPU) for _ in range(2))
    for each in (op, other):
        each.combine = lambda *_: None
        each.open_step = SimpleNamespace(dispatched=SimpleNamespace(tokens=torch.zeros(1, 1, 8)))
    for keeps_rows in (True, False):
        steps = Steps(1)
        first = Step(op, steps.free_index())
        steps.add(first, keeps_rows=True)
        steps.expect_rows(first)
        second = Step(other, steps.free_index())
        assert first.is_displaced
        steps.expect_rows(first)
        steps.add(second, keeps_rows=keeps_rows)
        with pytest.raises(StateError, match="max_open_steps") if keeps_rows else contextlib.nullcontext():
            steps.expect_rows(first)


def test_a_buffer_keeps_a_step_at_least():
    with pytest.raises(ConfigError, match="max_open_steps"):
        Steps(0)
