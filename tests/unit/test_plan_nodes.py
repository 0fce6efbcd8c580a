"""`ep-a2a plan --nodes` and `--published`: what is printed and written, and refusals."""

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from ep_a2a.cli import app
from ep_a2a.commands.simulation import published
from ep_a2a.commands.simulation.simulator import Copies

SMALL = "--max-tokens 32 --hidden 256 --topk 4 --experts 32"


def run(arguments: str) -> Any:
    return CliRunner().invoke(app.app, ["plan", *arguments.split()])


def test_json_of_predictions():
    result = run(f"--nodes 2,3 --gpus-per-node 4 --nic-gbps 200 --credits 2 --chunk-tokens 16 {SMALL} --json")
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)["predictions"]
    rows = [(each["ranks"], each["copy_per"]) for each in found]
    assert rows == [(8, "node"), (8, "rank"), (12, "node"), (12, "rank")]
    assert all(each["predicted"] and each["nic_gbps"] == 200 for each in found)
    first = found[0]
    assert first["nic_combine_bytes"] == pytest.approx(first["remote_copies_per_token"] * 32 * 512, abs=2)
    for phase in ("dispatch", "combine"):
        low, high = first[f"{phase}_error_percent"]
        of_all = [each.error_percent for each in published.nearest(32, Copies.NODE) if each.phase == phase]
        assert (low, high) == pytest.approx((min(of_all), max(of_all)), abs=0.1)


def test_a_cast_makes_dispatch_smaller():
    plain, cast = (
        json.loads(run(f"--nodes 2 {SMALL} --quant {quant} --json").stdout)["predictions"][0]
        for quant in ("none", "fp8_per_1x128")
    )
    assert cast["nic_dispatch_bytes"] < plain["nic_dispatch_bytes"]
    assert cast["nic_combine_bytes"] == plain["nic_combine_bytes"]


def test_the_table_says_that_it_is_predicted_and_how_far_off():
    result = run(f"--nodes 1,2 {SMALL}")
    assert result.exit_code == 0, result.exception
    printed = " ".join(result.stdout.split())
    for text in ("PREDICTED by a simulator, not measured", "32 tokens per GPU", "128 tokens: MORI InterNodeV1LL"):
        assert text in printed
    # published times are between nodes
    assert re.search(r"│ +1 │ +8 │ node │ +[\d.]+ │ +│ +[\d.]+ │ +│", result.stdout)
    assert re.search(r"│ +2 │ +16 │ node │ +[\d.]+ │ -55 to -49 │ +[\d.]+ │ -56 to -34 │", result.stdout)


def test_published_times(monkeypatch):
    few = published.published_tables()[:1]
    monkeypatch.setattr(published, "published_tables", lambda: few)
    found = json.loads(run("--published --json").stdout)["compared"]
    assert [each["phase"] for each in found] == ["dispatch", "combine"]
    assert found[0]["published_us"] == 118
    assert found[0]["error_percent"] == pytest.approx(
        (found[0]["predicted_us"] / found[0]["published_us"] - 1) * 100, abs=0.1
    )
    printed = run("--published").stdout
    assert "median" in printed
    assert re.search(r"DeepEP V1 low latency, H800 \+ CX7[^│]+│ +16 │ +128 │ expert │ dispatch │ +118.0 │", printed)
