"""Runs contenders on all ranks, on processes of its own or as one rank of a job that torchrun has started.

Every contender is checked before it is timed. With several rounds, all contenders of a workload take turns in each,
since a machine's speed changes from minute to minute; times are medians of the rounds.
"""

from __future__ import annotations

import contextlib
import enum
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ep_a2a.commands.bench.contenders import ON_SHARED_GPUS, REFERENCE_PUSH, make_contender
from ep_a2a.commands.measure.timing import Timer
from ep_a2a.config import Layout
from ep_a2a.errors import CheckFailedError, UnsupportedError, without_section
from ep_a2a.memory.gpu_ranks import ranks_by_gpu
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing.launch import RankFailure, RankPool
from ep_a2a.testing.worker import RankContext
from ep_a2a.topology.gpu_share import gpu_of, sharing_note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ep_a2a.commands.bench.contenders import Contender
    from ep_a2a.commands.measure.session import Session
    from ep_a2a.commands.measure.timing import TimingSettings
    from ep_a2a.commands.measure.workload import Workload

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


class _NotRunError(Exception):
    """Raised with (status, reason), the same on all ranks, when some rank cannot go on."""


def run_contender(context: RankContext, workload: Workload, name: str, settings: TimingSettings) -> Record:
    """Checks and times one contender. Collective; returns the same record on every rank.

    A contender that raises becomes a record with the reason. After status ERROR the state of the process is unknown:
    the contender's memory stays allocated, and a GPU may be unusable.
    """
    rendezvous = Rendezvous(context.group)
    session: Session | None = None
    times: Record = {}
    status, reason = Status.OK, ""
    try:
        contender = _together(rendezvous, "loading", lambda: make_contender(name))
        own_reason = _together(rendezvous, "asking", lambda: _why_not(contender, workload, context))
        why_not = rendezvous.exchange("availability", own_reason)
        if any(why_not):
            raise _NotRunError(Status.UNAVAILABLE, next(text for text in why_not if text))
        session = _together(rendezvous, "preparing", lambda: contender.prepare(workload, context))
        _together(rendezvous, "checking", session.check)
        times = _together(rendezvous, "timing", lambda: session.measure(Timer(context, settings)))
        _together(rendezvous, "after the timing", session.check_timed)
        if settings.traces is not None:
            path = settings.traces / f"{name.replace('/', '_')}_{workload.num_tokens}.json.gz"
            _together(rendezvous, "tracing", lambda: session.trace(path))
    except _NotRunError as end:
        (status, reason), times = end.args, {}
    details = {} if session is None else session.details
    if session is not None and status != Status.ERROR:
        session.close()
    return make_record(workload, name, status, reason, details) | times


def make_record(
    workload: Workload, name: str, status: Status, reason: str = "", details: Record | None = None
) -> Record:
    """Returns the record of a contender without its times."""
    record = {"record": "row"} | workload.as_row() | {"contender": name, "status": status.value}
    return record | {name: text for name, text in (("reason", reason), ("details", details)) if text}


def _why_not(contender: Contender, workload: Workload, context: RankContext) -> str | None:
    """Returns why a contender cannot run here; None where it can."""
    if context.ranks_per_gpu > 1 and contender.name not in ON_SHARED_GPUS:
        return "needs a GPU for each rank"
    return contender.unavailable(workload, context.device)


def _together(rendezvous: Rendezvous, label: str, work: Callable[[], Any]) -> Any:
    """Returns the result of `work`; raises _NotRunError on all ranks where it raises on any."""
    value, problem, error = None, None, None
    try:
        value = work()
    except Exception as raised:  # noqa: BLE001 - reported in the contender's record, whatever it is
        error = raised
        text = f"{type(raised).__name__}: {without_section(str(raised))}"
        problem = [_status_of(raised, label), text[:MAX_REASON_CHARACTERS]]
    everyone = rendezvous.exchange(label, problem)
    for status in _WORST_FIRST:
        for rank, each in enumerate(everyone):
            if each is not None and each[0] == status:
                raise _NotRunError(status, f"{label}, rank {rank}: {each[1]}") from error
    return value


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
        shared_gpu: whether all ranks use the first GPU, however many there are.

    Attributes:
        shows_results: whether this process is the one that prints and writes.
        world_size: ranks of the job that this process has joined; None where the runner starts ranks itself.
        num_gpus: GPUs that ranks use, of this host or of all hosts of the job; 0 on CPU.
    """

    shows_results: bool = True
    world_size: int | None = None

    def __init__(self, device: str, *, shared_gpu: bool = False) -> None:
        self._device = device
        visible = torch.cuda.device_count() if device == "cuda" else 0
        self.num_gpus = min(visible, 1) if shared_gpu else visible
        self._pool: RankPool | None = None

    def note(self, num_ranks: int) -> str:
        """Returns what a reader of times must know where so many ranks share GPUs; else ""."""
        return sharing_note(num_ranks, self.num_gpus)

    def run(self, workload: Workload, name: str, settings: TimingSettings) -> Record:
        """Returns the contender's record; status ERROR where ranks died or did not finish."""
        if self._pool is None or self._pool.world_size != workload.world_size:
            self.close()
            self._pool = RankPool(
                workload.world_size,
                device=self._device,
                timeout_secs=CONTENDER_TIMEOUT_SECS,
                num_gpus=self.num_gpus,
            )
        try:
            record: Record = self._pool.run(run_contender, workload, name, settings)[0]
        except RankFailure as failure:
            record = make_record(workload, name, Status.ERROR, failure.summary[:MAX_REASON_CHARACTERS])
        if record["status"] == Status.ERROR:
            self.close()
        return record

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

    def run(self, workload: Workload, name: str, settings: TimingSettings) -> Record:
        """Returns the contender's record; the workload is for the ranks of the job."""
        return run_contender(self._context, workload, name, settings)

    def close(self) -> None:
        """Leaves the process group where this runner has joined it."""
        if self._owns_group:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def run_sweep(
    workloads: Sequence[Workload],
    names: Sequence[str],
    settings: TimingSettings,
    runner: Runner,
    on_record: Callable[[Record], None] = lambda record: None,
    on_begin: Callable[[Workload, str], None] = lambda workload, name: None,
) -> Iterator[list[Record]]:
    """Yields the records of each workload, in the order of `names`, each of all rounds.

    Calls `on_begin` with the workload and the contender before each run, and `on_record` with its record. The reference
    push runs once for all workloads that are the same to it, and what could not be timed does not run again.
    """
    pushes: dict[tuple[Workload, int], Record] = {}
    for workload in workloads:
        note = runner.note(workload.world_size)
        pushed = _as_pushed(workload)
        rounds: dict[str, list[Record]] = {name: [] for name in names}
        for number in range(settings.num_rounds):
            for name, records in rounds.items():
                on_begin(workload, name)
                if records and records[-1]["status"] != Status.OK:
                    record = records[-1]
                elif name == REFERENCE_PUSH and (pushed, number) in pushes:
                    record = pushes[pushed, number] | workload.as_row()
                else:
                    record = runner.run(workload, name, settings) | ({"note": note} if note else {})
                if name == REFERENCE_PUSH and record["status"] == Status.OK:
                    pushes[pushed, number] = record
                records.append(record)
                on_record(record)
        yield [over_rounds(records) for records in rounds.values()]


def over_rounds(records: Sequence[Record]) -> Record:
    """Returns one record of all rounds: the last if it could not be timed, else with the medians of the times.

    `rounds_us` has the round trip or layer of each round, `least_us` and `most_us` its ends.
    """
    last = records[-1]
    if last["status"] != Status.OK:
        return last
    times = {name: value for name, value in last.items() if name.endswith("_us") and value is not None}
    medians = {name: statistics.median(each[name] for each in records) for name in times}
    rounds_us = [each["layer_us" if "layer_us" in times else "round_trip_us"] for each in records]
    return last | medians | {"least_us": min(rounds_us), "most_us": max(rounds_us), "rounds_us": rounds_us}


def _as_pushed(workload: Workload) -> Workload:
    """Returns the workload without the differences that have no effect on the reference push."""
    return replace(workload, layout=Layout.COMPACT, gpus_per_node=0, max_num_tokens=workload.num_tokens)
