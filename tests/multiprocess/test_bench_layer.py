"""The benchmark's MoE layer on CPU processes: every transport and schedule gives the dense layer, and is reported."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from ep_a2a.commands.bench import layer, overlap
from ep_a2a.commands.bench.layer import run_layers
from ep_a2a.commands.bench.layer_model import Gate, check_layer, make_weights
from ep_a2a.commands.bench.overlap import OverlapSettings, run_overlap
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.errors import CheckFailedError
from ep_a2a.ops.op import EpDispatchCombineOp

if TYPE_CHECKING:
    from pathlib import Path

    from ep_a2a.testing import RankContext

INTERMEDIATE = 32
ONCE = TimingSettings(num_warmups=0, num_runs=1, num_round_trips=1, num_host_calls=0)
needs_split_calls = pytest.mark.skipif(
    not hasattr(EpDispatchCombineOp, "dispatch_send"), reason="the op has no split calls (dispatch_send)"
)


def workload(num_tokens: int, quant_type: str = "none") -> Workload:
    """Five experts on two ranks."""
    return Workload(
        world_size=2,
        num_tokens=num_tokens,
        max_num_tokens=num_tokens,
        hidden_dim=128,
        topk=3,
        num_experts=5,
        quant_type=quant_type,
        layout="rank_major",
    )


@pytest.mark.parametrize("quant_type", ["none", "fp8_per_1x128"])
def test_layer_is_the_dense_layer(ranks: Any, quant_type: str) -> None:
    names = ("ep_a2a", "flashinfer", "nccl_agrs")
    rows = ranks(run_layers, 2, workload(3, quant_type), INTERMEDIATE, names, ONCE)
    assert rows[0] == rows[1]
    by_name = {row["transport"]: row for row in rows[0]}
    assert by_name["flashinfer"]["unavailable"] == "needs GPUs"
    for name in ("ep_a2a", "nccl_agrs"):
        row = by_name[name]
        assert row["communication_us"] == row["layer_us"] - row["compute_us"]


def turns_of(context: RankContext) -> list[str]:
    """Which transports' layers ran, in the order of their first runs of each round."""
    order = []
    time_checked = layer.LayerBench.time_checked

    def noted(bench: layer.LayerBench, work: Any, check: Any) -> float:
        order.append(check.args[0])
        return time_checked(bench, work, check)

    with mock.patch.object(layer.LayerBench, "time_checked", noted):
        rows = run_layers(context, workload(3), INTERMEDIATE, ("nccl_agrs", "ep_a2a"), ONCE, 3)
    for row in rows:
        assert row["least_us"] == min(row["rounds_us"]) <= row["layer_us"] <= row["most_us"] == max(row["rounds_us"])
        assert len(row["rounds_us"]) == 3
    return order


def test_transports_take_turns(ranks: Any) -> None:
    assert ranks(turns_of, 2)[0] == ["nccl_agrs", "ep_a2a"] * 3


def a_wrong_layer_is_found(context: RankContext) -> None:
    moved = workload(4)
    weights = make_weights(moved, INTERMEDIATE, context)
    gate = Gate(moved.inputs(context.rank).x, weights.router, moved.topk)
    gate()
    with pytest.raises(CheckFailedError, match="a wrong one"):
        check_layer("a wrong one", moved, gate, weights, context, torch.zeros(4, moved.hidden_dim))
    with pytest.raises(CheckFailedError, match="nan"):
        check_layer("not a number", moved, gate, weights, context, torch.full((4, moved.hidden_dim), torch.nan))


def test_a_wrong_layer_is_found(ranks: Any) -> None:
    ranks(a_wrong_layer_is_found, 2)


@needs_split_calls
def test_schedules_give_the_dense_layer(ranks: Any, tmp_path: Path) -> None:
    settings = OverlapSettings(overlap.SCHEDULES, 24, INTERMEDIATE, ONCE, None)
    rows = ranks(run_overlap, 2, workload(4, "fp8_per_1x128"), settings)
    assert rows[0] == rows[1]
    assert [(row["schedule"], row["variant"]) for row in rows[0]] == [
        ("micro_batches", "in_turn"),
        ("micro_batches", "overlapped"),
        ("shared_expert", "in_turn"),
        ("shared_expert", "between"),
        ("shared_expert", "beside"),
    ]


SMALL = [
    *("--ranks", "2", "--device", "cpu", "--tokens", "2", "--hidden", "128", "--intermediate", "32", "--experts", "4"),
    *("--topk", "2", "--layers", "1", "--warmups", "0", "--runs", "1"),
]


def test_layer_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    layer.main([*SMALL, "--transports", "nccl_agrs", "--output", str(file)])
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert row["transport"] == "nccl_agrs"
    assert "communication_share" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        layer.main([*SMALL, "--transports", "nccl_agrs", "--output", "/nowhere/rows.jsonl"])
    assert ended.value.code == 2
    assert "--output: expected a folder /nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        layer.main([*SMALL, "--transports", "nccl_agrs", "--output", "/dev/full"])
    assert ended.value.code == 2
    assert "No space left" in capsys.readouterr().err


@needs_split_calls
def test_overlap_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overlap.main([*SMALL, "--schedules", "shared_expert", "--traces", str(tmp_path)])
    assert "exposed_us" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {
        f"shared_expert_{variant}_2.json.gz" for variant in ("in_turn", "between", "beside")
    }
