"""The shared-memory probe among real processes."""

import os
from pathlib import Path
from unittest import mock

import pytest

from ep_a2a.errors import ConfigError
from ep_a2a.memory import private_files
from ep_a2a.memory.host_record import host_identity
from ep_a2a.memory.peers import peers_of
from ep_a2a.testing import RankFailure, RankPool
from ep_a2a.topology import classify, facts, gather_report, in_the_same_node_as
from tests.cases.op_checks import raised
from tests.messages import messages_of
from tests.shared_files import files_of


def process_id(_context):
    return os.getpid()


def report_of(context, directories, boot_ids):
    """What a rank finds whose /dev/shm, as a container may have its own, and whose boot id are made up."""
    # the ranks of a pool serve other tests, too: they find each other first
    peers_of(context.group)
    directory = Path(directories.get(context.rank, private_files.SHM_DIRECTORY))
    identity = host_identity() if boot_ids is None else boot_ids[context.rank]
    with (
        mock.patch.object(private_files, "SHM_DIRECTORY", directory),
        mock.patch.object(facts, "host_identity", return_value=identity),
        messages_of(facts.logger) as messages,
    ):
        return gather_report(context.group), in_the_same_node_as(context.group, 0), messages


def die_while_probing(context, dying_rank, has_offers):
    try_to_open = facts.try_to_open

    def say_and_try(offer):
        has_offers.write_bytes(b"")
        return try_to_open(offer)

    def die(_offer):
        # The survivor must have read the offers before this process is gone: opening a FIFO waits for its writer.
        has_offers.read_bytes()
        os._exit(3)

    facts.try_to_open = die if context.rank == dying_rank else say_and_try
    gather_report(context.group)


@pytest.mark.parametrize(
    ("apart", "boot_ids", "same_node", "nodes", "problem", "warning"),
    [
        ({}, None, [True] * 4, (0, 0, 0, 0), None, None),
        # ranks of one host without a common folder are one node, and told of
        (
            {2: "own", 3: "another"},
            None,
            [True, True, False, False],
            (0, 0, 0, 0),
            "No such file or directory",
            "ranks 2, 3 run on the host of rank 0 but do not share",
        ),
        ({3: "own"}, "aaab", [True, True, True, False], (0, 0, 0, 1), None, None),
        (
            dict.fromkeys(range(4), "/proc/missing"),
            None,
            [False] * 4,
            (0, 0, 0, 0),
            "cannot create a file in /proc/missing: No such file or directory",
            "ranks 0, 1, 2, 3 run on the host of rank 0",
        ),
    ],
)
def test_who_shares_memory(ranks, tmp_path, apart, boot_ids, same_node, nodes, problem, warning):
    directories = {rank: str(tmp_path / name) for rank, name in apart.items()}
    for directory in directories.values():
        if directory.startswith(str(tmp_path)):
            Path(directory).mkdir()
    results = ranks(report_of, 4, directories, boot_ids)
    report = results[0][0]
    assert all(found == report and same == same_node for found, same, _ in results)
    topology = classify(report)
    assert topology.node_of_rank == nodes
    assert (problem or "") in (topology.shared_memory_problem or "")
    assert bool(topology.shared_memory_problem) == bool(problem)
    # the source's own log only
    assert [len(messages) for _, _, messages in results] == [int(warning is not None), 0, 0, 0]
    assert all(message.startswith(warning) for message in results[0][2])


def ask_of_a_rank_that_is_none(context):
    raised(ConfigError, lambda: in_the_same_node_as(context.group, 2), "source_rank to be a rank of the group, 0 to 1")


def test_source_rank_is_checked(ranks):
    ranks(ask_of_a_rank_that_is_none, 2)


def test_a_rank_that_dies_while_probing_leaves_nothing(tmp_path):
    with RankPool(2) as pool:
        processes = pool.run(process_id)
        os.mkfifo(tmp_path / "has offers")
        with pytest.raises(RankFailure, match="exit code 3") as caught:
            pool.run(die_while_probing, 1, tmp_path / "has offers")
    assert "in gather_report" in caught.value.tracebacks[0]
    assert files_of(*processes) == []
