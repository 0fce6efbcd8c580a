"""The benchmark's MoE layer on CPU processes: every transport and schedule gives the dense layer, and is reported."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from ep_a2a.cli.app import app
from ep_a2a.commands.bench import command, runner
from ep_a2a.commands.bench.contenders import LAYERS, micro_batch_names
from ep_a2a.commands.bench.layer import Layer, require_rows
from ep_a2a.commands.bench.report import compare, make_table
from ep_a2a.commands.bench.runner import run_in_turn
from ep_a2a.commands.measure.session import OpRoundTrip
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.errors import CheckFailedError, EpA2AError
from ep_a2a.testing import RankContext
from tests.integration.programs import run_cli, succeeded

TWICE = TimingSettings(num_warmups=0, num_runs=1, num_round_trips=1, num_host_calls=0, num_rounds=2)


def workload(tokens: int, **changes: Any) -> Workload:
    """Five experts on two ranks."""
    return Workload(2, tokens, hidden=128, topk=3, experts=5, layout="rank_major", intermediate=32, **changes)


@pytest.mark.parametrize(
    ("quant", "combine_quant", "routing"),
    [("none", "none", "zipf"), ("fp8_per_1x128", "none", "uniform"), ("fp8_per_1x128", "fp8_blockwise", "uniform")],
)
def test_each_layer_is_the_dense_layer(ranks: Any, quant: str, combine_quant: str, routing: str) -> None:
    layer = workload(4, quant=quant, combine_quant=combine_quant, routing=routing)
    everyone = ranks(run_in_turn, 2, layer, LAYERS, TWICE)
    assert everyone[0] == everyone[1]
    push, own, flashinfer, gloo = everyone[0]
    assert flashinfer["reason"] == "needs GPUs"
    assert [each["status"] for each in (push, own, gloo)] == ["ok"] * 3, everyone[0]
    assert all(min(each["layer_us"], each["experts_us"], each["exchange_us"]) > 0 for each in (own, gloo))
    assert [len(each["rounds_us"]) for each in (push, own, gloo)] == [2] * 3
    assert push["least_us"] == push["most_us"] == push["exchange_us"], "timed once"


def test_one_rank_has_a_prompt_and_the_others_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Workload] = []
    monkeypatch.setattr(command, "measure", lambda sweep, *_: asked.extend(sweep.workloads))
    CliRunner().invoke(app, ["bench", "--device", "cpu", "--ranks", "3", "--layer", "--uneven"])
    assert [each.counts for each in asked] == [(8, 1, 1)]
    assert replace(asked[0], tokens=8192).counts == (8192, 64, 64)


def test_layers_of_unequal_ranks_are_the_dense_layer(ranks: Any) -> None:
    layer = workload(7, quant="fp8_per_1x128", uneven=True)
    rows = ranks(run_in_turn, 2, layer, ("reference_push", "ep_a2a", "ep_a2a_packed", "nccl_agrs"), TWICE)[0]
    assert [row["status"] for row in rows] == ["ok"] * 4, rows


def received_rows(context: RankContext) -> list[int]:
    layers = [Layer(workload(7, uneven=True), context, partial(OpRoundTrip, packed=packed)) for packed in (False, True)]
    for layer in layers:
        layer.run()
        layer.communication.close()
    return [len(layer.received.rows) for layer in layers]


def test_packed_rows_are_as_many_as_tokens(ranks: Any) -> None:
    """Seven and one."""
    assert ranks(received_rows, 2) == [[14, 8]] * 2


def test_layers_take_turns_the_other_way_round_in_every_second_round(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    class NotedRun(mock.Mock):
        def time(self, timer: object) -> None:
            timed.append(self._name)

    monkeypatch.setattr(runner, "_Run", lambda context, workload, name: NotedRun(_name=name))
    monkeypatch.setattr(runner, "Timer", mock.Mock())
    run_in_turn(mock.Mock(), workload(1), ("a", "b", "c"), replace(TWICE, num_rounds=3))
    assert timed == [*"abc", *"cba", *"abc"]


def test_micro_batches_are_dense_layers_however_they_run(ranks: Any) -> None:
    names = micro_batch_names([8])[1:]
    records = ranks(run_in_turn, 2, workload(3, quant="fp8_per_1x128"), names, TWICE)[0]
    assert [record["status"] for record in records] == ["ok"] * 4, records
    series, whole, *overlapped = compare(records)
    for row in (series, whole, *overlapped):
        assert row["exposed_us"] == row["layer_us"] - row["experts_us"]
        assert row["exposed_share"] == row["exposed_us"] / row["exchange_us"]
    assert {(row["experts_us"], row["exchange_us"]) for row in overlapped} == {
        (series["experts_us"], series["exchange_us"])
    }


def test_one_that_fails_leaves_the_others_their_times(ranks: Any) -> None:
    names = ("flashinfer", "none_such", "nccl_agrs")
    unavailable, unknown, gloo = ranks(run_in_turn, 2, workload(2), names, TWICE)[0]
    assert [each["status"] for each in (unavailable, unknown, gloo)] == ["unavailable", "error", "ok"]
    assert "none_such" in unknown["reason"]


def a_wrong_layer_is_found(context: RankContext) -> None:
    layer = Layer(workload(4), context, OpRoundTrip)
    right, dense = layer.run().clone(), layer.dense()
    layer.communication.close()
    require_rows(right, dense)
    for wrong, text in ((0.0, "off where the norm"), (torch.nan, "nan")):
        with pytest.raises(CheckFailedError, match=text):
            require_rows(torch.full((4, 128), wrong), dense)


def test_a_wrong_layer_is_found(ranks: Any) -> None:
    ranks(a_wrong_layer_is_found, 2)


SHAPE = "bench --layer --ranks 2 --device cpu --tokens 2 --hidden 128 --intermediate 32 --experts 4 --topk 2"
SMALL = (*SHAPE.split(), "--iterations", "1")


def test_layer_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    more = ("--contenders", "ep_a2a", "--output", str(file))
    assert "Right: 1 of 1 results" in succeeded(run_cli(*SMALL, *more))
    header, row = [json.loads(line) for line in file.read_text().splitlines()]
    assert "times say nothing" in header["note"]
    assert (row["tokens"], row["quant"], row["contender"]) == (2, "fp8_per_1x128", "ep_a2a")
    headings, cells = make_table([row | {"device": "cuda"}])
    shown = dict(zip(headings, cells[0], strict=True))
    assert (shown["tokens"], shown["contender"], shown["layer µs"]) == ("2", "ep_a2a", f"{row['layer_us']:.1f}")
    assert shown["in series µs"] == f"{row['exchange_us']:.1f}"


def test_micro_batches_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert "overlapped/8" in succeeded(run_cli(*SMALL, "--micro-batches", "8", "--output", str(file)))
    _, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["contender"] for row in rows] == [*micro_batch_names([8])]
    assert all("exposed_us" in row for row in rows[1:])


def test_rows_that_cannot_be_written_are_an_error() -> None:
    error = CliRunner().invoke(app, (*SMALL, "--contenders", "nccl_agrs", "--output", "/dev/full")).exception
    assert isinstance(error, EpA2AError)
    assert "No space left" in str(error)
