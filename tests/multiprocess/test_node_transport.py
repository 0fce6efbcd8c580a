"""Blocks exchanged along transports: every byte, order of calls, and peers that do not come."""

import os
import signal

import pytest
import torch

from ep_a2a.errors import ContiguityError, RankTimeoutError, ShapeError, StateError, UnknownNameError, UnsupportedError
from ep_a2a.memory import transport_choice
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.node_transport import NodeAllToAll
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup
from ep_a2a.memory.transport_choice import choose_transport
from ep_a2a.testing import RankContext, RankFailure, RankPool
from tests.cases.exchange_cases import exchange_and_check
from tests.cases.op_checks import raised
from tests.late import come_last
from tests.waiting import await_until

TIMEOUT_SECS = 30.0
SHORT_TIMEOUT_SECS = 1.0
NEVER_SECS = 3600.0
CPU = torch.device("cpu")


def transport_of(context: RankContext, num_nodes: int, gpus_per_node: int) -> NodeAllToAll:
    return NodeAllToAll(context.group, NodeGrid(num_nodes, gpus_per_node, context.rank), TIMEOUT_SECS)


# --- every byte ---


def exchange_blocks(context: RankContext, num_nodes: int, gpus_per_node: int) -> None:
    transport = transport_of(context, num_nodes, gpus_per_node)
    for step, num_bytes in enumerate((1, 4096, 100_003, 16, 4096)):
        # transports are independent of each other, and one rank comes late
        come_last(context, step % context.world_size, f"block {step}")
        exchange_and_check(transport, context.rank, step, num_bytes, CPU)
    transport.close()


@pytest.mark.parametrize(("num_nodes", "gpus_per_node"), [(2, 2), (2, 3), (3, 2), (4, 1), (1, 4)])
def test_every_block_arrives(ranks, num_nodes, gpus_per_node):
    ranks(exchange_blocks, num_nodes * gpus_per_node, num_nodes, gpus_per_node)


def exchange_beside_another_generation(context: RankContext) -> None:
    """Two transports at once, then a third after one is closed: no block of one may come to another."""
    first, second = transport_of(context, 2, 2), transport_of(context, 2, 2)
    node = make_subgroup(context.group, NodeGrid(2, 2, context.rank).node_ranks)
    for step in range(3):
        for number, transport in enumerate((first, second)):
            exchange_and_check(transport, context.rank, 10 * step + number, 512, CPU)
    first.close()
    first.close()
    third = transport_of(context, 2, 2)
    for number, transport in enumerate((third, second)):
        exchange_and_check(transport, context.rank, 100 + number, 512, CPU)
        transport.close()
    destroy_subgroup(node)
    with pytest.raises(StateError, match="closed"):
        first.exchange(torch.zeros(2, 1), torch.zeros(2, 1))


def test_generations_of_transports(ranks):
    ranks(exchange_beside_another_generation, 4)


# --- what is refused ---


def refuse_blocks(context: RankContext) -> None:
    transport = transport_of(context, 2, 1)
    good = torch.zeros(2, 8, dtype=torch.uint8)
    for wrong in (torch.zeros(3, 8, dtype=torch.uint8), torch.zeros(()), torch.zeros(0)):
        with pytest.raises(ShapeError, match="one block for each of 2 nodes"):
            transport.exchange(wrong, good)
    with pytest.raises(ShapeError, match="received of 8 bytes"):
        transport.exchange(good, good[:, :4].contiguous())
    with pytest.raises(ContiguityError, match="sent to be contiguous"):
        transport.exchange(good, torch.zeros(8, 2, dtype=torch.uint8).t())
    # nothing was sent; any dtype and shape will do, as long as the bytes are as many
    as_bytes = torch.zeros(2, 24, dtype=torch.uint8)
    transport.exchange(as_bytes, torch.full((2, 3, 4), 7, dtype=torch.bfloat16))
    assert as_bytes.view(torch.bfloat16).eq(7).all()
    transport.close()


def test_tensors_that_do_not_fit(ranks):
    ranks(refuse_blocks, 2)


# --- peers that do not come ---


def wait_in_vain(context: RankContext, absent: int) -> None:
    transport, everyone, rank = transport_of(context, 3, 2), Rendezvous(context.group), context.rank
    exchange_and_check(transport, rank, 0, 256, CPU)
    everyone.barrier("before the exchange that one does not come to")
    if rank != absent and rank % 2 != absent % 2:
        exchange_and_check(transport, rank, 1, 256, CPU)
    elif rank != absent:
        received, sent = torch.zeros(3, 256, dtype=torch.uint8), torch.ones(3, 256, dtype=torch.uint8)
        running = transport.begin(received, sent, SHORT_TIMEOUT_SECS)
        # an error names all that have not come to the exchange by then
        await_until(lambda: transport._missing(2) == (absent,), "the others come")
        error = raised(
            RankTimeoutError,
            lambda: transport.end(running, SHORT_TIMEOUT_SECS),
            f"rank {rank} waited in vain for rank {absent}:",
            f"ranks {absent % 2}, {absent % 2 + 2}, {absent % 2 + 4}, one of each node,",
        )
        assert error.missing_ranks == (absent,)
        broken = "broken by a failed exchange"
        raised(StateError, lambda: exchange_and_check(transport, rank, 1, 256, CPU), broken)
    transport.close()
    # the absent one must not leave before the others have looked
    everyone.barrier("all have looked")


@pytest.mark.parametrize("absent", [0, 3])
def test_a_peer_that_does_not_come_is_named_within_the_bound(absent):
    """By its rank in the whole group; other transports go on."""
    with RankPool(6) as pool:
        pool.run(wait_in_vain, absent)


def die_before_the_second(context: RankContext) -> None:
    transport = transport_of(context, 3, 1)
    exchange_and_check(transport, context.rank, 0, 256, CPU)
    if context.rank == 1:
        # an error names all that have not come to the exchange by then
        await_until(lambda: transport._missing(2) == (1,), "the others come")
        os.kill(os.getpid(), signal.SIGKILL)
    # longer than the pool waits
    transport.timeout_secs = NEVER_SECS
    exchange_and_check(transport, context.rank, 1, 256, CPU)


def test_a_killed_peer_is_named_at_once():
    with RankPool(3, grace_secs=60) as pool, pytest.raises(RankFailure) as caught:
        pool.run(die_before_the_second)
    assert caught.value.unfinished == ()
    for rank in (0, 2):
        error = caught.value.errors[rank]
        assert error.missing_ranks == (1,)


# --- by name ---


def test_choice_of_a_transport(monkeypatch):
    several_hosts = {"peer_memory": "these are nodes of several hosts"}
    assert choose_transport("auto", {}) == "peer_memory"
    assert choose_transport("auto", several_hosts) == "torch.distributed"
    for name in ("torch.distributed", "nvshmem"):
        assert choose_transport(name, {}) == name
    known = r"'auto', 'torch\.distributed', 'peer_memory', 'nvshmem'; got 'rdma'"
    with pytest.raises(UnknownNameError, match=known):
        choose_transport("rdma", {})
    with pytest.raises(UnsupportedError, match="nodes of several hosts"):
        choose_transport("peer_memory", several_hosts)
    monkeypatch.setenv("EP_A2A_INTERNODE_TRANSPORT", "torch.distributed")
    assert choose_transport("auto", {}) == "torch.distributed"


@pytest.mark.parametrize(
    ("devices", "standing", "value", "message"),
    [
        ("mlx5_0,mlx5_1", "", "=mlx5_0,mlx5_1", "EP_A2A_RDMA_DEVICES=mlx5_0,mlx5_1 counts: NCCL_IB_HCA=="),
        ("^mlx5_7", "", "^=mlx5_7", "counts: NCCL_IB_HCA=^=mlx5_7"),
        ("mlx5_0", "=mlx5_3", "=mlx5_3", "has no effect: NCCL_IB_HCA is '=mlx5_3' already"),
        ("", "", "", ""),
    ],
)
def test_devices_are_handed_to_libraries_and_said_once(devices, standing, value, message, monkeypatch, caplog):
    transport_choice.log_once.cache_clear()
    monkeypatch.setenv("NVSHMEM_HCA_LIST", "")
    monkeypatch.setenv("EP_A2A_RDMA_DEVICES", devices)
    monkeypatch.setenv("NCCL_IB_HCA", standing)
    with caplog.at_level("INFO", logger="ep_a2a"):
        transport_choice.name_network_devices()
        transport_choice.name_network_devices()
    assert os.environ["NCCL_IB_HCA"] == value
    assert os.environ["NVSHMEM_HCA_LIST"] == devices
    of_nccl, of_nvshmem = ([text for text in caplog.messages if name in text] for name in ("NCCL_IB", "NVSHMEM_HCA"))
    assert len(of_nccl) == len(of_nvshmem) == bool(message)
    assert all(message in text for text in of_nccl)
    assert all(f"counts: NVSHMEM_HCA_LIST={devices}" in text for text in of_nvshmem)
