"""Reports a sweep: its origin, rates and ratios, JSON lines and its table."""

import json
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.text import Text

import ep_a2a
from ep_a2a.commands.bench.contenders import IN_TURN, REFERENCE_PUSH
from ep_a2a.commands.bench.runner import Status
from ep_a2a.commands.files import write_bytes
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.commands.programs import command_output, package_version
from ep_a2a.commands.tables import new_table, print_wide

Record = dict[str, Any]

CPU_NOTE = "functional check: on CPU, in Triton's interpreter, times say nothing about GPUs"

FIELDS = tuple(field.name for field in fields(Workload))
"""Fields of a workload: a table has a column for each that varies."""
ROUND_TRIP = {
    "dispatch µs": "{dispatch_us:.1f}",
    "combine µs": "{combine_us:.1f}",
    "round trip µs": "{round_trip_us:.1f}",
    "cold µs": "{round_trip_cold_us:.1f}",
    "pair period µs": "{pair_period_us:.1f}",
    "p99 µs": "{round_trip_p99_us:.1f}",
    "host µs": "{dispatch_host_us:.1f}/{combine_host_us:.1f}",
    "GB/s": "{dispatch_gb_per_s:.3g}/{combine_gb_per_s:.3g}",
    "of push": "{round_trip_fraction_of_limit:.1%}",
}
"""Cells of a contender whose round trip was timed, by heading. A column is there where a record has its figures."""
LAYER = {
    "layer µs": "{layer_us:.1f}",
    "least µs": "{least_us:.1f}",
    "most µs": "{most_us:.1f}",
    "experts alone µs": "{experts_us:.1f}",
    "exposed µs": "{exposed_us:.1f}",
    "in series µs": "{exchange_us:.1f}",
    "exposed": "{exposed_share:.1%}",
}
"""The same of a layer."""
EXPLANATION = (
    "µs: median over runs, maximum over ranks; p99: of the slowest rank in each run. host µs: dispatch/combine. "
    "GB/s: dispatch/combine, counting one row per token and rank. of push: round trip of reference_push "
    "by this one's. cold: a single round trip behind a flush of the L2. pair period: of a dispatch and a combine in a "
    "long row of them, median over ranks."
)
CPU_EXPLANATION = "right: every rank's rows and sums are those of the reference. The JSON rows have the raw times."
LAYER_EXPLANATION = (
    "layer: gate to combine, median of the rounds; least and most of them. experts alone: the same gate and experts on "
    "rows that lie ready, with all multiprocessors. exposed: the rest of the layer's time, and its share of in series. "
    "in series: the exchanges alone at full speed, timed in the first round; of reference_push a push of the same "
    "bytes. Two micro-batches of T tokens each (docs/overlap.md): in_turn; unsplit, one batch of 2T; overlapped/N, "
    "exchanges on N multiprocessors (0: no bound) beside experts; shared, on the same multiprocessors."
)


def describe(device: str) -> Record:
    """Returns versions, machine, commit, command and time, for the first line of a report. Makes no CUDA context.

    Args:
        device: "cpu" or "cuda".
    """
    record: Record = {
        "record": "header",
        "ep_a2a": ep_a2a.__version__,
        "commit": commit(),
        "command": " ".join(["ep-a2a", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
    }
    if device == "cpu":
        return record | {"note": CPU_NOTE, "cpu": platform.processor() or platform.machine()}
    gpus = command_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return record | {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "driver": ", ".join(sorted({line.rpartition(", ")[2] for line in gpus})),
        "gpus": [line.rpartition(", ")[0] for line in gpus],
    }


def commit() -> str | None:
    """Returns the commit of this package's checkout, "-dirty" with changes on top; None where there is none."""
    root = Path(ep_a2a.__file__).resolve().parents[1]
    # an installed package may lie inside the checkout of another project
    if not (root / ".git").exists():
        return None
    describe_commit = ("describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")
    return command_output("git", "-C", str(root), *describe_commit).strip() or None


def compare(records: Sequence[Record]) -> list[Record]:
    """Returns the records of one workload with what follows from their times. What was not measured is absent.

    Of round trips, not on CPU, where ratios would say nothing about GPUs:

    dispatch_gb_per_s, ...: bytes that the busiest rank must send or receive, by time, in 1e9 bytes per second, even if
        the contender sent more. One row per token and rank.
    dispatch_fraction_of_limit, ...: the reference push's time by this one's.

    Of layers `exposed_us`, which is what they take beyond their gates and experts, and `exposed_share`, by their
    exchanges alone; overlapped ones take both from those in turn.
    """
    by_name = {each["contender"]: each for each in records}
    series, push = by_name.get(IN_TURN, {}), by_name.get(REFERENCE_PUSH, {})
    alone = {name: series[name] for name in ("experts_us", "exchange_us") if name in series}
    return [_exposed(alone | each) if "layer_us" in each else each | _rates(each, push) for each in records]


def _exposed(record: Record) -> Record:
    """Returns a layer's record with what it takes beyond its experts, where that is known."""
    if not {"experts_us", "exchange_us"} <= record.keys():
        return record
    exposed_us = record["layer_us"] - record["experts_us"]
    return record | {"exposed_us": exposed_us, "exposed_share": exposed_us / record["exchange_us"]}


def _rates(record: Record, push: Record) -> Record:
    """Returns what follows from a record's times and those of the reference push."""
    found: Record = {}
    for phase in ("dispatch", "combine", "round_trip"):
        us = record.get(f"{phase}_us")
        if us is None or record["device"] == "cpu":
            continue
        moved = record.get(f"{phase}_bytes", record["dispatch_bytes"] + record["combine_bytes"])
        # bytes per microsecond are megabytes per second
        found[f"{phase}_gb_per_s"] = moved / us / 1e3
        if f"{phase}_us" in push:
            found[f"{phase}_fraction_of_limit"] = push[f"{phase}_us"] / us
    return found


def write_lines(path: Path, header: Record, records: Iterable[Record]) -> None:
    """Writes JSON lines: the header, then the records. Whole at any time, so that an end of the process keeps rows."""
    text = "".join(json.dumps(each) + "\n" for each in (header, *records))
    write_bytes(path, text.encode(), confirms=False)


def varying_fields(records: Sequence[Record]) -> list[str]:
    """Returns the fields of the workload that differ between records, and tokens."""
    return [name for name in FIELDS if name == "tokens" or len({each[name] for each in records}) > 1]


def constant_fields(records: Sequence[Record]) -> str:
    """Returns the fields that all records have in common, as text; those that are 0 stand for no bound, or none."""
    constant = {name: records[0][name] for name in FIELDS if name not in varying_fields(records)}
    return ", ".join(f"{name} {value}" for name, value in constant.items() if value)


def make_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Returns headings and cells.

    The columns behind the contender are times, bandwidth and fraction of the reference push; on CPU whether round trips
    are right. Contenders that were not available are left out; `reasons` has them.
    """
    shown = [record for record in records if record["status"] != Status.UNAVAILABLE]
    names = [*varying_fields(records), "contender"]
    cells = {heading: [_cell(form, record) for record in shown] for heading, form in _times(shown).items()}
    headings = [heading for heading, column in cells.items() if any(column)] or list(cells)[:1]
    rows = []
    for number, record in enumerate(shown):
        times = [cells[heading][number] for heading in headings]
        if record["status"] != Status.OK:
            times[:1] = [record["status"].upper()]
        rows.append([*(str(record[name]) for name in names), *times])
    return [*names, *headings], rows


def _times(shown: Sequence[Record]) -> dict[str, str]:
    """Returns the form of a record that was timed, by heading."""
    if is_functional_check(shown):
        return {"result": "right"}
    return LAYER if is_of_layers(shown) else ROUND_TRIP


def _cell(form: str, record: Record) -> str:
    """Returns a record's figures in this form; "" where it lacks one."""
    try:
        return form.format_map(record)
    except (KeyError, TypeError):
        return ""


def is_functional_check(records: Iterable[Record]) -> bool:
    """Returns whether the records are from CPU, where their times say nothing."""
    return any(record["device"] == "cpu" for record in records)


def is_of_layers(records: Iterable[Record]) -> bool:
    """Returns whether the records are of whole layers."""
    return any(record["intermediate"] for record in records)


def reasons(records: Iterable[Record]) -> list[str]:
    """Returns why contenders have no times, each reason once."""
    found: dict[tuple[str, str, str], dict[int, None]] = {}
    for record in records:
        if record["status"] != Status.OK:
            key = record["contender"], record["status"], record["reason"]
            found.setdefault(key, {})[record["tokens"]] = None
    return [
        f"{contender} {status} (T = {', '.join(map(str, tokens))}): {reason}"
        for (contender, status, reason), tokens in found.items()
    ]


def show(console: Console, header: Record, records: Sequence[Record]) -> None:
    """Prints the table, the common fields, and why contenders are missing; on CPU the verdict first."""
    explanation = LAYER_EXPLANATION if is_of_layers(records) else EXPLANATION
    if is_functional_check(records):
        console.print(_verdict(records), header["note"], sep="\n", highlight=False)
        explanation = CPU_EXPLANATION
    console.print(constant_fields(records), markup=False, highlight=False)
    headings, rows = make_table(records)
    # a line for each word of a heading
    columns = [heading.replace(" ", "\n") for heading in headings]
    table = new_table("", columns, right=set(columns) - {"contender"})
    table.box = box.SIMPLE_HEAD
    for row in rows:
        table.add_row(*row)
    print_wide(console, table)
    for text in [*reasons(records), explanation]:
        console.print(text, markup=False, highlight=False)


def _verdict(records: Sequence[Record]) -> Text:
    """Says in one sentence how many results are right."""
    checked = [record["status"] for record in records if record["status"] != Status.UNAVAILABLE]
    wrong = sum(status != Status.OK for status in checked)
    text = f"{len(checked)} results on {max(record['ranks'] for record in records)} CPU processes"
    if wrong:
        return Text(f"Wrong: {wrong} of {text}; see below.", style="bold red")
    return Text(f"Right: {len(checked)} of {text}.", style="bold green")
