"""Starts the demo's ranks and runs them phase by phase, from the command's process."""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING

from ep_a2a.commands.demo.worker import PhaseSeconds, RankResult, close_rank, open_rank, run_step
from ep_a2a.commands.ranks import call_ranks, join, stdout_to_stderr
from ep_a2a.testing.launch import RankPool

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _typical(steps: list[list[PhaseSeconds]]) -> PhaseSeconds:
    def typical(phase: str) -> float:
        return statistics.median(max(float(getattr(seconds, phase)) for seconds in ranks) for ranks in steps)

    return PhaseSeconds(typical("dispatch"), typical("experts"), typical("combine"))
