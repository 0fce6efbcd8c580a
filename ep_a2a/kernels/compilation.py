"""Compiles lists of kernels in threads, each kernel once on a host, and says so where that takes long."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

import filelock
import torch
from triton import knobs

from ep_a2a import env
from ep_a2a.kernels.kernel_cache import check_kernel_cache

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.kernels.compiled_kernel import CompiledKernel

MOST_THREADS = 8
"""Threads of a rank that compile. A sixth of the work of a kernel is Python, which one thread does at a time: the 33
kernels of an op of two ranks took 16 s with 8 threads and with 14 (Triton 3.6, 30 November)."""
ANNOUNCE_AFTER_SECS = 4.0
"""Compilation that takes less needs no message, and loading an op's kernels from Triton's cache takes less."""
LOCK_PATIENCE_SECS = 60.0
"""How long a rank waits for another process that compiles the same kernel. It may have been stopped."""

logger = logging.getLogger(__name__)
Item = TypeVar("Item")


def compile_all(kernels: Iterable[CompiledKernel], config: EpDispatchCombineConfig) -> None:
    """Compiles and loads kernels; nothing is launched.

    The ranks of a node share the work by Triton's disk cache, and each has its share of the processor's cores. Of W
    ranks, rank r compiles kernels r, r + W, … first. The others' are in the cache then, or are waited for.

    After ANNOUNCE_AFTER_SECS the first rank of each node says how many kernels are left. The message has level INFO. It
    goes to stderr where that is a terminal, or EP_A2A_LOG_LEVEL is INFO, unless logging shows it already.

    Args:
        kernels: what is to be compiled.
        config: of the op that launches them.

    Raises:
        StateError, UntrustedFolderError: as `CompiledKernel.compile`.
    """
    waiting = [kernel for kernel in kernels if not kernel.is_compiled]
    if not waiting:
        return
    waiting[0].refuse_capture()
    check_kernel_cache()
    num_ranks = min(config.gpu_per_node, config.world_size)
    own = config.rank % config.gpu_per_node
    # no more than this rank's kernels: further ones would take those that another rank is about to begin
    num_own = -(-(len(waiting) - own) // num_ranks)
    num_threads = max(1, min(num_own, len(os.sched_getaffinity(0)) // num_ranks, MOST_THREADS))
    # threads begin with the first device
    begin = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else ()
    with ThreadPoolExecutor(num_threads, "ep_a2a_compile", *begin) as pool:
        # here, since the names of functions that kernels share are not to be found out by two threads at once
        named = [(kernel, _lock_of(kernel)) for kernel in in_shares(waiting, own, num_ranks)]
        started = {pool.submit(_build, kernel, lock): kernel for kernel, lock in named}
        try:
            if wait(started, ANNOUNCE_AFTER_SECS).not_done and own == 0:
                _announce(started)
            for building, kernel in started.items():
                kernel.load(building.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _lock_of(kernel: CompiledKernel) -> str:
    """The file that a process locks while it compiles a kernel."""
    # device code by what it says, in place of the object
    parts = (kernel.kernel.cache_key, *kernel.key[1:])
    return os.path.join(knobs.cache.dir, f"ep_a2a-{hashlib.sha256(repr(parts).encode()).hexdigest()}.lock")


def _build(kernel: CompiledKernel, lock: str) -> Any:
    with contextlib.ExitStack() as held:
        try:
            os.makedirs(os.path.dirname(lock), exist_ok=True)
            held.enter_context(filelock.FileLock(lock, LOCK_PATIENCE_SECS))
        except (NotImplementedError, OSError) as error:  # patience has ended, or the file system has no locks
            logger.info("%s is compiled without its lock, perhaps by several processes: %s", kernel.name, error)
        return kernel.build()


def in_shares(items: Sequence[Item], own: int, num_shares: int) -> list[Item]:
    """Items own, own + num_shares, … first. The others follow, the first of each share in front of its second.

    Workers that end their shares at the same time go on at different items.
    """

    def turn(place: int) -> tuple[bool, int, int]:
        behind = (place - own) % num_shares
        return behind > 0, place // num_shares, behind

    return [items[place] for place in sorted(range(len(items)), key=turn)]


def _announce(kernels: dict[Future[Any], CompiledKernel]) -> None:
    left = [kernel.name for building, kernel in kernels.items() if not building.done()]
    count = f"{len(left)} of {len(kernels)} kernels are left ({', '.join(sorted(set(left)))})"
    text = f"compiling for the first use: {count}; {knobs.cache.dir} keeps them, so the next start is quick"
    logger.info(text)
    is_logged = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
    if is_logged or sys.stderr is None:
        return
    if sys.stderr.isatty() or env.LOG_LEVEL.get() in ("INFO", "DEBUG"):
        sys.stderr.write(f"ep_a2a: {text}\n")
