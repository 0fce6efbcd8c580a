"""Runs a search for several sizes, shows how far it is, and prints what it has found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands import messages
from ep_a2a.commands.progress import Progress
from ep_a2a.commands.tune.report import show
from ep_a2a.commands.tune.search import tune

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ep_a2a.commands.measure.timing import TimingSettings
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.commands.tune.search import Outcome


def execute(
    points: Sequence[Workload],
    settings: TimingSettings,
    budget_secs: float,
    folder: Path,
    *,
    as_json: bool = False,
    note: str = "",
) -> bool:
    """Searches for each workload, writes tables into the folder and prints the outcomes.

    note: sharing_note of the ranks, for JSON.

    Returns:
        Whether every size could be measured.

    Raises:
        UnsupportedError: there is no GPU.
    """
    outcomes: list[Outcome] = []
    sizes = [f"{point.max_num_tokens} tokens, {budget_secs:g} s at most" for point in points]
    with Progress("tuning", len(points), messages.notices()) as progress:
        progress.begin(sizes[0])
        for number, result in enumerate(tune(points, settings, budget_secs, folder), 1):
            if isinstance(result, str):
                progress.end(result, "red")
            else:
                outcomes.append(result)
                times = f"{result.default_us:.1f} -> {result.best_us:.1f} µs"
                progress.end(f"{result.workload.max_num_tokens} tokens: {times}")
            if number < len(points):
                progress.begin(sizes[number])
    if as_json:
        messages.print_json(
            {"folder": str(folder), "note": note, "results": [each.as_json_object() for each in outcomes]}
        )
    elif outcomes:
        show(outcomes)
    if outcomes:
        messages.note(f"tables: {folder}")
    return len(outcomes) == len(points)
