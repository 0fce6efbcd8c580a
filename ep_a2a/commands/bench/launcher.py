"""Runs a sweep on processes of its own, or as one rank of a job that torchrun has started."""

from __future__ import annotations

import abc
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from ep_a2a.commands.bench.contenders import LIMIT
from ep_a2a.commands.bench.rows import MAX_REASON_CHARACTERS, Row, Status
from ep_a2a.commands.bench.worker import run_contender
from ep_a2a.config import Layout
from ep_a2a.memory.gpu_ranks import ranks_by_gpu
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing.launch import RankFailure, RankPool
from ep_a2a.testing.worker import RankContext
from ep_a2a.topology.gpu_share import gpu_of, sharing_note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ep_a2a.commands.measure.timing import TimingSettings
    from ep_a2a.commands.measure.workload import Workload

CONTENDER_TIMEOUT_SECS = 600.0
"""Bound of one contender at one point, compilation included."""


class Runner(abc.ABC):
    """Runs one contender at one point on all ranks.

    Attributes:
        shows_results: whether this process is the one that prints and writes.
        world_size: ranks of the job that this process has joined; None where the runner starts ranks itself.
        num_gpus: GPUs of this host that ranks use; 0 on CPU.
    """

    shows_results: bool = True
    world_size: int | None = None
    num_gpus: int = 0

    def note(self, num_ranks: int) -> str:
        """Returns what a reader of times must know where so many ranks share GPUs; else ""."""
        return ""

    @abc.abstractmethod
    def run(self, workload: Workload, name: str, settings: TimingSettings) -> Row:
        """Returns the contender's row."""

    def close(self) -> None:  # noqa: B027  a runner may have started nothing
        """Ends what the runner has started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PoolRunner(Runner):
    """Runs ranks as processes of a RankPool; starts new ones after a contender has raised or a rank has died.

    Args:
        device: "cpu" or "cuda".
        shared_gpu: whether all ranks use the first GPU, however many there are.
    """

    def __init__(self, device: str, *, shared_gpu: bool = False) -> None:
        self._device = device
        visible = torch.cuda.device_count() if device == "cuda" else 0
        self.num_gpus = min(visible, 1) if shared_gpu else visible
        self._pool: RankPool | None = None

    def note(self, num_ranks: int) -> str:
        """Returns what pools of so many ranks say of their GPUs."""
        return sharing_note(num_ranks, self.num_gpus)

    def run(self, workload: Workload, name: str, settings: TimingSettings) -> Row:
        """Returns the contender's row; status ERROR where ranks died or did not finish."""
        if self._pool is None or self._pool.world_size != workload.world_size:
            self.close()
            self._pool = RankPool(
                workload.world_size,
                device=self._device,
                timeout_secs=CONTENDER_TIMEOUT_SECS,
                num_gpus=self.num_gpus,
            )
        try:
            row: Row = self._pool.run(run_contender, workload, name, settings)[0]
        except RankFailure as failure:
            row = Row(workload, name, Status.ERROR, failure.summary[:MAX_REASON_CHARACTERS])
        row = replace(row, note=self.note(workload.world_size))
        if row.status == Status.ERROR:
            self.close()
        return row

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class JoinedRunner(Runner):
    """Runs as one rank of torchrun's job; making it joins the default process group.

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
        self._note = sharing_note(self.world_size, len(by_gpu))
        most = max(map(len, by_gpu.values()), default=1)
        self._context = RankContext(rank, self.world_size, place, group, most)
        self.shows_results = rank == 0

    def note(self, num_ranks: int) -> str:
        """Returns what is so of the job, whose GPUs may be those of several hosts."""
        return self._note

    def run(self, workload: Workload, name: str, settings: TimingSettings) -> Row:
        """Returns the contender's row; the workload is for the ranks of the job."""
        return replace(run_contender(self._context, workload, name, settings), note=self._note)

    def close(self) -> None:
        """Leaves the process group where this runner has joined it."""
        if self._owns_group:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def make_runner(device: str, *, shared_gpu: bool = False) -> Runner:
    """Returns a JoinedRunner under torchrun, else a PoolRunner, whose ranks all use one GPU with shared_gpu."""
    return JoinedRunner(device) if dist.is_torchelastic_launched() else PoolRunner(device, shared_gpu=shared_gpu)


def run_sweep(
    points: Sequence[Workload],
    names: Sequence[str],
    settings: TimingSettings,
    runner: Runner,
    on_row: Callable[[Row], None] = lambda row: None,
    on_begin: Callable[[Workload, str], None] = lambda workload, name: None,
) -> Iterator[list[Row]]:
    """Yields the rows of each point, in the order of `names`.

    Calls `on_begin` with the workload and the contender before each row, and `on_row` with the row.

    The limit is measured once for all points that are the same to it.
    """
    limits: dict[Workload, Row] = {}
    for workload in points:
        same = _as_limit_sees(workload, shares_gpu=bool(runner.note(workload.world_size)))
        rows = []
        for name in names:
            on_begin(workload, name)
            if name == LIMIT and same in limits:
                row = replace(limits[same], workload=workload)
            else:
                row = runner.run(workload, name, settings)
            if name == LIMIT and row.status == Status.OK:
                limits[same] = row
            rows.append(row)
            on_row(row)
        yield rows


def _as_limit_sees(workload: Workload, *, shares_gpu: bool) -> Workload:
    """Returns the workload without the differences that have no effect on the limit."""
    same = replace(workload, layout=Layout.COMPACT, gpus_per_node=0, max_num_tokens=workload.num_tokens)
    return same if shares_gpu else replace(same, max_sms=0)
