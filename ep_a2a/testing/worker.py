"""Runs one rank of a RankPool: joins the process group, then answers tasks until it gets STOP."""

import faulthandler
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a import env
from ep_a2a.errors import GpuLostError
from ep_a2a.memory.rendezvous import no_room
from ep_a2a.topology.gpu_share import gpu_of

CUDA_ERRORS = ("CUDA error", "[CUDA]")
"""What errors of CUDA have in their texts: torch's, and those of Triton's launches."""
STOP = b""
"""The task that ends a worker."""
REMOVAL_SECS = 5
"""How long a rank whose parent has ended tries to remove the pool's folder."""


@dataclass(frozen=True)
class RankContext:
    """The rank that a function runs on in a RankPool.

    Attributes:
        rank: this rank, 0 <= rank < world_size.
        world_size: ranks in the pool.
        device: `cpu`, or this rank's GPU, which is also the current CUDA device.
        group: the default process group, all ranks of the pool.
        ranks_per_gpu: ranks that share a GPU, at most; 1 where each has its own.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    ranks_per_gpu: int = 1


@dataclass(frozen=True)
class WorkerOptions:
    """Options with which a worker joins: the same on all ranks of a pool, except `rank`."""

    rank: int
    world_size: int
    backend: str
    device: str
    directory: Path
    environment: dict[str, str]
    ranks_per_gpu: int = 1
    num_gpus: int = 0

    @property
    def stacks_path(self) -> Path:
        """The file of this rank's Python stacks, written on SIGUSR1 or a fatal signal."""
        return self.directory / f"rank{self.rank}.stacks"


@dataclass(frozen=True)
class Reply:
    """Answer of a worker to a task: `value` if `traceback_text` is None, else a failure.

    `pickled_error` is None where the exception does not survive pickling.
    """

    value: Any = None
    traceback_text: str | None = None
    pickled_error: bytes | None = None


class _TensorPickler(pickle.Pickler):
    """Pickles tensors by value, on the CPU: a tensor's own reduction keeps the whole storage behind a view."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        buffer = io.BytesIO()
        torch.save(obj.detach().cpu().clone(memory_format=torch.contiguous_format), buffer)
        return _tensor_from_bytes, (buffer.getvalue(),)


def _tensor_from_bytes(data: bytes) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(io.BytesIO(data))
    return tensor


def to_bytes(value: Any) -> bytes:
    """Pickles a value; tensors in it become contiguous CPU copies without autograd history."""
    buffer = io.BytesIO()
    _TensorPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def serve(options: WorkerOptions, pipe: connection.Connection) -> None:
    """Main function of a worker: one Reply when it has joined, then one per task read from `pipe`.

    A parent that has ended needs no reply, so that is no error. This process then removes the pool's folder before it
    ends: its end would cut a removal in another thread short.
    """
    try:
        _serve(options, pipe)
    except (EOFError, ConnectionError, FileNotFoundError):
        _remove(options.directory)


def _serve(options: WorkerOptions, pipe: connection.Connection) -> None:
    # A server of forks has the environment of its own start.
    env.take_over(options.environment)
    # Ctrl-C reaches the whole terminal session; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(options.directory,), daemon=True).start()
    with options.stacks_path.open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            context = _join(options)
        except Exception as error:  # noqa: BLE001 - reported to the parent, whatever it is
            pipe.send_bytes(to_bytes(_failure(_with_its_cause(torch.device("cpu"), error))))
            return
        pipe.send_bytes(to_bytes(Reply()))
        while (task := pipe.recv_bytes()) != STOP:
            pipe.send_bytes(_answer(context, task))
        if dist.is_initialized():
            dist.destroy_process_group()
        # The file is about to be closed: a late signal must not write to a reused descriptor.
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


def _join(options: WorkerOptions) -> RankContext:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", gpu_of(options.rank, options.num_gpus))
        torch.cuda.set_device(device)
    rendezvous = f"file://{options.directory}/rendezvous"
    dist.init_process_group(options.backend, rendezvous, rank=options.rank, world_size=options.world_size)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("init_process_group left no default group")
    return RankContext(options.rank, options.world_size, device, group, options.ranks_per_gpu)


def _answer(context: RankContext, task: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(task)
        return to_bytes(Reply(value=function(context, *args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - reported to the parent; pytest's outcomes are BaseExceptions
        return to_bytes(_failure(_with_its_cause(context.device, error)))


def _with_its_cause(device: torch.device, error: BaseException) -> BaseException:
    """Returns GpuLostError where CUDA fails for good in this process, and HostMemoryError where /dev/shm is full."""
    if full := no_room(error):
        full.__cause__ = error
        return full
    if device.type != "cuda" or not any(sign in str(error) for sign in CUDA_ERRORS):
        return error
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as last:
        lost = GpuLostError(f"{device} to work in this process", str(last).partition("\n")[0])
        lost.__cause__ = error
        return lost
    return error


def _failure(error: BaseException) -> Reply:
    try:
        pickled = to_bytes(error)
        # Many exceptions can be pickled but not rebuilt; find out here, where it costs only the attribute.
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - any failure means the same: only the text travels
        pickled = None
    return Reply(traceback_text="".join(traceback.format_exception(error)), pickled_error=pickled)


def _exit_with_parent(directory: Path) -> None:
    """Ends this process when its parent ends, even while a collective blocks it, and removes the pool's folder."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        _remove(directory)
        os._exit(1)


def _remove(directory: Path) -> None:
    """Removes a pool's folder, while other ranks do the same and one may still write a file into it.

    Leaves what it cannot remove within REMOVAL_SECS: a rank that does not end keeps its GPU.
    """
    deadline = time.monotonic() + REMOVAL_SECS
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
