"""Runs the demo's ranks and prints the report."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ep_a2a.commands import messages
from ep_a2a.commands.demo.picture import plot_traffic
from ep_a2a.commands.demo.report import make_report
from ep_a2a.commands.demo.view import show_report
from ep_a2a.commands.demo.worker import NUM_STEPS, run_rank
from ep_a2a.commands.files import give_json
from ep_a2a.commands.plots import check_can_plot
from ep_a2a.commands.ranks import call_ranks, joined_pool

if TYPE_CHECKING:
    from pathlib import Path

    from ep_a2a.commands.demo.model import DemoText
    from ep_a2a.commands.demo.settings import DemoSettings


def execute(
    settings: DemoSettings,
    text: DemoText,
    *,
    plot: Path | None = None,
    output: Path | None = None,
    as_json: bool = False,
    verbose: bool = False,
    corrupt_rank: int | None = None,
) -> int:
    """Runs the demo and prints its report.

    Args:
        settings: sizes and choices. text: settings.num_tokens tokens.
        plot: where to write the heat map. output: where to write the report as JSON.
        as_json: print the report as JSON.
        verbose: print details behind the verdict and the traffic.
        corrupt_rank: for tests: the rank that shall return a wrong row.

    Returns:
        The exit code.
    """
    if plot is not None:
        check_can_plot(plot)
    settings.check()
    # On stderr, whose ends the ranks share; shown only to somebody who watches both.
    progress = messages.notices()
    progress.quiet |= as_json or not (progress.is_interactive and sys.stdout.isatty())
    with progress.status(f"starting {settings.num_ranks} processes") as status:
        with joined_pool(settings.num_ranks, settings.device) as pool:
            status.update(f"{NUM_STEPS} steps of dispatch, experts, combine")
            results = call_ranks(pool, run_rank, settings, text.tokens, corrupt_rank)
        status.update("comparing with the dense layer")
        report = make_report(settings, text, pool.note, results)
    if plot is not None:
        plot_traffic(report, settings, plot)
    give_json(report, output, as_json=as_json)
    if not as_json:
        show_report(messages.output(), report, verbose=verbose)
    return messages.EXIT_OK if report["matches"] else messages.EXIT_MISMATCH
