"""Runs the demo with a progress bar, and prints its report."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ep_a2a.commands.demo.launcher import NUM_PHASES, run_demo_ranks
from ep_a2a.commands.demo.report import make_report
from ep_a2a.commands.demo.view import show_report
from ep_a2a.commands.plotting import check_can_plot, plot_traffic

if TYPE_CHECKING:
    from pathlib import Path

    from ep_a2a.commands.demo.model import DemoText
    from ep_a2a.commands.demo.report import DemoReport
    from ep_a2a.commands.demo.settings import DemoSettings

EXIT_MISMATCH = 1


def execute(
    settings: DemoSettings,
    text: DemoText,
    *,
    ranks_asked_for: int,
    plot: Path | None = None,
    as_json: bool = False,
    corrupt_rank: int | None = None,
) -> int:
    """Runs the demo and prints its report.

    Args:
        settings: sizes and choices. text: settings.num_tokens tokens.
        ranks_asked_for: what the user wanted; settings.num_ranks is what the machine can do.
        plot: where to write the heat map.
        as_json: print the report as JSON.
        corrupt_rank: for tests: the rank that shall return a wrong row.

    Returns:
        The exit code.
    """
    if plot is not None:
        check_can_plot(plot)
    settings.check()
    report = _run(settings, text, ranks_asked_for, corrupt_rank, show_progress=not as_json)
    if plot is not None:
        plot_traffic(report.rows, f"{report.backend}, {sum(report.tokens_per_rank)} tokens, top-{report.topk}", plot)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json_object(), indent=2) + "\n")
    else:
        console = Console()
        show_report(console, report)
        if plot is not None:
            console.print(f"heat map: {plot}", markup=False)
    return 0 if report.matches else EXIT_MISMATCH


def _run(
    settings: DemoSettings, text: DemoText, ranks_asked_for: int, corrupt_rank: int | None, *, show_progress: bool
) -> DemoReport:
    # On stderr, whose ends the ranks share; shown only to somebody who watches both.
    console = Console(stderr=True)
    visible = show_progress and console.is_interactive and sys.stdout.isatty()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not visible) as progress:
        # One more than the ranks' phases: the comparison.
        bar = progress.add_task("", total=NUM_PHASES + 1)

        def on_phase(description: str) -> None:
            task = progress.tasks[bar]
            progress.update(bar, description=description, completed=task.completed + bool(task.description))

        results, seconds = run_demo_ranks(settings, text.tokens, on_phase, corrupt_rank)
        on_phase("comparing with the dense layer")
        return make_report(settings, text, ranks_asked_for, results, seconds)
