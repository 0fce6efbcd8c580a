"""`ep-a2a plan --nodes` and `--published`: the arithmetic by hand, its errors, and what is printed and written."""

import json
import math
import re
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_a2a.cli import app
from ep_a2a.commands.plan import predict as arithmetic
from ep_a2a.commands.plan.published import nearest, published_times
from ep_a2a.config import num_owned_experts

SMALL = "--max-tokens 32 --hidden 256 --topk 4 --experts 32"

# --- traffic ---


def expected_distinct(num_experts: int, owned: list[int], topk: int) -> float:
    """The number of owners that a token goes to, its experts drawn uniformly; owned: experts of each owner."""
    return sum(1 - math.comb(num_experts - count, topk) / math.comb(num_experts, topk) for count in owned)


def expected_remote_copies(cluster: arithmetic.Cluster, shape: arithmetic.Shape, copies: arithmetic.Copies) -> float:
    away, size = 1 - 1 / cluster.num_nodes, cluster.gpus_per_node
    if copies is arithmetic.Copies.EXPERT:
        return shape.topk * away
    num_experts = shape.placed_experts(cluster.num_ranks)
    owned = [num_owned_experts(num_experts, cluster.num_ranks, rank) for rank in range(cluster.num_ranks)]
    if copies is arithmetic.Copies.NODE:
        owned = [sum(owned[first : first + size]) for first in range(0, cluster.num_ranks, size)]
    return away * expected_distinct(num_experts, owned, shape.topk)


@pytest.mark.parametrize("copies", arithmetic.Copies)
@pytest.mark.parametrize("num_experts", [64, 60, 12])
def test_sampled_copies_are_the_expected_ones(copies, num_experts):
    cluster, shape = arithmetic.Cluster(4, 4), arithmetic.Shape(2000, 128, 4, num_experts)
    found = arithmetic.predict(cluster, shape, copies)
    assert found.remote_copies == pytest.approx(expected_remote_copies(cluster, shape, copies), rel=0.02)
    assert found.nic_combine_bytes == pytest.approx(found.remote_copies * 2000 * 128 * 2, abs=1)


def test_a_limit_on_nodes_is_kept():
    crossing = arithmetic.sample_traffic(
        arithmetic.Cluster(8, 2), arithmetic.Shape(1000, 128, 4, 64, max_nodes=2), arithmetic.Copies.NODE
    ).crossing
    assert int(crossing.sum(1).max()) <= 2 * 1000


# --- times ---


@pytest.mark.parametrize(("slow", "busy_us"), [("NIC", 500), ("NVLink", 700)])
def test_the_busiest_wire_counts_and_what_crosses_goes_on(slow, busy_us):
    """Node 1 receives 500 rows of 1000 bytes and pushes 400 of them on, beside 300 of its own."""
    traffic = arithmetic.Traffic(torch.tensor([[900, 500], [200, 0]]), torch.tensor([[100, 400], [0, 300]]))
    nic_gb_per_s, nvlink_gb_per_s = (1, 1000) if slow == "NIC" else (1000, 1)
    cluster = arithmetic.Cluster(2, nic_gbps=nic_gb_per_s * 8 / 0.969, nvlink_gb_per_s=nvlink_gb_per_s)
    around_us = arithmetic.START_US + arithmetic.NIC_LATENCY_US + arithmetic.FINISH_US
    assert arithmetic.phase_us(cluster, arithmetic.Copies.NODE, traffic, 1000) == pytest.approx(
        around_us + busy_us + arithmetic.NVLINK_HOP_US
    )
    straight_us = arithmetic.phase_us(cluster, arithmetic.Copies.RANK, traffic, 1000)
    if slow == "NIC":
        assert straight_us == pytest.approx(around_us + busy_us)
    else:
        assert straight_us == pytest.approx(arithmetic.START_US + 300 + arithmetic.NVLINK_HOP_US + arithmetic.FINISH_US)


# 2026-11-21_h200x2_round_trip and 2026-11-21_h200x4_round_trip, older reports of docs/results/index.md
@pytest.mark.parametrize(
    ("gpus", "tokens", "measured_us"), [(2, 128, 17.7), (2, 4096, 280.9), (4, 128, 35.8), (4, 4096, 713.2)]
)
def test_inside_a_node_it_says_what_was_measured(gpus, tokens, measured_us):
    found = arithmetic.predict(arithmetic.Cluster(1, gpus), arithmetic.Shape(tokens), arithmetic.Copies.NODE)
    assert found.dispatch_us + found.combine_us == pytest.approx(measured_us, rel=0.15)
    assert found.nic_dispatch_bytes == found.nic_combine_bytes == 0


# --- published times ---


def test_published_tables_become_times():
    of_dispatch = {(row["source"], row["ranks"], row["tokens"]): row["published_us"] for row in published_times()[::2]}
    assert {source.split()[0] for source, *_ in of_dispatch} == {"DeepEP", "pplx-garden", "NCCL", "MORI"}
    assert of_dispatch["DeepEP V1 low latency", 16, 128] == 118
    # 14.68 MB of copies per expert
    assert of_dispatch["NCCL EP low latency", 16, 128] == pytest.approx(128 * 8 * 14336 / 76.7e3, abs=0.1)
    # a token is counted once per node, its own included
    nodes = expected_distinct(256, [128] * 2, 8)
    assert of_dispatch["DeepEP V2", 16, 8192] == pytest.approx(8192 * nodes * 7392 / 90e3, rel=0.01)


@pytest.mark.parametrize(
    ("num_tokens", "copies", "source", "tokens"),
    [
        (32, arithmetic.Copies.NODE, "MORI InterNodeV1LL", 128),
        (6000, arithmetic.Copies.NODE, "DeepEP V2", 8192),
        (4096, arithmetic.Copies.RANK, "pplx-garden", 4096),
    ],
)
def test_published_times_like_an_exchange(num_tokens, copies, source, tokens):
    assert {(row["source"], row["tokens"]) for row in nearest(num_tokens, copies)} == {(source, tokens)}


# --- the command ---


def run(arguments: str) -> Any:
    done = CliRunner().invoke(app.app, ["plan", *arguments.split()])
    assert done.exit_code == 0, done.exception
    return done


def test_json_of_predictions():
    found = json.loads(run(f"--nodes 2,3 --gpus-per-node 4 --nic-gbps 200 {SMALL} --json").stdout)["predictions"]
    rows = [(each["ranks"], each["copy_per"]) for each in found]
    assert rows == [(8, "node"), (8, "rank"), (12, "node"), (12, "rank")]
    assert all(each["predicted"] and each["nic_gbps"] == 200 for each in found)
    for phase in ("dispatch", "combine"):
        of_all = [row["error_percent"] for row in nearest(32, arithmetic.Copies.NODE) if row["phase"] == phase]
        assert found[0][f"{phase}_error_percent"] == [min(of_all), max(of_all)]
    cast = json.loads(run(f"--nodes 2 {SMALL} --quant fp8_per_1x128 --json").stdout)["predictions"][0]
    assert cast["nic_dispatch_bytes"] < found[0]["nic_dispatch_bytes"]


def test_the_table_says_that_it_is_predicted_and_how_far_off():
    stdout = run(f"--nodes 1,2 {SMALL}").stdout
    printed = " ".join(stdout.split())
    for text in ("PREDICTED by arithmetic, not measured", "32 tokens per GPU", "128 tokens: MORI InterNodeV1LL"):
        assert text in printed
    # published times are between nodes
    assert re.search(r"│ +1 │ +8 │ node │ +[\d.]+ │ +│ +[\d.]+ │ +│", stdout)
    assert re.search(r"│ +2 │ +16 │ node │ +[\d.]+ │ -61 to -56 │ +[\d.]+ │ -58 to -37 │", stdout)


def test_published_times():
    found = json.loads(run("--published --json").stdout)["compared"]
    assert [each["phase"] for each in found[:2]] == ["dispatch", "combine"]
    for each in found:
        error = (each["predicted_us"] / each["published_us"] - 1) * 100
        assert each["error_percent"] == pytest.approx(error, abs=0.3)
    printed = run("--published").stdout
    assert "median -13" in printed
    assert re.search(r"DeepEP V1 low latency, H800 \+ CX7[^│]+│ +16 │ expert │ dispatch │ +118.0 │", printed)
