"""`ep-a2a plan --nodes` and `--published`: what is printed and written, and refusals."""

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from ep_a2a.cli import app
from ep_a2a.commands.simulation import published

SMALL = "--max-tokens 32 --hidden 256 --topk 4 --experts 32"


def run(arguments: str) -> Any:
    return CliRunner().invoke(app.make_app(), ["plan", *arguments.split()])


def test_json_of_predictions():
    result = run(f"--nodes 2,3 --gpus-per-node 4 --nic-gbps 200 --credits 2 --chunk-tokens 16 {SMALL} --json")
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)["predictions"]
    rows = [(each["ranks"], each["copy_per"]) for each in found]
    assert rows == [(8, "node"), (8, "rank"), (12, "node"), (12, "rank")]
    assert all(each["predicted"] and each["nic_gbps"] == 200 for each in found)
    first = found[0]
    assert first["nic_combine_bytes"] == pytest.approx(first["remote_copies_per_token"] * 32 * 512, abs=2)
    assert sum(first["buffer_bytes"].values()) == 2 * first["buffer_bytes"]["total"]
    assert first["buffer_bytes"]["dispatch_rings"] == 2 * 16 * (512 + 4 * 8 + 8)
    assert found[1]["buffer_bytes"].keys() == {"packed_tokens", "combine_slots", "total"}


def test_a_cast_makes_dispatch_smaller():
    plain, cast = (
        json.loads(run(f"--nodes 2 {SMALL} --quant {quant} --json").stdout)["predictions"][0]
        for quant in ("none", "fp8_per_1x128")
    )
    assert cast["nic_dispatch_bytes"] < plain["nic_dispatch_bytes"]
    assert cast["nic_combine_bytes"] == plain["nic_combine_bytes"]


def test_tables_and_files_say_that_they_are_predicted(tmp_path):
    markdown, picture = tmp_path / "found.md", tmp_path / "found.svg"
    result = run(f"--nodes 2 --ranks 16 {SMALL} --markdown {markdown} --plot {picture}")
    assert result.exit_code == 0, result.exception
    for text in (result.stdout, markdown.read_text()):
        assert "PREDICTED by a simulator, not measured" in text
        assert "32 tokens per GPU" in " ".join(text.split())
    assert re.search(r"^\| 16 \| 2 \| node \|", markdown.read_text(), re.MULTILINE)
    assert picture.read_text().count("<svg") == 1


def test_published_times(monkeypatch, tmp_path):
    few = published.published_tables()[:1]
    monkeypatch.setattr(published, "published_tables", lambda: few)
    found = json.loads(run("--published --json").stdout)["compared"]
    assert [each["phase"] for each in found] == ["dispatch", "combine"]
    assert found[0]["published_us"] == 118
    assert found[0]["error_percent"] == pytest.approx(
        (found[0]["predicted_us"] / found[0]["published_us"] - 1) * 100, abs=0.1
    )
    markdown = tmp_path / "published.md"
    result = run(f"--published --markdown {markdown}")
    assert "median" in result.stdout
    assert "| DeepEP V1 low latency | H800 + CX7 | 16 | 128 | expert | dispatch | 118.0 |" in markdown.read_text()
