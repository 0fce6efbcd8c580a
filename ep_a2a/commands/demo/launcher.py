"""Drives the demo's ranks from the command's process: starts them, lets them run, tells errors from bugs."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.demo.worker import PhaseSeconds, RankResult, close_rank, join, open_rank, run_step
from ep_a2a.errors import EpA2AError, RankTimeoutError, StateError
from ep_a2a.testing.launch import RankFailure, RankPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ep_a2a.commands.demo.settings import DemoSettings

NUM_STEPS = 4
"""The first one warms up and is not timed."""
NUM_PHASES = NUM_STEPS + 3
"""Calls of `on_phase` in a run."""
RUN_TIMEOUT_SECS = 600.0


def run_demo_ranks(
    settings: DemoSettings,
    text_tokens: tuple[str, ...],
    on_phase: Callable[[str], None],
    corrupt_rank: int | None = None,
) -> tuple[list[RankResult], PhaseSeconds]:
    """Runs the layer on `settings.num_ranks` processes.

    Args:
        settings: sizes and choices.
        text_tokens: tokens of all ranks, in order.
        on_phase: called with a description before each of NUM_PHASES phases.
        corrupt_rank: rank that shall return one wrong row, to test that the comparison finds it.

    Returns:
        Each rank's result, and the seconds of each phase: of its slowest rank, the median over the timed steps.

    Raises:
        EpA2AError: the ranks met an expected error.
        StateError: anything else that went wrong on a rank.
    """
    with RankPool(settings.num_ranks, device=settings.device, timeout_secs=RUN_TIMEOUT_SECS) as pool:
        call = functools.partial(call_ranks, pool)
        on_phase(f"starting {settings.num_ranks} processes")
        with stdout_to_stderr():
            call(join)
        on_phase("making the EP group and the op")
        call(open_rank, settings, text_tokens)
        steps = []
        for number in range(NUM_STEPS):
            on_phase(f"step {number + 1} of {NUM_STEPS}: dispatch, experts, combine")
            steps.append(call(run_step, corrupt_rank))
        on_phase("collecting results")
        return call(close_rank), _typical(steps[1:])


def call_ranks(pool: RankPool, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`pool.run`, with errors as a command shows them.

    Raises:
        EpA2AError: the ranks met an expected error.
        StateError: anything else that went wrong on a rank; what the ranks said has gone to stderr.
    """
    try:
        return pool.run(function, *args)
    except RankFailure as failure:
        expected = _expected_error(failure)
        if expected is None:
            sys.stderr.write(f"{failure}\n")
            headline = str(failure).partition("\n")[0]
            raise StateError("every rank to finish", headline, "See what the ranks said, above.") from failure
        raise expected from failure


def _typical(steps: list[list[PhaseSeconds]]) -> PhaseSeconds:
    def typical(phase: str) -> float:
        return statistics.median(max(float(getattr(seconds, phase)) for seconds in ranks) for ranks in steps)

    return PhaseSeconds(typical("dispatch"), typical("experts"), typical("combine"))


def _expected_error(failure: RankFailure) -> EpA2AError | None:
    """The error to show for ranks that all failed for a reason this package knows."""
    errors = list(failure.errors.values())
    known = [error for error in errors if isinstance(error, EpA2AError)]
    if len(known) != len(failure.tracebacks) - len(failure.unfinished) or not known:
        return None
    # Who waits in vain for a rank that has failed is not the cause.
    return next((error for error in known if not isinstance(error, RankTimeoutError)), known[0])


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Processes started meanwhile print to stderr: libraries may greet on stdout, which belongs to the report."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
