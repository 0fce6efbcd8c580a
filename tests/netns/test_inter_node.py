"""Ops among hosts of their own addresses: the oracle's results over a slow, lossy and cut network, or an error."""

import functools
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory.peers import STORE_SECS
from ep_a2a.testing import RankContext
from tests.cases.op_cases import BY_HOSTS, Case, built_op, run_step, with_options
from tests.cases.op_matrix import UNEVEN
from tests.netns.launch import CUT_SENDS, SHORT_TIMEOUT_SECS, SLACK_SECS, TIMEOUT_SECS, cut, run_on_hosts, wait_for_cut
from tests.netns.network import Network

CASE = Case(topk=3, tokens=UNEVEN, layout="rank_major", routing="out_of_range", quant_type="fp8_per_token")


def case_of(context: RankContext, num_hosts: int) -> Case:
    sizes = replace(CASE, world_size=context.world_size, num_experts=2 * context.world_size + 1, num_nodes=num_hosts)
    return with_options(sizes, **BY_HOSTS)


def take_steps(context: RankContext, _directory: Path, num_hosts: int, num_steps: int) -> None:
    """Steps of an op across hosts, each against the oracle."""
    case = case_of(context, num_hosts)
    with built_op(context, case) as op:
        for step in range(num_steps):
            run_step(case, op, step, context.device)
        op.check()


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 2), (3, 1)])
def test_over_a_slow_and_lossy_network(num_hosts, ranks_per_host, tmp_path):
    with Network(num_hosts, delay_secs=0.002, loss=0.01) as network:
        run_on_hosts(network, tmp_path, take_steps, ranks_per_host, num_hosts, 6)


def take_steps_across_a_cut(
    context: RankContext, directory: Path, timeout_secs: float
) -> tuple[tuple[int, ...] | None, str, float]:
    """A step, then more once the link is cut: the ranks that were missed, the error, the seconds until then.

    Without an error the time.monotonic() of the end.
    """
    case = case_of(context, context.world_size)
    with built_op(context, case) as op:
        run_step(case, op, 0, context.device)
        op.set_timeout(timeout_secs)
        wait_for_cut(directory, context.rank)
        start = time.monotonic()
        try:
            for step in range(1, 4):
                run_step(case, op, step, context.device)
        except RankTimeoutError as error:
            return error.missing_ranks, str(error), time.monotonic() - start
        return None, "", time.monotonic()


@pytest.mark.parametrize("host", [0, 2])
def test_a_link_that_is_cut_for_a_while(host, tmp_path):
    with Network(3) as network:
        meanwhile = functools.partial(cut, network, tmp_path, host, CUT_SENDS)
        answers = run_on_hosts(network, tmp_path, take_steps_across_a_cut, 1, TIMEOUT_SECS, meanwhile=meanwhile)
    for missing, text, ended_at in answers:
        assert missing is None, text
        assert network.joined_at < ended_at


@pytest.mark.parametrize("host", [0, 2])
def test_a_link_that_stays_cut(host, tmp_path):
    """Host 2 has the store: where it falls silent, nobody can say more than that all peers may be missing."""
    with Network(3) as network:
        meanwhile = functools.partial(cut, network, tmp_path, host)
        answers = run_on_hosts(network, tmp_path, take_steps_across_a_cut, 1, SHORT_TIMEOUT_SECS, meanwhile=meanwhile)
    for rank, (missing, text, secs) in enumerate(answers):
        others = tuple(other for other in range(3) if other != rank)
        assert missing == (others if rank == host or host == 2 else (host,)), text
        assert f"rank {rank} waited in vain for" in text
        assert SHORT_TIMEOUT_SECS <= secs < SHORT_TIMEOUT_SECS + STORE_SECS + SLACK_SECS
