"""Gathers where the ranks of a group run, by two exchanges in its store; `classify` turns the report into nodes."""

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from ep_a2a.errors import ConfigError, UntrustedFolderError, without_section
from ep_a2a.memory import private_files
from ep_a2a.memory.host_record import host_identity
from ep_a2a.memory.private_files import create_private, in_private_folder, new_name, open_private, remove_private
from ep_a2a.memory.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankFacts:
    """Where one rank runs.

    Attributes:
        hostname: the host's name; containers of one host usually differ in it.
        boot_id: random id of the running kernel, equal exactly for processes on one host; "" where it cannot be read.
    """

    hostname: str
    boot_id: str

    @property
    def host(self) -> str:
        """Identity of the host: the boot id, or the name where that cannot be read."""
        return self.boot_id or self.hostname


@dataclass(frozen=True)
class TopologyReport:
    """Facts about all ranks of a group, the same on every rank.

    Attributes:
        ranks: one RankFacts per rank of the group, in rank order.
        probe_failures: `[r][s]` is why rank r could not open the shared-memory file of rank s; "" where it could.
    """

    ranks: tuple[RankFacts, ...]
    probe_failures: tuple[tuple[str, ...], ...]

    def probe_failure(self, one: int, other: int) -> str:
        """The reason why two ranks do not share memory, in whichever direction it failed; "" if they do."""
        return self.probe_failures[one][other] or self.probe_failures[other][one]

    def share_memory(self, one: int, other: int) -> bool:
        """Whether each of two ranks could open the other's file."""
        return not self.probe_failure(one, other)

    def on_one_host(self, one: int, other: int) -> bool:
        """Whether two ranks run under one kernel, in one container or not."""
        return bool(self.ranks[one].host) and self.ranks[one].host == self.ranks[other].host


def gather_report(group: dist.ProcessGroup, meeting: Rendezvous | None = None) -> TopologyReport:
    """Asks every rank of `group` where it runs and which ranks it shares memory with. Collective.

    Args:
        group: the ranks; any backend, since only the group's store is used.
        meeting: where all ranks of `group` meet; None makes a new Rendezvous.

    Raises:
        ConfigMismatchError: ranks have different versions of this package.
        RankTimeoutError: ranks did not come; the error names them.
        UntrustedFolderError: this user's folder in /dev/shm is not this user's alone.
    """
    offer = make_offer()
    try:
        meeting = meeting or Rendezvous(group)
        own = {"hostname": socket.gethostname(), "boot_id": host_identity(), **offer}
        answers = meeting.exchange("facts of each rank", own)
        # by rank in a dict, of which meetings check that all ranks are in it
        opened = {str(rank): try_to_open(answer) for rank, answer in enumerate(answers)}
        failures = meeting.exchange("files that could be opened", opened)
    finally:
        # all ranks have tried, or the group is broken
        remove_private(offer["file"])
    facts = tuple(RankFacts(answer["hostname"], answer["boot_id"]) for answer in answers)
    return TopologyReport(facts, tuple(tuple(of_rank[each] for each in opened) for of_rank in failures))


def in_the_same_node_as(group: dist.ProcessGroup, source_rank: int = 0) -> list[bool]:
    """Finds the ranks that share memory with `source_rank`: they open a file that it makes in /dev/shm. Collective.

    A warning in the source's log names ranks of its host that cannot open the file: they are not on another node, but
    their containers lack a common /dev/shm.

    Args:
        group: the ranks; any backend, since only the group's store is used. It need not contain global rank 0.
        source_rank: a rank in `group` (not a global rank), the same on all ranks.

    Returns:
        For each rank of `group`, whether it shares memory with the source; the same list on all ranks.

    Raises:
        ConfigError: `source_rank` is not a rank of the group.
        RankTimeoutError: ranks did not come; the error names them.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if not 0 <= source_rank < world_size:
        raise ConfigError(f"to be a rank of the group, 0 to {world_size - 1}", str(source_rank), field="source_rank")
    report = gather_report(group)
    failures = [report.probe_failures[r][source_rank] for r in range(world_size)]
    apart = [r for r in range(world_size) if failures[r] and report.on_one_host(r, source_rank)]
    if apart and rank == source_rank:
        logger.warning(
            "ranks %s run on the host of rank %d but do not share %s with it (%s): give their containers one --ipc",
            ", ".join(map(str, apart)),
            source_rank,
            private_files.SHM_DIRECTORY,
            failures[apart[0]],
        )
    return [not failure for failure in failures]


def make_offer() -> dict[str, str]:
    """Makes a file that the other ranks may try to open; where that fails, "failure" says why."""
    # nobody can guess the name, so a file of that name on another host cannot pass for this one
    name = new_name()
    try:
        os.close(create_private(in_private_folder(name), 0))
    except OSError as error:
        return {"file": "", "failure": f"cannot create a file in {private_files.SHM_DIRECTORY}: {error.strerror}"}
    return {"file": name, "failure": ""}


def try_to_open(offer: Mapping[str, str]) -> str:
    """Returns the reason why the offered file cannot be opened here; "" if it can."""
    if offer["failure"]:
        return offer["failure"]
    try:
        os.close(open_private(in_private_folder(offer["file"]), 0))
    except OSError as error:
        return error.strerror or str(error)
    except UntrustedFolderError as error:
        return without_section(str(error))
    return ""
