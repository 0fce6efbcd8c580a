"""Transports over NCCL, in CUDA graphs, and symmetric memory of a subgroup."""

import contextlib

import torch

from ep_a2a.memory.arena import allocate_symmetric
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.node_transport import NodeAllToAll
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup
from ep_a2a.testing import RankContext
from tests.cases.exchange_cases import GUARD_BYTES, POISON, block, check, exchange_and_check
from tests.markers import needs_own_gpus

NUM_BYTES = 100_000
NUM_REPLAYS = 5


def exchange_and_replay(context: RankContext, num_nodes: int, gpus_per_node: int) -> int:
    """Exchanges of several sizes, then one that a graph replays with new data each time."""
    grid, device = NodeGrid(num_nodes, gpus_per_node, context.rank), context.device
    transport = NodeAllToAll(context.group, grid, 30.0)
    for step, num_bytes in enumerate((1, 4096, NUM_BYTES, 16)):
        exchange_and_check(transport, context.rank, step, num_bytes, device)
    sent = torch.zeros(num_nodes, NUM_BYTES, dtype=torch.uint8, device=device)
    memory = torch.full((GUARD_BYTES + sent.numel() + GUARD_BYTES,), POISON, dtype=torch.uint8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # beginning a process's first capture allocates, too
        before = torch.cuda.memory_allocated(device)
        transport.exchange(memory[GUARD_BYTES:-GUARD_BYTES].view(sent.shape), sent)
        allocated = torch.cuda.memory_allocated(device) - before
    for step in range(NUM_REPLAYS):
        sent.copy_(torch.stack([block(context.rank, peer, step, NUM_BYTES) for peer in grid.partners]))
        memory.fill_(POISON)
        graph.replay()
        check(transport, context.rank, step, NUM_BYTES, memory)
    del graph
    torch.cuda.synchronize(device)
    transport.close()
    return allocated


@needs_own_gpus(2)
def test_exchange_and_graph(ranks):
    assert ranks(exchange_and_replay, 2, 2, 1) == [0] * 2


@needs_own_gpus(4)
def test_two_transports_at_once(ranks):
    assert ranks(exchange_and_replay, 4, 2, 2) == [0] * 4


def map_each_other(context: RankContext, members: tuple[int, ...]) -> str | None:
    if context.rank not in members:
        return None
    group = make_subgroup(context.group, members)
    rendezvous = Rendezvous(group)
    kinds = set()
    for _ in range(2):
        with contextlib.closing(allocate_symmetric(rendezvous, context.device, 4096)) as memory:
            assert len(set(memory.peer_addresses)) == len(members)
            kinds.add(memory.kind)
            rendezvous.barrier("mapped")
    destroy_subgroup(group)
    return kinds.pop()


KIND = "torch symmetric memory" if torch.cuda.device_count() > 1 else "CUDA IPC"


def test_symmetric_memory_of_a_subgroup(ranks):
    assert ranks(map_each_other, 2, (1, 0)) == [KIND] * 2


def test_symmetric_memory_of_some_ranks(ranks):
    assert ranks(map_each_other, 4, (1, 3)) == [None, KIND] * 2
