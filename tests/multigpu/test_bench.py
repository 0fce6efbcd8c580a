"""The benchmark on GPUs: every contender that is there passes its gate and is timed in a CUDA graph."""

import json
from pathlib import Path

import pytest
import torch

from ep_a2a.commands.bench.contenders import BETWEEN_NODES, CONTENDERS, LAYERS, PACKED, micro_batch_names
from ep_a2a.commands.bench.runner import Status, main_us, run_in_turn
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.commands.measure.workload import Workload
from tests.integration.programs import run_cli, succeeded

QUICK = TimingSettings(num_warmups=2, num_runs=5, num_round_trips=2, num_host_calls=10)
ALWAYS_THERE = ("ep_a2a", "reference_push", "nccl_agrs") if torch.cuda.device_count() > 1 else ("ep_a2a",)


@pytest.mark.parametrize("num_tokens", [1, 200])
@pytest.mark.parametrize("name", CONTENDERS)
def test_contenders_are_checked_and_timed(ranks, name, num_tokens):
    shape = {"hidden": 1024, "topk": 4, "experts": 16, "quant": "fp8_per_1x128"}
    workload = Workload(2, num_tokens, gpus_per_node=int(name in BETWEEN_NODES), **shape)
    (row,) = ranks(run_in_turn, 2, workload, [name], QUICK)[0]
    if row["status"] == Status.UNAVAILABLE and name not in ALWAYS_THERE:
        pytest.skip(row["reason"])
    assert (row["status"], row.get("reason")) == (Status.OK, None)
    assert row["dispatch_host_us"] > 0
    assert row["in_graph"]


@pytest.mark.parametrize(
    ("name", "uneven"),
    [(name, False) for name in (*LAYERS, *micro_batch_names([8, 0])[1:])]
    + [(name, True) for name in (*LAYERS, PACKED)],
)
def test_layers_are_checked_and_timed(ranks, name, uneven):
    shape = {"hidden": 1024, "topk": 4, "experts": 16, "quant": "fp8_per_1x128", "intermediate": 2048}
    workload = Workload(2, 200 if uneven else 64, layout="rank_major", uneven=uneven, **shape)
    (row,) = ranks(run_in_turn, 2, workload, [name], QUICK)[0]
    if row["status"] == Status.UNAVAILABLE:
        pytest.skip(row["reason"])
    assert (row["status"], row.get("reason")) == (Status.OK, None)
    assert main_us(row) > 0


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    shared = torch.cuda.device_count() == 1
    contenders = "ep_a2a" if shared else "reference_push,ep_a2a,nccl_agrs"
    options = ("--ranks", "2", "--tokens", "1,64", "--contenders", contenders, "--iterations", "5")
    printed = succeeded(run_cli("bench", "--device", "cuda", *options, "--output", str(path)))
    assert "nothing about GPUs" not in printed
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["gpus"]
    assert header["driver"]
    for row in rows:
        assert row["in_graph"]
        assert ("note" in row) == shared
        assert shared or row["round_trip_fraction_of_limit"] > 0
