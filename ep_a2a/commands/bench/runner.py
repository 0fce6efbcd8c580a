"""Runs contenders on all ranks, on processes of its own or as one rank of a job that torchrun has started.

Every contender is checked before it is timed. Layers take turns in rounds, the other way round in every second one,
since a machine's speed changes from minute to minute; times are medians of the rounds.
"""

import contextlib
import enum
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.commands.bench.contenders import Contender, make_contender
from ep_a2a.commands.measure.timing import Timer, TimingSettings
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.errors import CheckFailedError, UnsupportedError, without_section
from ep_a2a.memory.gpus import ranks_by_gpu
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing.launch import RankFailure, RankPool
from ep_a2a.testing.worker import RankContext
from ep_a2a.topology.gpu_share import gpu_of, sharing_note

Record = dict[str, Any]

CONTENDER_TIMEOUT_SECS = 600.0
"""Bound of one contender at one workload, compilation included."""
MAX_REASON_CHARACTERS = 500


class Status(enum.StrEnum):
    """Status of a record.

    OK: checked and timed. UNAVAILABLE: the contender cannot run here, or not this workload. FAILED: its result was
    wrong, so it was not timed. ERROR: it raised.
    """

    OK = "ok"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    ERROR = "error"


_WORST_FIRST = (Status.ERROR, Status.FAILED, Status.UNAVAILABLE)


class _UnavailableError(Exception):
    """Raised with the reason where a contender refuses a workload before it is made."""


def run_in_turn(
    context: RankContext, workload: Workload, names: Sequence[str], settings: TimingSettings
) -> list[Record]:
    """Checks contenders, then times them in turn in each round; all hold their memory until the end. Collective.

    A contender that raises becomes a record with the reason. After status ERROR the state of the process is unknown:
    the contender's memory stays allocated, and a GPU may be unusable.

    Returns:
        A record for each contender, the same on every rank.
    """
    timer = Timer(context, settings)
    runs = [_Run(context, workload, name) for name in names]
    for run in runs:
        run.prepare()
    for number in range(settings.num_rounds):
        # The other way round each time: a GPU's clock follows the load of the contender before.
        for run in runs[:: -1 if number % 2 else 1]:
            run.time(timer)
    for run in runs:
        run.finish()
    for run in runs:
        run.close()
    return [run.record for run in runs]


class _Run:
    """One contender's way from its library to its times. It ends early where some rank cannot go on."""

    def __init__(self, context: RankContext, workload: Workload, name: str) -> None:
        self._context, self._workload, self._name = context, workload, name
        self._rendezvous = Rendezvous(context.group)
        self._session: Any = None
        self._rounds: list[Record] = []
        self._status, self._reason = Status.OK, ""

    @property
    def record(self) -> Record:
        """The contender's row: status and reason, and its times where it has been timed and no step has failed."""
        record = make_record(self._workload, self._context.device.type, self._name, self._status, self._reason)
        if self._session is not None and self._session.details:
            record["details"] = self._session.details
        return record | over_rounds(self._rounds) if self._status == Status.OK else record

    def prepare(self) -> None:
        """Makes the session and checks its result."""
        contender = self._step("asking", self._contender)
        self._session = self._step("preparing", lambda: contender.prepare(self._workload, self._context))
        self._step("checking", lambda: self._session.check())

    def time(self, timer: Timer) -> None:
        """Adds the times of a round."""
        self._rounds.append(self._step("timing", lambda: self._session.measure(timer)))

    def finish(self) -> None:
        """Checks what was timed."""
        self._step("after the timing", lambda: self._session.check_timed())

    def close(self) -> None:
        """Closes the session; after an error nobody knows how."""
        if self._session is not None and self._status != Status.ERROR:
            self._session.close()

    def _contender(self) -> Contender:
        contender = make_contender(self._name)
        reason = contender.unavailable(self._workload, self._context.device)
        if self._context.ranks_per_gpu > 1 and not contender.shares_gpus:
            reason = "needs a GPU for each rank"
        if reason is not None:
            raise _UnavailableError(reason)
        return contender

    def _step(self, label: str, work: Callable[[], Any]) -> Any:
        """Returns the result of `work`, if every step before, and this one, worked on all ranks."""
        if self._status != Status.OK:
            return None
        value: Any = None
        problem: list[str] | None = None
        try:
            value = work()
        except _UnavailableError as error:
            problem = [Status.UNAVAILABLE, str(error)]
        except Exception as error:  # noqa: BLE001 - reported in the contender's record, whatever it is
            text = f"{type(error).__name__}: {without_section(str(error))}"[:MAX_REASON_CHARACTERS]
            problem = [_status_of(error, label), f"{label}, rank {self._context.rank}: {text}"]
        problems = [each for each in self._rendezvous.exchange(label, problem) if each is not None]
        if problems:
            status, self._reason = min(problems, key=lambda each: _WORST_FIRST.index(each[0]))
            self._status = Status(status)
        return None if problems else value


def make_record(workload: Workload, device: str, name: str, status: Status, reason: str = "") -> Record:
    """Returns the record of a contender without its times; device: "cpu" or "cuda"."""
    record = {"record": "row"} | workload.as_row() | {"contender": name, "status": status.value, "device": device}
    return record | {"reason": reason} if reason else record


def over_rounds(rounds: Sequence[Record]) -> Record:
    """Returns the times of one round, or the medians of the times of several.

    Of several, `rounds_us` has the layer, or the push's exchange, of each round, `least_us` and `most_us` its ends.
    """
    if len(rounds) == 1:
        return rounds[0]
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    rounds_us = [main_us(each) for each in rounds]
    return medians | {"least_us": min(rounds_us), "most_us": max(rounds_us), "rounds_us": rounds_us}


def main_us(record: Record) -> float:
    """Returns the time that tells a timed record from others: of a layer, else of a round trip or an exchange."""
    us: float = next(record[name] for name in ("layer_us", "round_trip_us", "exchange_us") if name in record)
    return us


def _status_of(error: Exception, label: str) -> Status:
    if isinstance(error, CheckFailedError):
        return Status.FAILED
    if isinstance(error, UnsupportedError) and label == "preparing":
        return Status.UNAVAILABLE
    return Status.ERROR


class Runner:
    """Runs ranks as processes of a RankPool; starts new ones after a contender has raised or a rank has died.

    Args:
        device: "cpu" or "cuda".

    Attributes:
        shows_results: whether this process is the one that prints and writes.
        world_size: ranks of the job that this process has joined; None where the runner starts ranks itself.
        num_gpus: GPUs that ranks use, of this host or of all hosts of the job; 0 on CPU.
    """

    shows_results: bool = True
    world_size: int | None = None

    def __init__(self, device: str) -> None:
        self._device = device
        self.num_gpus = torch.cuda.device_count() if device == "cuda" else 0
        self._pool: RankPool | None = None

    def note(self, num_ranks: int) -> Record:
        """Returns what a reader of times must know, as `note`, where so many ranks share GPUs."""
        note = sharing_note(num_ranks, self.num_gpus)
        return {"note": note} if note else {}

    def run(self, workload: Workload, names: Sequence[str], settings: TimingSettings) -> list[Record]:
        """Returns what `run_in_turn` does; status ERROR for all where ranks died or did not finish."""
        if self._pool is None or self._pool.world_size != workload.ranks:
            self.close()
            timeout_secs = CONTENDER_TIMEOUT_SECS * len(names)
            self._pool = RankPool(workload.ranks, device=self._device, timeout_secs=timeout_secs)
        try:
            found: list[Record] = self._pool.run(run_in_turn, workload, names, settings)[0]
        except RankFailure as failure:
            reason = failure.summary[:MAX_REASON_CHARACTERS]
            found = [make_record(workload, self._device, name, Status.ERROR, reason) for name in names]
        if any(record["status"] == Status.ERROR for record in found):
            self.close()
        return found

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class JoinedRunner(Runner):
    """Runs as one rank of torchrun's job, whose GPUs may be those of several hosts; joins its process group.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            # torchrun's environment says which rank this is and where the others are
            dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
        group = dist.group.WORLD
        assert group is not None
        rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        place = torch.device("cpu")
        if device == "cuda":
            place = torch.device("cuda", gpu_of(rank, torch.cuda.device_count()))
            torch.cuda.set_device(place)
        by_gpu = ranks_by_gpu(Rendezvous(group), place)
        self.num_gpus = len(by_gpu)
        most = max(map(len, by_gpu.values()), default=1)
        self._context = RankContext(rank, self.world_size, place, group, most)
        self.shows_results = rank == 0

    def run(self, workload: Workload, names: Sequence[str], settings: TimingSettings) -> list[Record]:
        """Returns what `run_in_turn` does; the workload is for the ranks of the job."""
        return run_in_turn(self._context, workload, names, settings)

    def close(self) -> None:
        """Leaves the process group where this runner has joined it."""
        if self._owns_group:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
