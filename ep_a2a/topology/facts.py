"""Gathers where the ranks of a group run, by two exchanges in its store; `classify` turns the report into nodes."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ep_a2a.errors import ConfigError, UntrustedFolderError, without_section
from ep_a2a.memory import host_shm
from ep_a2a.memory.host_shm import create_private, in_private_folder, new_name, open_private
from ep_a2a.memory.rendezvous import Rendezvous, is_like, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RankFacts:
    """Facts that one rank reports about itself; a fact it could not find is empty or None, and `errors` says why.

    Attributes:
        rank: rank in the group.
        hostname: the host's name; containers of one host usually differ in it.
        boot_id: random id of the running kernel, equal exactly for processes on one host.
        pid: process id, in the rank's own pid namespace.
        device_kind: "cpu" or "cuda".
        gpu_name, gpu_uuid: the rank's GPU; the uuid separates GPUs that all ranks see as cuda:0.
        visible_device_index: CUDA device index among the devices that the rank sees.
        sm_count: multiprocessors of the rank's GPU.
        errors: questions about this rank that failed, as text.
    """

    rank: int
    hostname: str = ""
    boot_id: str = ""
    pid: int = 0
    device_kind: str = "cpu"
    gpu_name: str | None = None
    gpu_uuid: str | None = None
    visible_device_index: int | None = None
    sm_count: int | None = None
    errors: tuple[str, ...] = ()

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

    @property
    def errors(self) -> tuple[str, ...]:
        """Errors met while asking, each with its rank."""
        return tuple(f"rank {facts.rank}: {error}" for facts in self.ranks for error in facts.errors)


@dataclass(frozen=True)
class _Offer:
    """A file that the other ranks may try to open; without a name, `failure` says why there is none."""

    name: str = ""
    failure: str = ""


def gather_report(
    group: dist.ProcessGroup, device: torch.device | str | None = None, meeting: Rendezvous | None = None
) -> TopologyReport:
    """Asks every rank of `group` where it runs and which ranks it shares memory with. Collective.

    A fact that a rank cannot find out is recorded as text and never raises.

    Args:
        group: the ranks; any backend, since only the group's store is used.
        device: the device this rank will use; None is the current CUDA device, or CPU where there is none.
        meeting: where all ranks of `group` meet; None makes a new Rendezvous.

    Raises:
        ConfigMismatchError: ranks have different versions of this package.
        RankTimeoutError: ranks did not come; the error names them.
        UntrustedFolderError: this user's folder in /dev/shm is not this user's alone.
    """
    offer = _make_offer()
    facts = _rank_facts(dist.get_rank(group), device)
    if offer.failure:
        facts = replace(facts, errors=(*facts.errors, offer.failure))
    own = {"facts": asdict(facts), "offer": asdict(offer)}
    own["facts"]["errors"] = list(facts.errors)
    try:
        meeting = meeting or Rendezvous(group)
        answers = meeting.exchange(label := "facts of each rank", own)
        if not all(is_like(answer[part], own[part]) for answer in answers for part in own):
            raise unreadable("every rank", label, "a message without facts")
        offers = [_Offer(**answer["offer"]) for answer in answers]
        failures = meeting.exchange(label := "files that could be opened", [_try_to_open(other) for other in offers])
        if not all(_are_texts(each, len(offers)) for each in failures):
            raise unreadable("every rank", label, "a message without reasons")
    finally:
        # all ranks have tried, or the group is broken
        _remove(offer)
    found = tuple(
        RankFacts(**{**answer["facts"], "errors": tuple(answer["facts"]["errors"] or ())}) for answer in answers
    )
    return TopologyReport(found, tuple(map(tuple, failures)))


def _are_texts(found: Any, number: int) -> bool:
    return isinstance(found, list) and len(found) == number and all(isinstance(text, str) for text in found)


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
    report = gather_report(group, "cpu")
    failures = [report.probe_failures[r][source_rank] for r in range(world_size)]
    apart = [r for r in range(world_size) if failures[r] and report.on_one_host(r, source_rank)]
    if apart and rank == source_rank:
        logger.warning(
            "ranks %s run on the host of rank %d but do not share %s with it (%s): give their containers one --ipc",
            ", ".join(map(str, apart)),
            source_rank,
            host_shm.SHM_DIRECTORY,
            failures[apart[0]],
        )
    return [not failure for failure in failures]


def _make_offer() -> _Offer:
    # nobody can guess the name, so a file of that name on another host cannot pass for this one
    name = new_name()
    try:
        os.close(create_private(in_private_folder(name), 0))
    except OSError as error:
        return _Offer(failure=f"cannot create a file in {host_shm.SHM_DIRECTORY}: {error.strerror}")
    return _Offer(name)


def _remove(offer: _Offer) -> None:
    with contextlib.suppress(OSError):
        if offer.name:
            in_private_folder(offer.name).unlink()


def _try_to_open(offer: _Offer) -> str:
    """Returns the reason why the offered file cannot be opened here; "" if it can."""
    if offer.failure:
        return offer.failure
    try:
        os.close(open_private(in_private_folder(offer.name), 0))
    except OSError as error:
        return error.strerror or str(error)
    except UntrustedFolderError as error:
        return without_section(str(error))
    return ""


@dataclass
class _Asker:
    """Asks for facts one by one; a question that fails gives `missing` and leaves an error text."""

    errors: list[str] = field(default_factory=list)

    def ask(self, what: str, question: Callable[[], Any], missing: Any = None) -> Any:
        try:
            return question()
        except Exception as error:  # noqa: BLE001 - recorded in the report, which must come about on every machine
            self.errors.append(f"{what}: {type(error).__name__}: {error}")
            return missing


def _rank_facts(rank: int, device: torch.device | str | None) -> RankFacts:
    asker = _Asker()
    facts = RankFacts(
        rank=rank,
        hostname=asker.ask("hostname", socket.gethostname, ""),
        boot_id=asker.ask("boot id", lambda: BOOT_ID_PATH.read_text().strip(), ""),
        pid=os.getpid(),
    )
    has_cuda = asker.ask("CUDA", torch.cuda.is_available, False)
    kind = torch.device(device).type if device is not None else "cuda" if has_cuda else "cpu"
    if kind == "cuda":
        index = torch.device(device).index if device is not None else None
        index = asker.ask("CUDA device", torch.cuda.current_device) if index is None else index
        gpu = asker.ask("GPU properties", lambda: torch.cuda.get_device_properties(index))
        facts = replace(
            facts,
            visible_device_index=index,
            gpu_name=asker.ask("GPU name", lambda: str(gpu.name)),
            gpu_uuid=asker.ask("GPU uuid", lambda: str(gpu.uuid)),
            sm_count=asker.ask("multiprocessors", lambda: int(gpu.multi_processor_count)),
        )
    return replace(facts, device_kind=kind, errors=tuple(asker.errors))
