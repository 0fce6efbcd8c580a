"""Traces of layers and of `ep-a2a trace`, on CPU processes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases.low_latency_cases import BASE, CASES
from tests.cases.profiling_cases import check_traces, layer_without_profiling, profiled_layer
from tests.integration.programs import run_cli, succeeded


@pytest.mark.parametrize("name", ["bf16", "many tokens"])
def test_traces_of_a_layer(ranks: Any, name: str, tmp_path: Path) -> None:
    case = replace(CASES[name], tokens=((3, 2),))
    ranks(profiled_layer, case.world_size, case, tmp_path / "prof")
    check_traces(tmp_path / "prof", case.world_size, "cpu", is_bulk=name == "many tokens")


def test_without_profiling(ranks: Any, tmp_path: Path) -> None:
    ranks(layer_without_profiling, BASE.world_size, BASE, tmp_path / "prof")
    assert not (tmp_path / "prof").exists()


def test_the_command(tmp_path: Path) -> None:
    sizes = ("--tokens", "2", "--hidden", "128", "--steps", "1", "--layout", "compact", "--quant", "none")
    path = tmp_path / "steps.json"
    path.write_text("earlier")
    done = run_cli("trace", *sizes, "--device", "cpu", "--output", str(path))
    out = succeeded(done)
    assert "topk_reduce" in out
    assert f"written: {path}\n" in done.stderr
    merged = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in merged} == {0, 1}
    # rows are not copied by expert in this layout
    names = {"prepare", "quant_and_put", "count_put", "wait", "copy_and_put", "recv_wait", "topk_reduce"}
    assert {event["name"] for event in merged if event["ph"] == "X"} == names | {"dispatch", "combine"}
