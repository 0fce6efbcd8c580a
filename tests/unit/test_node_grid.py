"""A group's nodes as a grid, and what does not make one."""

import pytest

from ep_a2a.errors import UnsupportedError
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.topology import classify
from tests.unit.test_topology import cluster


@pytest.mark.parametrize(("num_nodes", "gpus_per_node"), [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2), (2, 8)])
def test_every_rank_has_its_node_and_its_partners(num_nodes, gpus_per_node):
    topology = classify(cluster([f"host{node}" for node in range(num_nodes) for _ in range(gpus_per_node)]))
    grids = [NodeGrid.of(topology, rank) for rank in range(num_nodes * gpus_per_node)]
    for rank, grid in enumerate(grids):
        assert (grid.num_nodes, grid.gpus_per_node) == (num_nodes, gpus_per_node)
        assert rank == grid.node * gpus_per_node + grid.local_rank
        assert grid.node_ranks[grid.local_rank] == grid.partners[grid.node] == rank
        assert grid.node_ranks == tuple(i for i, node in enumerate(topology.node_of_rank) if node == grid.node)
        assert [grids[peer].node for peer in grid.partners] == list(range(num_nodes))
        assert {grids[peer].local_rank for peer in grid.partners} == {grid.local_rank}


def test_virtual_nodes():
    topology = classify(cluster("a" * 6), gpu_per_node=2)
    assert NodeGrid.of(topology, 3) == NodeGrid(3, 2, 3)


def test_uneven_nodes_are_refused():
    with pytest.raises(UnsupportedError, match="8 and 4 ranks") as caught:
        NodeGrid.of(classify(cluster("a" * 8 + "b" * 4)), 0)
    assert caught.value.expected == "nodes of equally many ranks"
    assert "as many ranks on each node" in caught.value.remedy
    assert "allgather_reducescatter" in caught.value.remedy


def test_interleaved_nodes_are_refused():
    with pytest.raises(UnsupportedError, match="interleaved") as caught:
        NodeGrid.of(classify(cluster("abab")), 0)
    assert "Number the ranks node by node" in caught.value.remedy
