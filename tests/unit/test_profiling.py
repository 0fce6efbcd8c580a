"""Traces of given spans, and what recording them does to the kernels."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_a2a.kernels.layout import Span
from ep_a2a.ops.intra_node import IntraNodeEngine
from ep_a2a.telemetry.profiler import clock_offset
from ep_a2a.telemetry.spans import COMBINE_NAMES, DISPATCH_NAMES, HOST, PARTS, TraceSpan
from ep_a2a.telemetry.trace import trace_events, write_trace
from tests.offline_compile import compile_kernel, resources
from tests.unit.test_kernels_compile import NUM_SMS, config_of, kind_of

CLOCK = "%globaltimer"
KINDS = {
    "bulk_dispatch": ("rank_major", 2),
    "low_latency_dispatch": ("rank_major", 2),
    "combine": ("rank_major", 3),
    "expand": ("expert_major", 0),
    "number_expert_rows": ("expert_major", 0),
    "reduce_experts": ("expert_major", 0),
}
"""Kernels that can note times, each with a layout that launches it, and how many waits of it look at the clock."""
SPAN = TraceSpan("wait", "rows", "dispatch", 1, 0, 2_000, 5_000)


def some_spans() -> list[TraceSpan]:
    return [
        TraceSpan(name, "part", "dispatch", 1, program, 1000 * place, 1000 * place + 500)
        for place, name in enumerate((*DISPATCH_NAMES, *COMBINE_NAMES))
        for program in (HOST, 0, 3)
    ]


def test_every_span_has_a_name_of_the_layer():
    assert set(PARTS) == set(Span)
    assert {name for name, _ in PARTS.values()} == {*DISPATCH_NAMES, *COMBINE_NAMES}


def test_events_ascend_and_tell_ranks_and_programs_apart():
    spans = [replace(SPAN, start_ns=3_000), SPAN, replace(SPAN, program=HOST), replace(SPAN, lane="b")]
    events = trace_events(spans, rank=3)
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    bars = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {3}
    assert sorted(threads.values()) == ["b program 0", "host", "program 0"]
    assert [bar["ts"] for bar in bars] == [2.0, 2.0, 2.0, 3.0]
    assert [bar["dur"] for bar in bars] == [3.0, 3.0, 3.0, 2.0]
    assert len({bar["tid"] for bar in bars}) == 3


def test_a_file_holds_the_ranks_it_is_given(tmp_path: Path):
    write_trace({0: some_spans(), 2: [SPAN]}, tmp_path / "new" / "trace.json")
    events = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 2}


def test_the_interpreters_clock_is_the_hosts():
    assert clock_offset(torch.device("cpu")).offset_ns == 0


def variants_of(spans: bool, layout: str) -> dict[str, Any]:
    config = config_of(quant_type="fp8_per_1x128", layout=layout, max_num_inp_token_per_rank=128)
    engine = IntraNodeEngine(config, torch.zeros(64, config.world_size, dtype=torch.int64), torch.device("cpu"))
    engine.kernels.num_sms, engine.kernels.can_depend = NUM_SMS, True
    if spans:
        engine.record_spans()
    return {kind_of(variant): variant for variant in engine.compiled_kernels()}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_note_times_are_other_ones(kind: str, tmp_path: Path):
    """Without notes a kernel has no more clocks than its waits need; with them a quarter more registers at most."""
    layout, num_clocks = KINDS[kind]
    ptx, used = {}, {}
    for spans in (False, True):
        variant = variants_of(spans, layout)[kind]
        assert variant.named_constants["SPANS"] == spans
        asm = compile_kernel(variant)
        ptx[spans], used[spans] = asm["ptx"], resources(asm["cubin"], tmp_path)
    assert ptx[False].count(CLOCK) == num_clocks
    assert ptx[True].count(CLOCK) >= num_clocks + 2
    assert used[True]["LOCAL"] == 0
    assert used[True]["REG"] <= used[False]["REG"] * 5 // 4
