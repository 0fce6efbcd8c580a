"""Rails over NCCL and NVSHMEM, in CUDA graphs, and symmetric memory of a subgroup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ep_a2a.errors import RankTimeoutError
from ep_a2a.kernels.nvshmem_rail import STAGING_BYTES, NvshmemRail
from ep_a2a.memory.allocate import allocate_symmetric
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup
from tests.markers import needs_gpus
from tests.rail_cases import GUARD_BYTES, POISON, block, check, exchange_and_check, grid_of, rail_of

if TYPE_CHECKING:
    from ep_a2a.testing import RankContext

NUM_BYTES = 100_000
NUM_REPLAYS = 5
TRANSPORTS = ("torch.distributed", "nvshmem")


def exchange_and_replay(context: RankContext, num_nodes: int, gpus_per_node: int, transport: str) -> tuple[str, int]:
    """Exchanges of several sizes, then one that a graph replays with new data each time."""
    grid, device = grid_of(num_nodes, gpus_per_node, context.rank), context.device
    rail = rail_of(transport, context, grid, 30.0)
    for step, num_bytes in enumerate((1, 4096, NUM_BYTES, 16)):
        exchange_and_check(rail, context.rank, step, num_bytes, device)
    sent = torch.zeros(num_nodes, NUM_BYTES, dtype=torch.uint8, device=device)
    memory = torch.full((GUARD_BYTES + sent.numel() + GUARD_BYTES,), POISON, dtype=torch.uint8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # beginning a process's first capture allocates, too
        before = torch.cuda.memory_allocated(device)
        rail.exchange(memory[GUARD_BYTES:-GUARD_BYTES].view(sent.shape), sent)
        allocated = torch.cuda.memory_allocated(device) - before
    for step in range(NUM_REPLAYS):
        sent.copy_(torch.stack([block(context.rank, peer, step, NUM_BYTES) for peer in grid.rail_ranks]))
        memory.fill_(POISON)
        graph.replay()
        check(rail, context.rank, step, NUM_BYTES, memory)
    del graph
    torch.cuda.synchronize(device)
    rail.close()
    return rail.name, allocated


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_exchange_and_graph(ranks, transport):
    assert ranks(exchange_and_replay, 2, 2, 1, transport, device="cuda") == [(transport, 0)] * 2


@needs_gpus(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_rails_at_once(ranks, transport):
    assert ranks(exchange_and_replay, 4, 2, 2, transport, device="cuda") == [(transport, 0)] * 4


def exchange_in_rounds(context: RankContext) -> tuple[bool, bool]:
    """Blocks of more than the staging; then memory that one rail has given up serves the next."""
    grid, device = grid_of(2, 1, context.rank), context.device
    rail = NvshmemRail(Rendezvous(context.group), grid, device, 30.0)
    num_bytes = STAGING_BYTES + 12345
    sent = torch.arange(2 * num_bytes, device=device).view(2, -1).add_(97 * context.rank).to(torch.uint8)
    received = torch.full_like(sent, POISON)
    rail.exchange(received, sent)
    first = torch.arange(context.rank * num_bytes, (context.rank + 1) * num_bytes, device=device)
    right = all(torch.equal(received[node], (first + 97 * node).to(torch.uint8)) for node in range(2))
    address = rail._staged.data_ptr()
    rail.close()
    again = NvshmemRail(Rendezvous(context.group), grid, device, 30.0)
    exchange_and_check(again, context.rank, 1, NUM_BYTES, device)
    same = again._staged.data_ptr() == address
    again.close()
    return right, same


def test_more_bytes_than_the_staging_holds(ranks):
    assert ranks(exchange_in_rounds, 2, device="cuda") == [(True, True)] * 2


def a_peer_that_does_not_come(context: RankContext) -> tuple[int, ...]:
    """The ranks that the error names, in a graph, too: what waits behind the exchange is not waited for."""
    grid, device = grid_of(2, 1, context.rank), context.device
    rail = NvshmemRail(Rendezvous(context.group), grid, device, 1.0)
    exchange_and_check(rail, context.rank, 0, NUM_BYTES, device)
    if context.rank == 0:
        return ()
    sent = torch.zeros(2, NUM_BYTES, dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rail.exchange(received, sent)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize(device)
    with pytest.raises(RankTimeoutError) as caught:
        rail.exchange(received, sent)
    return caught.value.missing_ranks


def test_nvshmem_waits_are_bounded(ranks):
    assert ranks(a_peer_that_does_not_come, 2, device="cuda") == [(), (0,)]


def map_each_other(context: RankContext, members: tuple[int, ...]) -> str | None:
    if context.rank not in members:
        return None
    group = make_subgroup(context.group, members)
    rendezvous = Rendezvous(group)
    kinds = set()
    for _ in range(2):
        with allocate_symmetric(rendezvous, context.device, 4096) as memory:
            assert len(set(memory.peer_addresses)) == len(members)
            kinds.add(memory.kind)
            rendezvous.barrier("mapped")
    destroy_subgroup(group)
    return kinds.pop()


def test_symmetric_memory_of_a_subgroup(ranks):
    assert ranks(map_each_other, 2, (1, 0), device="cuda") == ["torch symmetric memory"] * 2


@needs_gpus(4)
def test_symmetric_memory_of_some_ranks(ranks):
    assert ranks(map_each_other, 4, (1, 3), device="cuda") == [None, "torch symmetric memory"] * 2
