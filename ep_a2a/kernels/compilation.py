"""Compiles lists of kernels, and says so where that takes long."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, TypeVar

from triton import knobs

from ep_a2a import clock, env

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.kernels.compiled_kernel import CompiledKernel

ANNOUNCE_AFTER_SECS = 2.0
"""Compilation that takes less needs no message."""
LOADING_SECS = 0.5
"""Loading one kernel from Triton's cache takes less, and compiling it takes more."""

logger = logging.getLogger(__name__)
Item = TypeVar("Item")


def compile_all(kernels: Iterable[CompiledKernel], config: EpDispatchCombineConfig) -> None:
    """Compiles and loads kernels; nothing is launched.

    The ranks of a node share the work by Triton's disk cache. Of W ranks, rank r compiles kernels r, r + W, … first.
    It finds the others' in the cache then, if all ranks pass the same list.

    Once kernels have taken more than ANNOUNCE_AFTER_SECS, the first rank of each node says how many are left. The
    message has level INFO. It goes to stderr where that is a terminal, or EP_A2A_LOG_LEVEL is INFO, unless logging
    shows it already.

    Args:
        kernels: what is to be compiled.
        config: of the op that launches them.

    Raises:
        StateError, UntrustedFolderError: as `CompiledKernel.compile`.
    """
    waiting = [kernel for kernel in kernels if not kernel.is_compiled]
    num_ranks = min(config.gpu_per_node, config.world_size)
    own = config.rank % config.gpu_per_node
    secs, says_it = 0.0, own == 0
    for kernel in in_shares(waiting, own, num_ranks):
        if says_it and secs > ANNOUNCE_AFTER_SECS:
            says_it = False
            _announce(waiting)
        start = clock.now()
        kernel.compile()
        took = clock.now() - start
        secs += took if took > LOADING_SECS else 0.0


def in_shares(items: Sequence[Item], own: int, num_shares: int) -> list[Item]:
    """Items own, own + num_shares, … first. The others follow, the first of each share in front of its second.

    Workers that end their shares at the same time go on at different items.
    """

    def turn(place: int) -> tuple[bool, int, int]:
        behind = (place - own) % num_shares
        return behind > 0, place // num_shares, behind

    return [items[place] for place in sorted(range(len(items)), key=turn)]


def _announce(kernels: Sequence[CompiledKernel]) -> None:
    left = [kernel.name for kernel in kernels if not kernel.is_compiled]
    count = f"{len(left)} of {len(kernels)} kernels are left ({', '.join(sorted(set(left)))})"
    text = f"compiling for the first use: {count}; {knobs.cache.dir} keeps them, so the next start is quick"
    logger.info(text)
    is_logged = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
    if is_logged or sys.stderr is None:
        return
    if sys.stderr.isatty() or env.LOG_LEVEL.get() in ("INFO", "DEBUG"):
        sys.stderr.write(f"ep_a2a: {text}\n")
