"""Compiles lists of kernels, and says so where that takes long."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from triton import knobs

from ep_a2a import env

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.kernels.compiled_kernel import CompiledKernel

ANNOUNCE_AFTER_SECS = 2.0
"""Shorter waits need no message. Loading one kernel from Triton's cache never takes so long."""
POLL_SECS = 0.2

logger = logging.getLogger(__name__)
Item = TypeVar("Item")


def compile_all(kernels: Iterable[CompiledKernel], config: EpDispatchCombineConfig) -> None:
    """Compiles and loads kernels; nothing is launched.

    The ranks of a node share the work by Triton's disk cache. Of W ranks, rank r compiles kernels r, r + W, … first.
    It finds the others' in the cache then, if all ranks pass the same list.

    Where Triton compiles for more than ANNOUNCE_AFTER_SECS, the first rank of each node says once how many kernels are
    left. The message has level INFO. It goes to stderr where that is a terminal, or EP_A2A_LOG_LEVEL is INFO, unless
    logging shows it already.

    Args:
        kernels: what is to be compiled.
        config: of the op that launches them.

    Raises:
        StateError, UntrustedFolderError: as `CompiledKernel.compile`.
    """
    waiting = [kernel for kernel in kernels if not kernel.is_compiled]
    if not waiting:
        return
    num_ranks = min(config.gpu_per_node, config.world_size)
    own = config.rank % config.gpu_per_node
    watch = _Watch(waiting)
    with watch.running() if own == 0 else contextlib.nullcontext():
        for kernel in in_shares(waiting, own, num_ranks):
            watch.begin()
            kernel.compile()


def in_shares(items: Sequence[Item], own: int, num_shares: int) -> list[Item]:
    """Items own, own + num_shares, … first. The others follow, the first of each share in front of its second.

    Workers that end their shares at the same time go on at different items.
    """

    def turn(place: int) -> tuple[bool, int, int]:
        behind = (place - own) % num_shares
        return behind > 0, place // num_shares, behind

    return [items[place] for place in sorted(range(len(items)), key=turn)]


class _Watch:
    """Waits beside the thread that compiles, and logs once where that takes long.

    Args:
        kernels: those that are to be compiled.
    """

    def __init__(self, kernels: Sequence[CompiledKernel]) -> None:
        self._kernels = kernels
        self._begun_at = time.monotonic()
        self._really_compiles = False
        self._ended = threading.Event()

    def begin(self) -> None:
        """Notes that the next kernel begins."""
        self._begun_at = time.monotonic()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watches meanwhile. Listens to Triton, beside a listener that is there already."""
        previous = knobs.compilation.listener

        def listen(*, cache_hit: bool, **facts: Any) -> None:
            self._really_compiles |= not cache_hit
            if previous is not None:
                previous(cache_hit=cache_hit, **facts)

        thread = threading.Thread(target=self._wait, name="ep_a2a compilation", daemon=True)
        knobs.compilation.listener = listen
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            if knobs.compilation.listener is listen:
                knobs.compilation.listener = previous

    def _wait(self) -> None:
        secs = ANNOUNCE_AFTER_SECS
        while not self._ended.wait(secs):
            # with a warm cache many kernels are loaded, and none takes long
            if self._really_compiles or time.monotonic() - self._begun_at > ANNOUNCE_AFTER_SECS:
                _announce(self._text())
                return
            secs = POLL_SECS

    def _text(self) -> str:
        left = [kernel for kernel in self._kernels if not kernel.is_compiled]
        names = ", ".join(sorted({kernel.name for kernel in left}))
        count = f"{len(left)} of {len(self._kernels)} kernels are left"
        kept = f"{knobs.cache.dir} keeps them, so the next start is quick"
        return f"compiling for the first use: {count} ({names}); {kept}"


def _announce(text: str) -> None:
    logger.info(text)
    is_logged = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
    if is_logged or sys.stderr is None:
        return
    if sys.stderr.isatty() or env.LOG_LEVEL.get() in ("INFO", "DEBUG"):
        sys.stderr.write(f"ep_a2a: {text}\n")
