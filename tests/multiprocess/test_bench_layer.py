"""The benchmark's MoE layer on CPU processes: every transport and schedule gives the dense layer, and is reported."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from ep_a2a.cli.app import make_app
from ep_a2a.commands.bench.contenders import LAYERS, SCHEDULES
from ep_a2a.commands.bench.layer import Gate, LayerWorkload, dense_layer, make_weights, require_rows
from ep_a2a.commands.bench.report import make_table
from ep_a2a.commands.bench.runner import Runner, run_contender, run_sweep
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.errors import CheckFailedError, EpA2AError
from tests.integration.programs import run_cli, succeeded

if TYPE_CHECKING:
    from pathlib import Path

    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing import RankContext

ONCE = TimingSettings(num_warmups=0, num_runs=1, num_round_trips=1, num_host_calls=0)


def workload(num_tokens: int, quant_type: str = "none") -> LayerWorkload:
    """Five experts on two ranks."""
    return LayerWorkload(
        world_size=2,
        num_tokens=num_tokens,
        max_num_tokens=num_tokens,
        hidden_dim=128,
        topk=3,
        num_experts=5,
        quant_type=quant_type,
        layout="rank_major",
        intermediate_dim=32,
        comm_sms=24,
    )


@pytest.mark.parametrize(
    ("name", "quant_type"),
    [(name, quant_type) for name in LAYERS for quant_type in ("none", "fp8_per_1x128")]
    + [(name, "fp8_per_1x128") for name in SCHEDULES],
)
def test_each_layer_is_the_dense_layer(ranks: Any, name: str, quant_type: str) -> None:
    rows = ranks(run_contender, 2, workload(4, quant_type), name, ONCE)
    assert rows[0] == rows[1]
    if name == "flashinfer":
        assert rows[0]["reason"] == "needs GPUs"
    else:
        assert rows[0]["status"] == "ok", rows[0]["reason"]
        assert min(rows[0]["layer_us"], rows[0]["compute_us"]) > 0


def test_micro_batches_need_tokens_that_they_can_share(ranks: Any) -> None:
    row = ranks(run_contender, 2, workload(3), "micro_batches/in_turn", ONCE)[0]
    assert (row["status"], row["reason"]) == ("unavailable", "2 micro-batches cannot share 3 tokens")


def test_contenders_take_turns_in_each_round() -> None:
    order: list[str] = []

    class MadeUpRunner(Runner):
        def run(self, workload: Workload, name: str, settings: TimingSettings) -> dict[str, Any]:
            order.append(name)
            record = {"contender": name, "num_tokens": workload.num_tokens}
            if name == "flashinfer":
                return record | {"status": "unavailable", "reason": "needs GPUs"}
            return record | {"status": "ok", "layer_us": 10.0 * len(order), "compute_us": 1.0}

    (rows,) = run_sweep(
        [workload(3)], ("nccl_agrs", "flashinfer", "ep_a2a"), replace(ONCE, num_rounds=3), MadeUpRunner("cpu")
    )
    assert order == ["nccl_agrs", "flashinfer", *["ep_a2a", "nccl_agrs"] * 2, "ep_a2a"]
    assert [row["contender"] for row in rows] == ["nccl_agrs", "flashinfer", "ep_a2a"]
    assert rows[1]["status"] == "unavailable"
    assert rows[0]["rounds_us"] == [10.0, 40.0, 60.0]
    assert (rows[0]["layer_us"], rows[0]["least_us"], rows[0]["most_us"]) == (40.0, 10.0, 60.0)


def a_wrong_layer_is_found(context: RankContext) -> None:
    moved = workload(4)
    weights = make_weights(moved, context)
    gate = Gate(moved.inputs(context.rank).x, weights.router, moved.topk)
    gate()
    dense = dense_layer(moved, gate, weights, context)
    require_rows(dense.bfloat16(), dense)
    for wrong, text in ((0.0, "off where the norm"), (torch.nan, "nan")):
        with pytest.raises(CheckFailedError, match=text):
            require_rows(torch.full((4, moved.hidden_dim), wrong), dense)


def test_a_wrong_layer_is_found(ranks: Any) -> None:
    ranks(a_wrong_layer_is_found, 2)


SHAPE = "bench --layer --ranks 2 --device cpu --tokens 2 --hidden 128 --intermediate 32 --experts 4 --topk 2"
SMALL = (*SHAPE.split(), "--layers", "1", "--warmups", "0", "--runs", "1")


def test_layer_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert "Right: 1 of 1 results" in succeeded(run_cli(*SMALL, "--transports", "nccl_agrs", "--output", str(file)))
    header, row = [json.loads(line) for line in file.read_text().splitlines()]
    assert "times say nothing" in header["note"]
    assert (row["num_tokens"], row["quant_type"], row["contender"]) == (2, "none", "nccl_agrs")
    assert row["communication_us"] == row["layer_us"] - row["compute_us"]
    assert row["communication_share"] == row["communication_us"] / row["layer_us"]
    headings, cells, _ = make_table([row | {"device": "cuda"}])
    shown = dict(zip(headings, cells[0], strict=True))
    assert (shown["T"], shown["contender"], shown["layer µs"]) == ("2", "nccl_agrs", f"{row['layer_us']:.1f}")


def test_schedules_from_the_command_line(tmp_path: Path) -> None:
    file, plot = tmp_path / "rows.jsonl", tmp_path / "x.svg"
    more = ("--schedules", "shared_expert", "--traces", str(tmp_path / "traces"), "--plot", str(plot))
    assert "shared_expert/between" in succeeded(run_cli(*SMALL, *more, "--output", str(file)))
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        f"shared_expert_{variant}_2.json.gz" for variant in ("in_turn", "between", "beside")
    }
    _, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["contender"], row["comm_sms"]) for row in rows] == [
        (f"shared_expert/{variant}", 24) for variant in ("in_turn", "between", "beside")
    ]
    assert all(row["communication_us"] == row["layer_us"] - row["compute_us"] for row in rows)
    assert plot.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("bench", "--device", "cpu", "--schedules", "micro_batches"), "no --schedules without --layer"),
        (("bench", "--device", "cpu", "--layers", "3"), "no --layers without --layer"),
        ((*SMALL, "--cold-cache"), "no --cold-cache with --layer"),
        ((*SMALL, "--contenders", "deepep"), "ep_a2a, flashinfer, nccl_agrs"),
        ((*SMALL, "--schedules", "none_such"), "micro_batches, shared_expert"),
        ((*SMALL, "--intermediate", "0"), "--intermediate >= 1"),
        ((*SMALL, "--output", "/nowhere/rows.jsonl"), "a folder /nowhere"),
        ((*SMALL, "--transports", "nccl_agrs", "--output", "/dev/full"), "No space left"),
    ],
)
def test_layers_that_cannot_be_are_refused(arguments: tuple[str, ...], expected: str) -> None:
    error = CliRunner().invoke(make_app(), arguments).exception
    assert isinstance(error, EpA2AError)
    assert expected in str(error)
