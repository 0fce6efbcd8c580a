"""Finds the multiprocessors that an exchange should have beside the experts of another micro-batch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ep_a2a.commands import messages
from ep_a2a.commands.bench.contenders import MICRO_BATCHES, micro_batch_names
from ep_a2a.commands.bench.report import compare, reasons
from ep_a2a.commands.bench.runner import Runner, Status, main_us, run_sweep
from ep_a2a.commands.progress import Progress
from ep_a2a.commands.tables import new_table
from ep_a2a.commands.tune import LEAST_GAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ep_a2a.commands.measure.timing import TimingSettings
    from ep_a2a.commands.measure.workload import Workload

    Record = dict[str, Any]

COLUMNS: dict[str, Callable[[Record], str]] = {
    "tokens": lambda found: str(found["num_tokens"]),
    "multiprocessors": lambda found: "shared" if found["shares_sm"] else str(found["num_sms"] or "all"),
    "beside µs": lambda found: f"{found['layer_us']:.1f}",
    "exposed": lambda found: f"{found['exposed_share']:.1%}",
    "in turn µs": lambda found: f"{found['in_turn_us']:.1f}",
    "one batch µs": lambda found: f"{found['unsplit_us']:.1f}",
    "advice": lambda found: "split" if found["split"] else "do not split",
}


def execute(
    points: Sequence[Workload], num_sms: Sequence[int], settings: TimingSettings, *, as_json: bool = False
) -> bool:
    """Measures layers of two micro-batches and prints the best number for each size.

    Args:
        points: layers, of one micro-batch each.
        num_sms: numbers to try; 0 = no bound.
        settings: how a layer is timed.

    Returns:
        Whether every size could be measured.
    """
    names, results = micro_batch_names(num_sms), []
    with (
        contextlib.closing(Runner("cuda")) as runner,
        Progress("tuning", len(points) * len(names), messages.notices()) as progress,
    ):

        def show_progress(record: Record) -> None:
            time = f"{main_us(record):.1f} µs" if record["status"] == Status.OK else record["status"]
            progress.end(f"{record['num_tokens']} tokens, {record['contender']}: {time}")

        for records in run_sweep(points, names, settings, runner, show_progress):
            found = best_of(compare(records))
            results += [found] if found else []
            for reason in reasons(records):
                messages.note(reason)
    if as_json:
        messages.print_json({"results": results})
    elif results:
        table = new_table("two micro-batches, µs a layer of both", COLUMNS, right=COLUMNS)
        for found in results:
            table.add_row(*(cell(found) for cell in COLUMNS.values()))
        messages.output().print(table)
    return len(results) == len(points)


def best_of(records: Sequence[Record]) -> Record | None:
    """Returns the fastest number of multiprocessors for one size, beside the layers in turn and of one batch.

    Args:
        records: of one size, as `report.compare` makes them.

    Returns:
        num_tokens, num_sms, shares_sm, layer_us, exposed_share, in_turn_us, unsplit_us, and whether it pays to split;
        None where something could not be timed.
    """
    timed = {record["contender"]: record for record in records if record["status"] == Status.OK}
    in_turn, unsplit, beside, shared = MICRO_BATCHES
    tried = [record for name, record in timed.items() if name.startswith((beside, shared))]
    if not tried or not {in_turn, unsplit} <= timed.keys():
        return None
    best = min(tried, key=main_us)
    in_turn_us, unsplit_us = main_us(timed[in_turn]), main_us(timed[unsplit])
    return {
        "num_tokens": best["num_tokens"],
        "num_sms": int(best["contender"].partition("/")[2] or 0),
        "shares_sm": best["contender"] == shared,
        "layer_us": best["layer_us"],
        "exposed_share": best["exposed_share"],
        "in_turn_us": in_turn_us,
        "unsplit_us": unsplit_us,
        "split": best["layer_us"] < (1 - LEAST_GAIN) * min(in_turn_us, unsplit_us),
    }
