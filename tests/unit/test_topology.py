"""Classification of made-up clusters."""

from dataclasses import replace

import pytest

from ep_a2a.errors import ConfigError
from ep_a2a.topology import RankFacts, TopologyReport, classify
from ep_a2a.topology import facts as topology_report

ABSENT = "No such file or directory"


def cluster(hosts, containers=None):
    """A report of one rank per entry of `hosts`; ranks share memory within a container (default: within a host)."""
    containers = containers or hosts
    facts = tuple(
        RankFacts(rank, hostname=f"name-{container}", boot_id=f"boot-{host}", pid=100 + rank)
        for rank, (host, container) in enumerate(zip(hosts, containers))
    )
    failures = tuple(tuple("" if a == b else ABSENT for b in containers) for a in containers)
    return TopologyReport(facts, failures)


@pytest.mark.parametrize(
    ("hosts", "nodes", "contiguous", "uneven", "said"),
    [
        ("a", [0], True, False, "1 node(s)"),
        ("a" * 72, [0] * 72, True, False, "1 node(s)"),
        ("a" * 8 + "b" * 8, [0] * 8 + [1] * 8, True, False, "2 node(s)"),
        ("a" * 8 + "b" * 4, [0] * 8 + [1] * 4, True, True, "8 and 4 ranks"),
        ("abcdef", [0, 1, 2, 3, 4, 5], True, False, "6 node(s)"),
        ("abababab", [0, 1] * 4, False, False, "interleaved"),
        # nodes are numbered by their lowest rank
        ("bbaacc", [0, 0, 1, 1, 2, 2], True, False, "3 node(s)"),
    ],
)
def test_nodes_are_hosts(hosts, nodes, contiguous, uneven, said):
    topology = classify(cluster(hosts))
    sizes = tuple(nodes.count(node) for node in range(max(nodes) + 1))
    assert topology.node_of_rank == tuple(nodes)
    assert (topology.world_size, topology.num_nodes, topology.ranks_per_node) == (len(hosts), len(sizes), sizes)
    assert (topology.gpu_per_node, topology.internode) == (max(sizes), len(sizes) > 1)
    assert (topology.contiguous, topology.uneven) == (contiguous, uneven)
    assert topology.shared_memory_problem is None
    assert said in topology.reason


def test_containers_of_one_host_do_not_pass_for_two_nodes():
    topology = classify(cluster("a" * 8, containers="p" * 4 + "q" * 4))
    assert topology.num_nodes == 1
    assert not topology.internode
    for part in ("rank 0 (name-p", "rank 4 (name-q", "boot-a", ABSENT, "16 such pair(s) among ranks 0, 1, 2"):
        assert part in topology.shared_memory_problem


def test_containers_cut_into_virtual_nodes_are_no_problem():
    topology = classify(cluster("a" * 8, containers="p" * 4 + "q" * 4), gpu_per_node=4)
    assert topology.num_nodes == 2
    assert topology.shared_memory_problem is None
    assert "virtual" in topology.reason


@pytest.mark.parametrize("gpu_per_node", [None, 4])
def test_ranks_of_one_host_reach_each_other_by_a_common_folder_only(gpu_per_node):
    """Ranks that count as on one host take each other's memory instead of a transport between nodes."""
    assert classify(cluster("a" * 8), gpu_per_node).on_one_host
    assert not classify(cluster("a" * 8, containers="p" * 4 + "q" * 4), gpu_per_node).on_one_host
    assert not classify(cluster("a" * 4 + "b" * 4), gpu_per_node).on_one_host


def test_containers_and_nodes_together():
    topology = classify(cluster("aabb", containers="pqrr"))
    assert topology.node_of_rank == (0, 0, 1, 1)
    assert "among ranks 0, 1" in topology.shared_memory_problem


def test_one_direction_is_not_sharing():
    report = cluster("ab", containers="ab")
    one_way = replace(report, probe_failures=(("", ""), ("Permission denied", "")))
    assert classify(one_way).num_nodes == 2
    same_host = replace(one_way, ranks=tuple(replace(facts, boot_id="boot") for facts in one_way.ranks))
    assert "Permission denied" in classify(same_host).shared_memory_problem


def test_a_rank_without_shared_memory():
    report = cluster("aa", containers="pq")
    nothing = replace(report, probe_failures=(("cannot create", "cannot create"),) * 2)
    assert "rank 0 (name-p) has no usable /dev/shm: cannot create" in classify(nothing).shared_memory_problem


def test_unknown_boot_id_falls_back_to_the_host_name():
    report = cluster("ab", containers="pq")
    unknown = replace(report, ranks=tuple(replace(facts, boot_id="") for facts in report.ranks))
    assert classify(unknown).num_nodes == 2
    nameless = replace(report, ranks=tuple(replace(facts, boot_id="", hostname="") for facts in report.ranks))
    assert classify(nameless).num_nodes == 2
    one_name = replace(report, ranks=tuple(replace(facts, boot_id="", hostname="n") for facts in report.ranks))
    assert classify(one_name).shared_memory_problem is not None


@pytest.mark.parametrize(
    ("world_size", "gpu_per_node", "ranks_per_node"),
    [(8, 4, (4, 4)), (8, 1, (1,) * 8), (8, 3, (3, 3, 2)), (5, 4, (4, 1)), (72, 8, (8,) * 9)],
)
def test_virtual_nodes(world_size, gpu_per_node, ranks_per_node):
    topology = classify(cluster("a" * world_size), gpu_per_node)
    assert topology.node_of_rank == tuple(rank // gpu_per_node for rank in range(world_size))
    assert topology.ranks_per_node == ranks_per_node
    assert topology.internode
    assert topology.contiguous
    assert topology.uneven == (world_size % gpu_per_node != 0)
    assert f"virtual, cut by gpu_per_node={gpu_per_node}" in topology.reason


def test_override_that_agrees_is_not_virtual():
    for report, gpu_per_node in ((cluster("aaaabbbb"), 4), (cluster("aaaa"), 8)):
        topology = classify(report, gpu_per_node)
        assert topology.node_of_rank == classify(report).node_of_rank
        assert "virtual" not in topology.reason


def test_virtual_nodes_may_cut_real_ones_but_not_join_them():
    assert classify(cluster("aaaabbbb"), 2).node_of_rank == (0, 0, 1, 1, 2, 2, 3, 3)
    for gpu_per_node in (3, 8):
        with pytest.raises(ConfigError, match="name-a"):
            classify(cluster("aaaabbbb"), gpu_per_node)


def test_facts_that_cannot_be_had_are_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(topology_report, "BOOT_ID_PATH", tmp_path / "missing")
    facts = topology_report._rank_facts(3, "cpu")
    assert (facts.rank, facts.boot_id, facts.device_kind) == (3, "", "cpu")
    assert facts.host == facts.hostname
    assert "FileNotFoundError" in facts.errors[0]


@pytest.mark.skipif(topology_report.torch.cuda.is_available(), reason="there are GPUs")
def test_a_gpu_that_cannot_be_asked_is_recorded():
    facts = topology_report._rank_facts(0, "cuda")
    assert facts.device_kind == "cuda"
    assert facts.gpu_uuid is None
    assert facts.errors


@pytest.mark.parametrize("gpu_per_node", [0, 2.5])
def test_impossible_virtual_nodes(gpu_per_node):
    with pytest.raises(ConfigError, match="gpu_per_node to be an integer >= 1"):
        classify(cluster("aaaa"), gpu_per_node)
