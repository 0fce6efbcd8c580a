"""Starts and calls ranks for a command: the choice of device, errors as a command shows them, stdout kept clean."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ep_a2a.commands.messages import log_level, set_up_logging
from ep_a2a.errors import StateError, UnsupportedError
from ep_a2a.testing.launch import RankFailure, RankPool
from ep_a2a.testing.worker import RankContext

RUN_TIMEOUT_SECS = 600.0
"""Seconds that one call may take on all ranks."""


def choose_device(asked: str) -> str:
    """Returns "cuda" where there are GPUs, or as asked; else "cpu". Ranks may exceed GPUs: they share them (RankPool).

    Raises:
        UnsupportedError: GPUs are asked for and there are none.
    """
    num_gpus = torch.cuda.device_count()
    if asked == "cuda" and num_gpus == 0:
        raise UnsupportedError("a GPU for --device cuda", "none that torch can use", "Use --device cpu.")
    return "cpu" if asked == "cpu" or num_gpus == 0 else "cuda"


def default_ranks(device: str, wanted: int) -> int:
    """Returns the ranks that a command starts unless it is told: `wanted`, of several GPUs one for each at most."""
    num_gpus = torch.cuda.device_count()
    return min(wanted, num_gpus) if device == "cuda" and num_gpus > 1 else wanted


@contextlib.contextmanager
def joined_pool(num_ranks: int, device: str) -> Iterator[RankPool]:
    """Starts processes for the ranks, and ends them at last; their logging goes to stderr, as does what they print.

    Raises:
        EpA2AError: as `call_ranks`.
    """
    with RankPool(num_ranks, device=device, timeout_secs=RUN_TIMEOUT_SECS) as pool:
        with stdout_to_stderr():
            call_ranks(pool, join, log_level())
        yield pool


def join(context: RankContext, level: str) -> None:
    """Sets up logging on every rank; the first call into a pool, so it waits for the processes to start."""
    set_up_logging(level)


def call_ranks(pool: RankPool, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs a function on all ranks, with errors as a command shows them.

    Raises:
        EpA2AError: the ranks met an expected error.
        StateError: anything else that went wrong on a rank; what the ranks said has gone to stderr.
    """
    try:
        return pool.run(function, *args)
    except RankFailure as failure:
        expected = failure.expected_error
        if expected is None:
            sys.stderr.write(f"{failure}\n")
            headline = str(failure).partition("\n")[0]
            raise StateError("every rank to finish", headline, "See what the ranks said, above.") from failure
        raise expected from failure


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Lets processes started meanwhile print to stderr: libraries may greet on stdout, which is the report's."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
