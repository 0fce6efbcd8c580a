"""Runs a search for several sizes, shows how far it is, and prints what it has found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import ep_a2a
from ep_a2a import env
from ep_a2a.commands import messages
from ep_a2a.commands.progress import Progress
from ep_a2a.commands.tables import new_table
from ep_a2a.commands.tune.search import tune
from ep_a2a.errors import ConfigError
from ep_a2a.tuning import tables
from ep_a2a.tuning.parse import LAUNCH_FIELDS, PROGRAM_FIELDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.commands.measure.timing import TimingSettings
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.commands.tune.search import Outcome
    from ep_a2a.tuning.tables import TunedLaunch


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


def default_output(note: str = "") -> Path:
    """Returns the folder for tables: EP_A2A_TUNING_DIR, else configs/ of the checkout.

    Args:
        note: sharing_note of the ranks; "" where each has a GPU of its own.

    Raises:
        ConfigError: neither is there, or ranks share GPUs.
    """
    if note:
        raise ConfigError(
            "--output DIR where ranks share GPUs",
            note,
            "Say --output with a folder of its own: ranks with a GPU each take their launches from the usual tables.",
        )
    own = env.TUNING_DIR.get()
    if own and own != tables.NO_TABLES:
        return Path(own)
    shipped = tables.shipped_directory()
    # Installed files belong to the package manager.
    if shipped.parent == Path(ep_a2a.__file__).resolve().parent or not shipped.is_dir():
        raise ConfigError("a folder for the tables", "none", f"Say --output DIR, and set {env.TUNING_DIR.name} to it.")
    return shipped


def show(outcomes: Sequence[Outcome]) -> None:
    """Prints analytic and best launches and their times."""
    numbers = ("analytic µs", "best µs", "saved", "trials")
    table = new_table("round trips, µs", ("max tokens", "phase", "analytic", "best", *numbers), right=numbers)
    for outcome in outcomes:
        saved = f"{1 - outcome.best_us / outcome.default_us:.1%}"
        trials = f"{outcome.num_trials}{'' if outcome.is_complete else ', out of time'}"
        times = (f"{outcome.default_us:.1f}", f"{outcome.best_us:.1f}", saved, trials)
        for number, phase in enumerate(outcome.default):
            first = number == 0
            cells = (_text(outcome.default[phase], phase), _text(outcome.best[phase], phase))
            size = str(outcome.workload.max_num_tokens) if first else ""
            table.add_row(size, phase, *cells, *(times if first else ("",) * len(times)))
    messages.output().print(table)


def _text(launch: TunedLaunch, phase: str) -> str:
    """Its numbers; "each" for one program for each unit of work."""
    parts = []
    for name in LAUNCH_FIELDS[phase]:
        number = getattr(launch, name)
        parts.append(f"{name.removeprefix('num_')} {'each' if name in PROGRAM_FIELDS and number == 0 else number}")
    return " ".join(parts)
