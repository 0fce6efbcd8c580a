"""Draws the round trips, or layers, of a sweep on GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ep_a2a.commands import plots
from ep_a2a.commands.bench.contenders import NATIVE, REFERENCE_PUSH
from ep_a2a.commands.bench.report import constant_fields, is_of_layers, varying_fields
from ep_a2a.commands.bench.runner import Status, main_us

Record = dict[str, Any]

X_LABELS = {"tokens": "tokens per rank", "max_sms": "bound on multiprocessors (CTAs)"}
READING = "Both axes logarithmic, lower is better; dashed: the reference push, of the same bytes"
MARKERS = "osD^vP*X"


def plot_bench(records: Sequence[Record], path: Path, header: Record) -> None:
    """Draws a line per contender and other varying field over the tokens per rank; nothing where nothing was timed.

    Where only max_sms varies it is the x axis, and no bound is drawn rightmost, as "all".

    Args:
        records: as report.compare makes them. path: *.png or *.svg.
        header: as `report.describe` makes it, of the machine that made the records.

    Raises:
        MissingPackageError, ConfigError: as ep_a2a.commands.plots.write.
    """
    x_field, lines = choose_x(records), make_lines(records)
    if not lines:
        return
    values = sorted({x for line in lines.values() for x in line})
    # only a bound can be 0, which means that there is none
    places = {value: value or 2 * max(values) or 1 for value in values}
    ticks = {place: f"{value:,}" if value else "all" for value, place in places.items()}
    size, unit = plots.unit_for(min(us for line in lines.values() for us in line.values()), plots.TIME_UNITS)
    drawn = []
    for number, label in enumerate(sorted(lines, key=lambda label: not label.startswith(NATIVE))):
        style = {"marker": MARKERS[number % len(MARKERS)]}
        if label.startswith(REFERENCE_PUSH):
            style = {"color": "gray", "linestyle": "--"}
        drawn.append((label, sorted((places[x], us / size) for x, us in lines[label].items()), style))
    measured = "layer" if is_of_layers(records) else "round trip"
    gpus = header.get("gpus") or []
    hardware = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    tokens = f"tokens {records[0]['tokens']}, " if x_field == "max_sms" else ""
    footer = (
        f"{tokens}{constant_fields(records)}\n{hardware} · ep_a2a {header.get('ep_a2a')} ({header.get('commit')}), "
        f"ep-a2a bench\n{header.get('note') or ''}"
    )
    caption = plots.Caption(f"{measured.capitalize()} of dispatch and combine", READING, footer)
    plots.write(path, plots.lines, drawn, X_LABELS[x_field], f"{measured} ({unit})", ticks, caption)


def choose_x(records: Sequence[Record]) -> str:
    """Returns the field of the x axis: max_sms where nothing else varies, else tokens."""
    only_bounds = varying_fields(records) == ["tokens", "max_sms"] and len({each["tokens"] for each in records}) == 1
    return "max_sms" if only_bounds else "tokens"


def make_lines(records: Sequence[Record]) -> dict[str, dict[int, float]]:
    """Returns, by label, microseconds by the field of the x axis: the least where several records are alike.

    A label has the contender and what else varies between the records.
    """
    x_field = choose_x(records)
    varying = [name for name in varying_fields(records) if name not in ("tokens", x_field)]
    lines: dict[str, dict[int, float]] = {}
    for record in sorted(records, key=lambda record: int(record[x_field])):
        if record["status"] == Status.OK:
            label = ", ".join([record["contender"], *(f"{name} {record[name]}" for name in varying)])
            line = lines.setdefault(label, {})
            line[record[x_field]] = min(line.get(record[x_field], float("inf")), main_us(record))
    return lines
