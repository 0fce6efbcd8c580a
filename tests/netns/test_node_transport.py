"""Transports among hosts of their own addresses: over a slow and lossy network, and over one that is cut."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import pytest
import torch

from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.node_transport import NodeAllToAll
from ep_a2a.memory.peers import STORE_SECS
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.subgroups import make_subgroup
from tests.cases.exchange_cases import exchange_and_check
from tests.netns.hosts import CUT_SENDS, SHORT_TIMEOUT_SECS, SLACK_SECS, TIMEOUT_SECS, cut, wait_for_cut
from tests.netns.launch import run_on_hosts
from tests.netns.network import Network

if TYPE_CHECKING:
    from pathlib import Path

    from ep_a2a.testing import RankContext

NUM_BYTES = 20_000
CPU = torch.device("cpu")


def exchange_blocks(context: RankContext, _directory: Path, num_hosts: int, num_steps: int) -> float:
    """Seconds of the exchanges alone."""
    transport = NodeAllToAll(
        context.group, NodeGrid(num_hosts, context.world_size // num_hosts, context.rank), TIMEOUT_SECS
    )
    node = make_subgroup(context.group, transport.grid.node_ranks)
    torch.distributed.barrier(node)
    start = time.monotonic()
    for step in range(num_steps):
        exchange_and_check(transport, context.rank, step, (1, 4096, 100_003, NUM_BYTES)[step % 4], CPU)
    secs = time.monotonic() - start
    transport.close()
    return secs


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 1), (2, 2), (3, 1)])
def test_every_block_arrives(num_hosts, ranks_per_host, tmp_path):
    with Network(num_hosts) as network:
        run_on_hosts(network, tmp_path, exchange_blocks, ranks_per_host, num_hosts, 8)


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_over_a_slow_and_lossy_network(num_hosts, tmp_path):
    with Network(num_hosts, delay_secs=0.005, loss=0.01) as network:
        all_secs = run_on_hosts(network, tmp_path, exchange_blocks, 1, num_hosts, 24)
        # the network was what it was meant to be
        assert network.num_lost > 0
        assert min(all_secs) > 24 * 0.005


def exchange_across_a_cut(
    context: RankContext, directory: Path, timeout_secs: float
) -> tuple[tuple[int, ...] | None, str, float]:
    """An exchange, then another once the link is cut: the ranks that it missed, the error, its seconds.

    Without an error the time.monotonic() of the end.
    """
    transport = NodeAllToAll(context.group, NodeGrid(context.world_size, 1, context.rank), timeout_secs)
    Rendezvous(context.group).barrier("before the exchanges")
    exchange_and_check(transport, context.rank, 0, NUM_BYTES, CPU)
    wait_for_cut(directory, context.rank)
    start = time.monotonic()
    try:
        exchange_and_check(transport, context.rank, 1, NUM_BYTES, CPU)
    except RankTimeoutError as error:
        return error.missing_ranks, str(error), time.monotonic() - start
    ended_at = time.monotonic()
    exchange_and_check(transport, context.rank, 2, NUM_BYTES, CPU)
    return None, "", ended_at


@pytest.mark.parametrize("host", [0, 2])
def test_a_link_that_is_cut_for_a_while(host, tmp_path):
    with Network(3) as network:
        meanwhile = functools.partial(cut, network, tmp_path, host, CUT_SENDS)
        answers = run_on_hosts(network, tmp_path, exchange_across_a_cut, 1, TIMEOUT_SECS, meanwhile=meanwhile)
    for missing, _, ended_at in answers:
        assert missing is None
        assert network.joined_at < ended_at


@pytest.mark.parametrize("host", [0, 2])
def test_a_link_that_stays_cut(host, tmp_path):
    """Host 2 has the store: where it falls silent, nobody can say more than that all peers may be missing."""
    bound = SHORT_TIMEOUT_SECS + STORE_SECS + SLACK_SECS
    with Network(3) as network:
        meanwhile = functools.partial(cut, network, tmp_path, host)
        answers = run_on_hosts(network, tmp_path, exchange_across_a_cut, 1, SHORT_TIMEOUT_SECS, meanwhile=meanwhile)
    for rank, (missing, text, secs) in enumerate(answers):
        others = tuple(other for other in range(3) if other != rank)
        assert missing == (others if rank == host or host == 2 else (host,)), text
        assert f"rank {rank} waited in vain for" in text
        assert SHORT_TIMEOUT_SECS <= secs < bound
