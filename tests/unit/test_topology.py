"""Which ranks of made-up clusters form nodes, and which nodes form a grid."""

from dataclasses import replace

import pytest

from ep_a2a.errors import ConfigError
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.topology import RankFacts, TopologyReport, classify

ABSENT = "No such file or directory"


def cluster(hosts, containers=None):
    """A report of one rank per entry of `hosts`; ranks share memory within a container (default: within a host)."""
    containers = containers or hosts
    facts = tuple(
        RankFacts(hostname=f"name-{container}", boot_id=f"boot-{host}") for host, container in zip(hosts, containers)
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


ONE_WAY = replace(cluster("ab"), probe_failures=(("", ""), ("Permission denied", "")))
NO_FOLDER = replace(cluster("aa", containers="pq"), probe_failures=(("cannot create", "cannot create"),) * 2)


def renamed(report, **facts):
    """A report with these facts of all ranks."""
    return replace(report, ranks=tuple(replace(each, **facts) for each in report.ranks))


@pytest.mark.parametrize(
    ("report", "num_nodes", "said"),
    [
        # ranks of one host that lack a common folder never pass for two nodes
        (
            cluster("a" * 8, containers="p" * 4 + "q" * 4),
            1,
            ("rank 0 (name-p", "rank 4 (name-q", "boot-a", ABSENT, "16 such pair(s) among ranks 0, 1, 2"),
        ),
        (cluster("aabb", containers="pqrr"), 2, ("among ranks 0, 1",)),
        (NO_FOLDER, 1, ("rank 0 (name-p) has no usable /dev/shm: cannot create",)),
        # one direction is not sharing
        (ONE_WAY, 2, ()),
        (renamed(ONE_WAY, boot_id="boot"), 1, ("Permission denied",)),
        # where the boot id is not known, the host's name counts
        (renamed(cluster("ab"), boot_id=""), 2, ()),
        (renamed(cluster("ab"), boot_id="", hostname=""), 2, ()),
        (renamed(cluster("ab"), boot_id="", hostname="n"), 1, (ABSENT,)),
    ],
)
def test_ranks_without_common_memory(report, num_nodes, said):
    topology = classify(report)
    assert topology.num_nodes == num_nodes
    assert bool(topology.shared_memory_problem) == bool(said)
    assert all(part in topology.shared_memory_problem for part in said)


@pytest.mark.parametrize("gpu_per_node", [None, 4])
def test_ranks_of_one_host_reach_each_other_by_a_common_folder_only(gpu_per_node):
    """Ranks that count as on one host take each other's memory instead of a transport between nodes."""
    assert classify(cluster("a" * 8), gpu_per_node).on_one_host
    assert not classify(cluster("a" * 8, containers="p" * 4 + "q" * 4), gpu_per_node).on_one_host
    assert not classify(cluster("a" * 4 + "b" * 4), gpu_per_node).on_one_host


@pytest.mark.parametrize(
    ("report", "gpu_per_node", "ranks_per_node", "is_virtual"),
    [
        (cluster("a" * 8), 4, (4, 4), True),
        (cluster("a" * 8), 1, (1,) * 8, True),
        (cluster("a" * 8), 3, (3, 3, 2), True),
        (cluster("a" * 5), 4, (4, 1), True),
        (cluster("a" * 72), 8, (8,) * 9, True),
        (cluster("aaaabbbb"), 2, (2,) * 4, True),
        # containers that are cut apart are no problem
        (cluster("a" * 8, containers="p" * 4 + "q" * 4), 4, (4, 4), True),
        # a number that agrees with the facts
        (cluster("aaaabbbb"), 4, (4, 4), False),
        (cluster("aaaa"), 8, (4,), False),
    ],
)
def test_a_number_of_ranks_per_node_cuts_nodes(report, gpu_per_node, ranks_per_node, is_virtual):
    topology = classify(report, gpu_per_node)
    assert topology.node_of_rank == tuple(rank // gpu_per_node for rank in range(len(report.ranks)))
    assert topology.ranks_per_node == ranks_per_node
    assert topology.contiguous
    assert (topology.internode, topology.uneven) == (len(ranks_per_node) > 1, len(set(ranks_per_node)) > 1)
    assert topology.shared_memory_problem is None
    assert (f"virtual, cut by gpu_per_node={gpu_per_node}" in topology.reason) == is_virtual


@pytest.mark.parametrize(
    ("gpu_per_node", "said"), [(3, "name-a"), (8, "name-a"), (0, "an integer >= 1"), (2.5, "an integer >= 1")]
)
def test_numbers_that_no_node_has_are_refused(gpu_per_node, said):
    with pytest.raises(ConfigError, match=said):
        classify(cluster("aaaabbbb"), gpu_per_node)


@pytest.mark.parametrize(("num_nodes", "gpus_per_node"), [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2), (2, 8)])
def test_every_rank_has_its_node_and_its_partners(num_nodes, gpus_per_node):
    topology = classify(cluster("a" * num_nodes * gpus_per_node), gpus_per_node)
    grids = [NodeGrid.of(topology, rank) for rank in range(num_nodes * gpus_per_node)]
    for rank, grid in enumerate(grids):
        assert grid == NodeGrid(num_nodes, gpus_per_node, rank)
        assert rank == grid.node * gpus_per_node + grid.local_rank
        assert grid.node_ranks[grid.local_rank] == grid.partners[grid.node] == rank
        assert grid.node_ranks == tuple(i for i, node in enumerate(topology.node_of_rank) if node == grid.node)
        assert [grids[peer].node for peer in grid.partners] == list(range(num_nodes))
        assert {grids[peer].local_rank for peer in grid.partners} == {grid.local_rank}
