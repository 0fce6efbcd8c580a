"""How engines of vLLM are measured in turn, profiled and summed up, without vLLM and without a GPU."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.vllm import __main__ as bench
from bench.vllm import probe
from bench.vllm.report import Kernel, is_exchange, of_ranks, profile, schedule
from tests.engines.vllm.gpu.engine import Action, Run


def test_kernels_of_an_exchange_are_told_by_their_names() -> None:
    exchange = ["ll_dispatch_kernel", "combine_kernel", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(args)"]
    exchange += ["void deep_ep::internode_ll::combine<true, 7168>(void*)"]
    others = ["void flash::flash_fwd_splitkv_combine_kernel<traits>(Params)", "fused_moe_kernel"]
    assert [name for name in exchange + others if is_exchange(name)] == exchange


def test_engines_run_in_the_order_a_b_b_a() -> None:
    assert schedule(["a", "b", "c"], 1) == ["a", "b", "c", "c", "b", "a"]
    assert schedule(["a", "b"], 2) == ["a", "b", "b", "a"] * 2


def test_a_gap_is_time_without_any_kernel() -> None:
    kernels = [
        Kernel("late", 90, 100),
        Kernel("combine_kernel", 0, 30),
        Kernel("beside", 10, 20),
        Kernel("ncclDevKernel_AllGather", 25, 50),
        Kernel("next", 50, 60),
    ]
    found = profile(kernels, num_steps=2, num_layers=5)
    assert found == pytest.approx({"wall_ms": 0.05, "busy_ms": 0.035, "gap_percent": 30, "exchange_us": 5.5})
    assert profile([], 2, 5) == {}


@pytest.mark.parametrize(("gap", "host_bound"), [(10.0, False), (10.1, True)])
def test_the_slowest_rank_counts_and_the_one_that_waits_least(gap: float, *, host_bound: bool) -> None:
    profiles = [
        {"wall_ms": 5.0, "busy_ms": 4.9, "gap_percent": 2.0, "exchange_us": 40.0},
        {"wall_ms": 5.1, "busy_ms": 4.6, "gap_percent": gap, "exchange_us": 12.3456},
    ]
    row = of_ranks([{"us": us, "profile": each} for us, each in zip(([3.0, 9.0], [4.0, 8.0]), profiles)])
    assert row == profiles[1] | {"us": [4.0, 9.0], "exchange_us": 12.346, "host_bound": host_bound}
    assert of_ranks([{"us": [1.0], "profile": {}}]) == {"us": [1.0]}


def test_engines_are_measured_in_turn_and_one_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[str, str]] = []

    def run_engine(_: Path, engine: dict[str, Any], actions: list[Action], ranks: int, *__: Any, **named: str) -> Run:
        started.append((engine["all2all_backend"], named.get("VLLM_X", "")))
        if engine["all2all_backend"] == "broken":
            return Run([[]] * ranks, [""] * ranks, "why it ended")
        us, gap = 10.0 * len(started), 20.0 if engine["max_num_seqs"] == 7 else 0.0
        report = {"us": [us], "profile": {"wall_ms": 1, "busy_ms": 1, "gap_percent": gap, "exchange_us": 3}}
        return Run([[{"label": action["label"]} | report for action in actions]] * ranks, [""] * ranks, "")

    monkeypatch.setattr(bench, "run_engine", run_engine)
    backends = "ours,broken,ours:VLLM_X=1:max_num_seqs=7"
    words = ["--ranks", "2", "--tokens", "8", "--prompt", "32", "--backends", backends, "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    assert bench.main() == 1
    assert started == [("ours", ""), ("broken", ""), ("ours", "1"), ("ours", "1"), ("ours", "")]
    printed = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in printed if line.startswith("{")]
    assert [row["turn"] for row in rows] == [0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 5, 5, 5]
    assert "why it ended" in rows[3]["error"]
    assert {row["workload"] for row in rows if "error" not in row} == {
        "decode 8",
        "prompts of 32",
        "prompt of 32 on one rank",
    }
    assert "| decode 8 | ours | 30 (10 to 50) | 1 (1 to 1) | 1 (1 to 1) | 0 (0 to 0) | 3 (3 to 3) |  |" in printed
    assert any(line.startswith("| decode 8 | ours:VLLM_X=1") and "host-bound" in line for line in printed)


def test_prompts_are_equal_or_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--ranks", "3", "--tokens", "8,16", "--shape", "deepseek_v2_lite"])
    actions = bench.actions_of(bench.parse_options())
    assert [action["label"] for action in actions[:2]] == ["decode 8", "decode 16"]
    assert {action["num_layers"] for action in actions} == {26}
    assert actions[2]["lengths"] == [[8192]] * 3
    assert actions[3]["lengths"] == [[8192], [1] * 64, [1] * 64]


@pytest.mark.parametrize(
    ("graphs", "numbers", "tokens", "expected"),
    [
        (["graph"], (200, 3), [64] + [4] * 12, "g" * 9 + "s" + "g" * 2 + "e" + "g" * 2),
        ([], (200, 3), [4] * 12, ""),
        (["graph"] * 2, (200, 3), [4] * 12, "g" * 24),
        (["graph"], (), [0, 4, 0, 4], "gsgegg"),
    ],
    ids=["decode", "no graph", "pieces", "prompts"],
)
def test_steps_of_a_number_of_tokens_are_replayed_and_profiled(
    monkeypatch: pytest.MonkeyPatch, graphs: list[Any], numbers: tuple[int, ...], tokens: list[int], expected: str
) -> None:
    """g: a graph is replayed by the engine; s, e: a profile starts and ends."""
    done: list[str] = []

    class Probe(probe.Probe):
        def _replay_us(self, graph: Any) -> float:
            return float(len(graph))

        def _start_profile(self) -> None:
            self._profiler = done.append("s") or True

        def _stop_profile(self) -> None:
            self._profiler = done.append("e")

    def execute_model(scheduled: Any) -> int:
        for graph in graphs:
            torch.cuda.CUDAGraph.replay(graph)
        return int(scheduled.total_num_scheduled_tokens)

    monkeypatch.setattr(probe, "Probe", Probe)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda _: done.append("g"))
    worker = SimpleNamespace(execute_model=execute_model)
    probe.watch(SimpleNamespace(worker=worker), 4, 1, *numbers)
    assert [worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=each)) for each in tokens] == tokens
    assert "".join(done) == expected
    assert probe.fetch(None)["us"] == ([5.0] * probe.REPEATS if len(graphs) == 1 and numbers else [])
    assert worker.execute_model is execute_model
