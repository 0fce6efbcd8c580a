"""The shared-memory probe among real processes."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from ep_a2a.errors import ConfigError
from ep_a2a.memory import host_shm
from ep_a2a.memory.peers import peers_of
from ep_a2a.testing import RankFailure, RankPool
from ep_a2a.topology import classify, facts, gather_report, in_the_same_node_as
from tests.messages import messages_of
from tests.shared_files import files_of


def subgroup(context, members):
    """The group of `members` (global ranks), or None on other ranks. Collective over all ranks."""
    group = dist.new_group(members, backend="gloo")
    if context.rank not in members:
        return None
    # a member that leaves before all are connected breaks the handshake of another
    dist.barrier(group)
    return group


def process_id(_context):
    return os.getpid()


def probe_group(context, members, source_rank):
    group = subgroup(context, members)
    if group is None:
        return None
    try:
        return in_the_same_node_as(group, source_rank)
    finally:
        dist.destroy_process_group(group)


def isolate_shared_memory(context, isolated, directory):
    """Gives the ranks in `isolated` a /dev/shm of their own, as a container without --ipc=host has."""
    # the ranks of a pool serve other tests, too: they find each other first
    peers_of(context.group)
    if context.rank in isolated:
        own = Path(directory) / f"shm{context.rank}"
        own.mkdir()
        host_shm.SHM_DIRECTORY = own


def report_with_isolated(context, isolated, directory, boot_ids=None):
    shm, boot_id_path = host_shm.SHM_DIRECTORY, facts.BOOT_ID_PATH
    isolate_shared_memory(context, isolated, directory)
    if boot_ids:
        facts.BOOT_ID_PATH = Path(directory) / f"boot_id{context.rank}"
        facts.BOOT_ID_PATH.write_text(boot_ids[context.rank])
    try:
        with messages_of(facts.logger) as messages:
            return gather_report(context.group), in_the_same_node_as(context.group, 0), messages
    finally:
        host_shm.SHM_DIRECTORY, facts.BOOT_ID_PATH = shm, boot_id_path


def die_while_probing(context, dying_rank, has_offers):
    try_to_open = facts._try_to_open

    def say_and_try(offer):
        has_offers.write_bytes(b"")
        return try_to_open(offer)

    def die(_offer):
        # The survivor must have read the offers before this process is gone: opening a FIFO waits for its writer.
        has_offers.read_bytes()
        os._exit(3)

    facts._try_to_open = die if context.rank == dying_rank else say_and_try
    gather_report(context.group)


def report_without_shared_memory(context):
    peers_of(context.group)
    with mock.patch.object(host_shm, "SHM_DIRECTORY", Path("/proc/missing")):
        return gather_report(context.group)


@pytest.mark.parametrize("source_rank", [0, 1, 2])
def test_group_without_global_rank_zero(ranks, source_rank):
    results = ranks(probe_group, 4, [1, 2, 3], source_rank)
    assert results == [None, [True] * 3, [True] * 3, [True] * 3]


def test_report_is_equal_on_all_ranks_and_complete(ranks, tmp_path):
    reports = [result[0] for result in ranks(report_with_isolated, 4, [], tmp_path)]
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert [facts.rank for facts in report.ranks] == [0, 1, 2, 3]
    assert len({facts.pid for facts in report.ranks}) == 4
    assert {facts.boot_id for facts in report.ranks} == {facts.BOOT_ID_PATH.read_text().strip()}
    assert report.errors == ()
    topology = classify(report)
    assert not topology.internode
    assert topology.shared_memory_problem is None


def test_ranks_of_one_host_without_common_shared_memory_are_reported(ranks, tmp_path):
    results = ranks(report_with_isolated, 4, [2, 3], tmp_path)
    report, same_node, warnings = results[0]
    assert same_node == [True, True, False, False]
    assert len(warnings) == 1
    assert warnings[0].startswith("ranks 2, 3 run on the host of rank 0 but do not share")
    assert all(not messages for _, _, messages in results[1:])
    topology = classify(report)
    assert topology.num_nodes == 1
    assert "No such file or directory" in topology.shared_memory_problem


def test_other_hosts_are_other_nodes(ranks, tmp_path):
    report, same_node, warnings = ranks(report_with_isolated, 4, [3], tmp_path, boot_ids=["a", "a", "a", "b"])[0]
    assert same_node == [True, True, True, False]
    assert not warnings
    assert classify(report).node_of_rank == (0, 0, 0, 1)


def test_unusable_shared_memory_is_a_recorded_fact(ranks):
    report = ranks(report_without_shared_memory, 4)[0]
    assert len(report.errors) == 4
    assert "cannot create a file in /proc/missing: No such file or directory" in report.errors[0]
    assert "rank 0" in classify(report).shared_memory_problem


def test_source_rank_is_checked(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks(probe_group, 4, [1, 2, 3], 3)
    assert {type(error) for error in caught.value.errors.values()} == {ConfigError}


def test_a_rank_that_dies_while_probing_leaves_nothing(tmp_path):
    with RankPool(2) as pool:
        processes = pool.run(process_id)
        os.mkfifo(tmp_path / "has offers")
        with pytest.raises(RankFailure, match="exit code 3") as caught:
            pool.run(die_while_probing, 1, tmp_path / "has offers")
    assert "in gather_report" in caught.value.tracebacks[0]
    assert files_of(*processes) == []
