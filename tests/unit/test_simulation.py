"""The simulator of exchanges between nodes: its parts by hand, its bounds, what was measured inside a node."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_a2a.commands.simulation.published import compare, nearest, published_tables
from ep_a2a.commands.simulation.simulator import (
    FINISH_US,
    NIC_LATENCY_US,
    NVLINK_HOP_US,
    START_US,
    Chunk,
    Clock,
    Cluster,
    Copies,
    Phase,
    Shape,
    Wire,
    predict,
    sample_chunks,
    simulate,
    transfer,
)
from ep_a2a.config import num_owned_experts
from ep_a2a.errors import ConfigError

# --- wires ---


def test_bytes_arrive_as_they_leave_and_wait_for_other_senders():
    clock, seen = Clock(), []
    source, other, destination = (Wire(1) for _ in range(3))
    transfer(clock, source, destination, 5000, 2, lambda: seen.append(("first", clock.now_us)))
    transfer(clock, other, destination, 5000, 2, lambda: seen.append(("second", clock.now_us)))
    transfer(clock, other, None, 1000, 2, lambda: seen.append(("alone", clock.now_us)))
    clock.run()
    assert seen == [("first", 7), ("alone", 8), ("second", 12)]


# --- traffic ---


def expected_distinct(num_experts: int, owned: list[int], topk: int) -> float:
    """The number of owners that a token goes to, its experts drawn uniformly; owned: experts of each owner."""
    return sum(1 - math.comb(num_experts - count, topk) / math.comb(num_experts, topk) for count in owned)


def expected_remote_copies(cluster: Cluster, shape: Shape, copies: Copies) -> float:
    away, size = 1 - 1 / cluster.num_nodes, cluster.gpus_per_node
    if copies is Copies.EXPERT:
        return shape.topk * away
    num_experts = shape.placed_experts(cluster.num_ranks)
    owned = [num_owned_experts(num_experts, cluster.num_ranks, rank) for rank in range(cluster.num_ranks)]
    if copies is Copies.NODE:
        owned = [sum(owned[first : first + size]) for first in range(0, cluster.num_ranks, size)]
    return away * expected_distinct(num_experts, owned, shape.topk)


@pytest.mark.parametrize("copies", Copies)
@pytest.mark.parametrize("num_experts", [64, 60, 12])
def test_sampled_copies_are_the_expected_ones(copies, num_experts):
    cluster, shape = Cluster(4, 4), Shape(2000, 128, 4, num_experts)
    chunks = sample_chunks(cluster, shape, copies)
    remote = sum(c.num_records for s in range(4) for d in range(4) if s != d for c in chunks[s][d])
    assert remote / 4 / 2000 == pytest.approx(expected_remote_copies(cluster, shape, copies), rel=0.02)
    assert predict(cluster, shape, copies).remote_copies == remote / 4 / 2000


def test_a_limit_on_nodes_is_kept():
    cluster, shape = Cluster(8, 2), Shape(1000, 128, 4, 64, max_nodes=2)
    chunks = sample_chunks(cluster, shape, Copies.NODE)
    for source in chunks:
        assert sum(chunk.num_records for node in source for chunk in node) <= 2 * 1000


@settings(max_examples=30)
@given(
    num_nodes=st.integers(1, 4),
    gpus=st.integers(1, 4),
    tokens=st.integers(1, 60),
    topk=st.integers(1, 4),
    chunk_tokens=st.integers(1, 16),
    num_credits=st.integers(1, 4),
    copies=st.sampled_from(list(Copies)),
    seed=st.integers(0, 9),
)
def test_no_exchange_beats_its_wires(num_nodes, gpus, tokens, topk, chunk_tokens, num_credits, copies, seed):
    cluster = Cluster(num_nodes, gpus, chunk_tokens=chunk_tokens, num_credits=num_credits)
    shape = Shape(tokens, 128, topk, 16)
    chunks = sample_chunks(cluster, shape, copies, seed)
    for source in chunks:
        for node in source:
            # with a copy per node chunks are full but for the last; else a token's copies stay together
            assert all(c.num_records <= chunk_tokens + (0 if copies is Copies.NODE else topk) for c in node)
    for phase in Phase:
        took_us = simulate(cluster, shape, copies, phase, chunks)
        assert took_us == simulate(cluster, shape, copies, phase, chunks)
        row_bytes = shape.dispatch_record_bytes if phase is Phase.DISPATCH else shape.combine_row_bytes
        sent = [sum(c.num_records for d in range(num_nodes) if d != s for c in chunks[s][d]) for s in range(num_nodes)]
        if max(sent):
            wire_us = max(sent) * row_bytes / cluster.nic_gb_per_s / 1e3
            assert took_us > START_US + NIC_LATENCY_US + wire_us
        assert took_us >= FINISH_US


# --- exchanges by hand ---


def test_one_chunk_crosses_and_goes_on():
    cluster, shape = Cluster(2), Shape(64)
    chunks = [[[], [Chunk(10, 30)]], [[], []]]
    for phase, row_bytes in ((Phase.DISPATCH, shape.dispatch_record_bytes), (Phase.COMBINE, shape.combine_row_bytes)):
        expected_us = START_US + NIC_LATENCY_US + NVLINK_HOP_US + FINISH_US
        expected_us += 10 * row_bytes / cluster.nic_gb_per_s / 1e3 + 30 * row_bytes / cluster.nvlink_gb_per_s / 1e3
        assert simulate(cluster, shape, Copies.NODE, phase, chunks) == pytest.approx(expected_us)
    expected_us = START_US + NIC_LATENCY_US + 10 * shape.combine_row_bytes / cluster.nic_gb_per_s / 1e3 + FINISH_US
    assert simulate(cluster, shape, Copies.RANK, Phase.COMBINE, chunks) == pytest.approx(expected_us)


def test_a_chunk_without_a_credit_waits_for_one():
    shape, chunks = Shape(128), [[[], [Chunk(10, 0), Chunk(10, 0)]], [[], []]]
    one, two = Cluster(2, num_credits=1), Cluster(2, num_credits=2)
    chunk_us = 10 * shape.dispatch_record_bytes / one.nic_gb_per_s / 1e3
    alone_us = START_US + NIC_LATENCY_US + chunk_us + NVLINK_HOP_US + FINISH_US
    found_us = [simulate(each, shape, Copies.NODE, Phase.DISPATCH, chunks) for each in (one, two)]
    # it leaves when the first has been worked off and the word of it has come back
    assert found_us[0] == pytest.approx(alone_us + chunk_us + 2 * NIC_LATENCY_US + NVLINK_HOP_US)
    assert found_us[1] == pytest.approx(alone_us + chunk_us)


# bench/results/2026-11-21_h200x2_round_trip.md and 2026-11-21_h200x4_round_trip.md
@pytest.mark.parametrize(
    ("gpus", "tokens", "measured_us"), [(2, 128, 17.7), (2, 4096, 280.9), (4, 128, 35.8), (4, 4096, 713.2)]
)
def test_inside_a_node_it_says_what_was_measured(gpus, tokens, measured_us):
    found = predict(Cluster(1, gpus), Shape(tokens), Copies.NODE)
    assert found.dispatch_us + found.combine_us == pytest.approx(measured_us, rel=0.15)
    assert found.nic_dispatch_bytes == found.nic_combine_bytes == 0


def test_fewer_copies_take_less():
    node, rank, expert = (predict(Cluster(4), Shape(512), copies) for copies in Copies)
    assert node.dispatch_us < rank.dispatch_us < expert.dispatch_us
    assert node.nic_combine_bytes < rank.nic_combine_bytes < expert.nic_combine_bytes


# --- published tables, refusals ---


def test_published_tables_become_times():
    tables = {(each.source, each.num_ranks, each.shape.num_tokens): each for each in published_tables()}
    assert {each.source.split()[0] for each in tables.values()} == {"DeepEP", "pplx-garden", "NCCL", "MORI"}
    dispatch, combine = compare(tables["DeepEP V1 low latency", 16, 128])
    assert (dispatch.published_us, combine.published_us) == (118, 195)
    # 14.68 MB of copies per expert
    dispatch, _ = compare(tables["NCCL EP low latency", 16, 128])
    assert dispatch.published_us == pytest.approx(128 * 8 * 14336 / 76.7e3)
    assert dispatch.error_percent == pytest.approx((dispatch.predicted_us / dispatch.published_us - 1) * 100)
    # a token is counted once per node, its own included; MORI leaves scales out
    nodes = expected_distinct(256, [128] * 2, 8)
    dispatch, _ = compare(tables["MORI InterNodeV1", 16, 4096])
    assert dispatch.published_us == pytest.approx(4096 * nodes * 7168 / 54e3, rel=0.01)
    dispatch, _ = compare(tables["DeepEP V2", 16, 8192])
    assert dispatch.published_us == pytest.approx(8192 * nodes * 7392 / 90e3, rel=0.01)


@pytest.mark.parametrize(
    ("num_tokens", "copies", "source", "tokens"),
    [
        (32, Copies.NODE, "MORI InterNodeV1LL", 128),
        (6000, Copies.NODE, "DeepEP V2", 8192),
        (4096, Copies.RANK, "pplx-garden", 4096),
    ],
)
def test_published_times_like_an_exchange(num_tokens, copies, source, tokens):
    lines = [each.published for each in nearest(num_tokens, copies)]
    assert {(line.source, line.shape.num_tokens) for line in lines} == {(source, tokens)}


def test_too_much_is_refused():
    with pytest.raises(ConfigError, match="Lower --nodes"):
        predict(Cluster(1000), Shape(1), Copies.NODE)
    with pytest.raises(ConfigError, match="Lower --topk"):
        predict(Cluster(1, 1), Shape(1, topk=9, num_experts=8), Copies.NODE)


@pytest.mark.parametrize("field", ["gpus_per_node", "chunk_tokens", "num_credits"])
def test_impossible_clusters(field):
    with pytest.raises(ConfigError, match=f"{field} above 0"):
        Cluster(**{"num_nodes": 2, field: 0})
