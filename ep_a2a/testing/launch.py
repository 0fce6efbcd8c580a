"""Keeps a pool of processes, one per rank, that run functions collectively and never outlive their owner."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ep_a2a import env
from ep_a2a.config.requirements import checked_integer, checked_seconds
from ep_a2a.errors import (
    ClosedError,
    ConfigError,
    EpA2AError,
    RankTimeoutError,
    UnsupportedError,
    shown,
    without_section,
)
from ep_a2a.interrupts import interrupts_held
from ep_a2a.log_once import log_once
from ep_a2a.memory.private_files import own_prefix, private_folder, refusals_named, remove_stale_files
from ep_a2a.testing.mps import PIPE_VARIABLE, Mps, MpsDaemon, find_mps
from ep_a2a.testing.worker import STOP, Reply, WorkerOptions, serve, to_bytes
from ep_a2a.topology.gpu_share import ranks_per_gpu, sharing_note

logger = logging.getLogger(__name__)

START_TIMEOUT_SECS = 300.0
"""Seconds that the processes of a pool may take to import torch and to meet."""
STOP_TIMEOUT_SECS = 10.0
STACKS_TIMEOUT_SECS = 2.0

PRELOADED = ("torch.distributed", "triton.language")
"""Modules that take a rank seconds to import."""

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class RankFailure(RuntimeError):
    """At least one rank of a pool failed, died or did not finish in time; the text holds every rank's traceback.

    Attributes:
        errors: the exceptions of ranks that raised, by rank, where they survive pickling.
        tracebacks: text about each rank that failed, died or hung, by rank.
        unfinished: ranks that had not finished when the pool gave up, in ascending order.
    """

    def __init__(
        self,
        headline: str,
        tracebacks: dict[int, str],
        errors: dict[int, BaseException] | None = None,
        unfinished: tuple[int, ...] = (),
    ) -> None:
        self.errors = errors or {}
        self.tracebacks = tracebacks
        self.unfinished = unfinished
        stories = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(tracebacks.items())]
        super().__init__("\n".join([headline, *stories]))

    @property
    def summary(self) -> str:
        """The headline and the last line of each rank's traceback, in one line."""
        texts = [without_section(text).strip() for text in self.tracebacks.values()]
        last_lines = {text.splitlines()[-1] for text in texts if text}
        return "; ".join([str(self).partition("\n")[0], *sorted(last_lines)])

    @property
    def expected_error(self) -> EpA2AError | None:
        """The error to show where all ranks that ended have raised one of this package; else None."""
        known = [error for error in self.errors.values() if isinstance(error, EpA2AError)]
        if len(known) != len(self.tracebacks) - len(self.unfinished) or not known:
            return None
        # A rank that waits in vain for one that has failed is not the cause.
        return next((error for error in known if not isinstance(error, RankTimeoutError)), known[0])


@dataclass
class _Worker:
    options: WorkerOptions
    process: SpawnProcess | ForkServerProcess
    pipe: connection.Connection

    def stacks(self) -> str:
        return self.options.stacks_path.read_text() if self.options.stacks_path.exists() else ""


class RankPool:
    """`world_size` processes that share a process group and run the functions given to `run`.

    The processes start with the first `run` and meet through a file in a private directory, so no port is taken.
    After a failure they are killed; the next `run` starts fresh ones. Ranks on CPU are forked from a server process
    that imported torch once; they get the environment that this process has when they start.

    Where there are fewer GPUs than ranks, ranks share them: rank r uses GPU r modulo their number. NCCL refuses that,
    so the process group is gloo's. Kernels of ranks that share a GPU run at once through a private MPS daemon of the
    pool, or through the user's own; where there is none they take turns. The log says so once.

    Args:
        world_size: ranks, one process each.
        device: "cpu" or "cuda".
        timeout_secs: seconds that one `run` may take before all processes are killed.
        grace_secs: seconds that the other ranks may go on after one has failed (they may wait for it for ever).
        mps: whether ranks that share a GPU use MPS. Without it they take turns, which is slow, but a rank that dies
            inside a kernel leaves the others' contexts alone.

    Attributes:
        backend: of the process group: gloo, or `cpu:gloo,cuda:nccl` with a GPU per rank.
        ranks_per_gpu: ranks that share a GPU, at most; 0 on CPU.
        note: what a reader of times must know where ranks share GPUs; else "".

    Raises:
        ConfigError: an argument is impossible.
        UnsupportedError: there is no GPU.
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: str = "cpu",
        timeout_secs: float = 120.0,
        grace_secs: float = 10.0,
        mps: bool = True,
    ) -> None:
        checked_integer("world_size", world_size, 1)
        if device not in _BACKENDS:
            raise ConfigError("to be 'cpu' or 'cuda'", shown(device), field="device")
        num_gpus = torch.cuda.device_count() if device == "cuda" else 0
        if device == "cuda" and num_gpus == 0:
            raise UnsupportedError("a GPU", "none that torch can use", "Use device='cpu'.")
        self.world_size, self._num_gpus = world_size, num_gpus
        self.ranks_per_gpu = ranks_per_gpu(world_size, num_gpus)
        self._mps = (find_mps() if mps else Mps.UNWANTED) if self.ranks_per_gpu > 1 else None
        self.note = sharing_note(world_size, num_gpus)
        self.backend = _BACKENDS["cpu" if self.ranks_per_gpu > 1 else device]
        self.device = device
        self.timeout_secs = checked_seconds("timeout_secs", timeout_secs)
        self.grace_secs = checked_seconds("grace_secs", grace_secs)
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._workers: list[_Worker] = []
        self._daemon: MpsDaemon | None = None
        self._closed = False

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls `function(rank_context, *args, **kwargs)` on every rank; returns the results in rank order.

        `function` must be importable by name; arguments and results are pickled, tensors in them as CPU copies.

        Raises:
            RankFailure: a rank raised, died, or had not finished after `timeout_secs`. Its `errors` are those of the
                ranks: GpuLostError where CUDA fails for good in a process.
            ClosedError: the pool was closed.
        """
        if self._closed:
            raise ClosedError("an open RankPool", "a closed one", "Make a new RankPool.")
        task = to_bytes((function, args, kwargs))
        try:
            self._start()
            for worker in self._workers:
                # A worker that is gone shows up as the end of its pipe, with its exit code, when replies are read.
                with contextlib.suppress(OSError):
                    worker.pipe.send_bytes(task)
            return self._collect(self.timeout_secs)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """Ends the processes and removes their directory; idempotent."""
        self._closed = True
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(STOP)
        deadline = time.monotonic() + STOP_TIMEOUT_SECS
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        if self._workers:
            return
        context = _process_context(self.device)
        with refusals_named("a folder for the ranks in /dev/shm"):
            remove_stale_files()
            self._directory = tempfile.TemporaryDirectory(prefix=own_prefix(), dir=private_folder())
        variables = env.all_variables() | self._start_mps(self._directory.name)
        for rank in range(self.world_size):
            options = WorkerOptions(
                rank,
                self.world_size,
                self.backend,
                self.device,
                Path(self._directory.name),
                variables,
                max(1, self.ranks_per_gpu),
                self._num_gpus,
            )
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(options, theirs), name=f"ep_a2a rank {rank}", daemon=True)
            with env.safe_path():
                # Python unblocks SIGINT where it starts this process, which is too early in the middle of ours.
                resource_tracker.ensure_running()
                # Ctrl-C reaches all processes of a terminal; ranks leave it to their owner, and the server that they
                # are forked from gets no half request.
                with interrupts_held():
                    process.start()
            # Only the worker may hold its end, or its death would not end the pipe.
            theirs.close()
            self._workers.append(_Worker(options, process, ours))
        self._collect(START_TIMEOUT_SECS)

    def _start_mps(self, no_daemon: str) -> dict[str, str]:
        """Starts a daemon where ranks share GPUs and one is needed; returns the variables of its clients.

        no_daemon: a folder in which no daemon listens, for ranks that must not find another one.
        """
        if self._mps is None:
            return {}
        how = self._mps.value
        if self._mps is Mps.PRIVATE:
            self._daemon = MpsDaemon()
            if self._daemon.failure:
                how = f"by time slices, which is slow: MPS does not start ({self._daemon.failure})"
        log_once(logger, logging.WARNING, f"{self.note}; they run {how}")
        if self._mps in (Mps.OF_THE_USER, Mps.SILENT):
            return {}
        # CUDA would else connect to a daemon in its usual place, whoever runs it
        return (self._daemon and self._daemon.variables) or {PIPE_VARIABLE: no_daemon}

    def _collect(self, timeout_secs: float) -> list[Any]:
        """Returns one reply of every worker, or raises RankFailure."""
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + timeout_secs
        limit = f"within {timeout_secs:g} s"
        while len(replies) < self.world_size:
            waiting = {w.pipe: w for w in self._workers if w.options.rank not in replies}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._raise_failure(replies, limit)
            for worker in (waiting[pipe] for pipe in ready if isinstance(pipe, connection.Connection)):
                replies[worker.options.rank] = reply = _read_reply(worker)
                if reply.traceback_text is not None and deadline > time.monotonic() + self.grace_secs:
                    deadline = time.monotonic() + self.grace_secs
                    limit = f"within {self.grace_secs:g} s of the failure of rank {worker.options.rank}"
        if any(reply.traceback_text is not None for reply in replies.values()):
            self._raise_failure(replies, limit)
        return [replies[rank].value for rank in range(self.world_size)]

    def _raise_failure(self, replies: dict[int, Reply], limit: str) -> None:
        stories = {rank: reply.traceback_text for rank, reply in replies.items() if reply.traceback_text is not None}
        errors = {rank: pickle.loads(reply.pickled_error) for rank, reply in replies.items() if reply.pickled_error}
        hung = [worker for worker in self._workers if worker.options.rank not in replies]
        unfinished = tuple(worker.options.rank for worker in hung)
        headlines = []
        if stories:
            headlines.append(f"rank {_listed(stories)} of {self.world_size} failed")
        if hung:
            headlines.append(f"rank {_listed(unfinished)} of {self.world_size} had not finished {limit}")
            stories |= _dump_stacks(hung)
        raise RankFailure("; ".join(headlines), stories, errors, unfinished)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._workers = []
        if self._daemon is not None:
            # A rank that dies in a kernel can break the daemon for those that come next.
            self._daemon.close()
            self._daemon = None
        # Killed ranks cannot remove the memory that they were about to share.
        remove_stale_files()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, **pool_options: Any) -> list[Any]:
    """Runs `function(rank_context, *args)` once on `world_size` fresh processes; `pool_options` are RankPool's.

    Returns the results in rank order.

    Raises:
        RankFailure: a rank raised, died or did not finish in time.
    """
    with RankPool(world_size, **pool_options) as pool:
        return pool.run(function, *args)


def _process_context(device: str) -> SpawnContext | ForkServerContext:
    """Returns how ranks start: CUDA does not survive a fork; on CPU a fork saves each rank seconds of imports."""
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _read_reply(worker: _Worker) -> Reply:
    try:
        reply: Reply = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        worker.process.join(STOP_TIMEOUT_SECS)
        return Reply(traceback_text=f"the process ended with exit code {worker.process.exitcode}\n{worker.stacks()}")
    return reply


def _dump_stacks(workers: list[_Worker]) -> dict[int, str]:
    """Returns the Python stacks of processes that hang, by rank."""
    for worker in workers:
        if worker.process.pid is not None and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_TIMEOUT_SECS
    while time.monotonic() < deadline and not all(worker.stacks() for worker in workers):
        time.sleep(0.01)
    # The first bytes have been written: the rest follows at once.
    time.sleep(0.05)
    return {worker.options.rank: worker.stacks() or "no Python stack could be read" for worker in workers}


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))
