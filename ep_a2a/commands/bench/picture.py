"""Draws a sweep: round trips on GPUs, a functional check on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.commands import plots
from ep_a2a.commands.bench.contenders import NATIVE, REFERENCE_PUSH
from ep_a2a.commands.bench.report import FIELDS, constant_fields, has_effect, is_of_layers, shown_name, varying_fields
from ep_a2a.commands.bench.runner import Status, main_us
from ep_a2a.commands.plots import TIME_UNITS, Caption, Panel, unit_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Record = dict[str, Any]

X_LABELS = {"num_tokens": "tokens per rank", "max_sms": "bound on multiprocessors (CTAs)"}
CPU_READING = "CPU, Triton's interpreter: says nothing about speed"
MARKERS = "osD^vP*X"
PASSED = {Status.OK: True, Status.FAILED: False, Status.ERROR: False}


def plot_bench(records: Sequence[Record], path: Path, header: Record) -> tuple[Path, Path]:
    """Draws round trips, or layers; on CPU, or where nothing was timed, which contenders returned right results.

    Args:
        records: as report.compare makes them. path: *.png or *.svg.
        header: as `report.describe` makes it, of the machine that made the records.

    Raises:
        MissingPackageError, ConfigError: as ep_a2a.commands.plots.write.
    """
    if header["device"] == "cpu" or not any(record["status"] == Status.OK for record in records):
        return _plot_checks(records, path, header)
    return _plot_round_trips(records, path, header)


def _plot_checks(records: Sequence[Record], path: Path, header: Record) -> tuple[Path, Path]:
    x_field = choose_x(records)
    rows: dict[str, dict[str, bool | None]] = {}
    for record in sorted(records, key=lambda record: int(record[x_field])):
        row, column = rows.setdefault(label_of(record, records), {}), f"{record[x_field]:,}"
        results = PASSED.get(record["status"]), row.get(column)
        row[column] = next((each for each in (False, True) if each in results), None)
    checked = [row for row in rows.values() if any(each is not None for each in row.values())]
    good = sum(False not in row.values() for row in checked)
    found = f"{good} of {len(checked)} contenders are right" if checked else "nothing ran"
    reading = CPU_READING if header["device"] == "cpu" else "Nothing was timed"
    caption = Caption(f"Functional check: {found}", reading, _footer(records, x_field, header))
    return plots.write(path, plots.cells, rows, (X_LABELS[x_field], ""), caption)


def _plot_round_trips(records: Sequence[Record], path: Path, header: Record) -> tuple[Path, Path]:
    """A line per contender and other varying field, the reference push dashed, both axes logarithmic.

    The x axis is the tokens per rank, or max_sms where nothing else varies; no bound is drawn rightmost, as "all".
    """
    x_field, lines = choose_x(records), make_lines(records)
    values = sorted({int(record[x_field]) for record in records})
    # Only a bound can be 0, which means that there is none.
    places = {value: value or 2 * max(values) or 1 for value in values}
    ticks = {place: "all" if x_field == "max_sms" and not value else f"{value:,}" for value, place in places.items()}
    size, unit = unit_for(min(us for line in lines.values() for us in line.values()), TIME_UNITS)
    panel = Panel(X_LABELS[x_field], f"{_measured(records)} ({unit})", ticks, log_y=True)
    ours_first = sorted(lines, key=lambda label: (is_push(label), not label.startswith(NATIVE)))
    for number, label in enumerate(ours_first):
        style = (
            {"color": "gray", "linestyle": "--", "linewidth": 1.8}
            if is_push(label)
            else {"marker": MARKERS[number % len(MARKERS)]}
        )
        points = sorted((places[value], us / size) for value, us in lines[label].items())
        panel.lines.append((label, points, style))
    silent = dict.fromkeys(record["contender"] for record in records if label_of(record, records) not in lines)
    footer = _footer(records, x_field, header)
    if silent:
        footer += f"\nno times: {', '.join(silent)}"
    dashed = "; dashed: reference_push, of the same bytes" if any(map(is_push, lines)) else ""
    caption = Caption(_title(lines, _measured(records)), f"Both axes logarithmic, lower is better{dashed}", footer)
    return plots.write(path, plots.lines, [panel], caption)


def _measured(records: Sequence[Record]) -> str:
    return "layer" if is_of_layers(records) else "round trip"


def _title(lines: dict[str, dict[int, float]], measured: str) -> str:
    """Returns how the op compares with the reference push, where there is one line of each; else what is drawn."""
    pushes = [line for label, line in lines.items() if is_push(label)]
    if len(pushes) != 1 or NATIVE not in lines or lines[NATIVE].keys() - pushes[0].keys():
        return f"{measured.capitalize()} of dispatch and combine"
    ratios = [us / pushes[0][x] for x, us in lines[NATIVE].items()]
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"Round trip: {NATIVE} takes {least if least == most else f'{least} to {most}'} times the reference push"


def _footer(records: Sequence[Record], x_field: str, header: Record) -> str:
    """Parameters that all rows share, and what measured them."""
    shared = constant_fields(records) if records else "no rows"
    if x_field != "num_tokens":
        shared = f"T {records[0]['num_tokens']}, {shared}"
    gpus = header.get("gpus") or []
    hardware = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or header["device"]
    commit = f" ({header['commit']})" if header.get("commit") else ""
    note = f"\n{header['note']}" if header.get("note") else ""
    return f"{shared}\n{hardware} · ep_a2a {header.get('ep_a2a', '?')}{commit}, ep-a2a bench{note}"


def is_push(label: str) -> bool:
    """Whether a label of `make_lines` is of the reference push."""
    return label.split(",")[0] == REFERENCE_PUSH


def choose_x(records: Sequence[Record]) -> str:
    """Returns the field of the x axis: max_sms where nothing else varies, else num_tokens."""
    if len({record["num_tokens"] for record in records}) == 1 and varying_fields(records) == ["num_tokens", "max_sms"]:
        return "max_sms"
    return "num_tokens"


def label_of(record: Record, records: Sequence[Record]) -> str:
    """Returns the record's contender and what else varies between the records, apart from the x axis."""
    varying = [name for name in varying_fields(records) if name not in ("num_tokens", choose_x(records))]
    named = [name for name in varying if has_effect(record, name)]
    shown = shown_name(record["contender"], record.get("device", "cuda"))
    return ", ".join([shown, *(f"{FIELDS[name]} {record[name]}" for name in named)])


def make_lines(records: Sequence[Record]) -> dict[str, dict[int, float]]:
    """Returns, by label, microseconds by the field of the x axis: the least where several records are alike."""
    x_field = choose_x(records)
    lines: dict[str, dict[int, float]] = {}
    for record in sorted(records, key=lambda record: int(record[x_field])):
        if record["status"] == Status.OK:
            line = lines.setdefault(label_of(record, records), {})
            x = record[x_field]
            line[x] = min(line.get(x, float("inf")), main_us(record))
    return lines
