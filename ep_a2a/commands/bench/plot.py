"""Draws the round trip over tokens, or over bounds on multiprocessors, both axes logarithmic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.commands.bench.contenders import LIMIT
from ep_a2a.commands.bench.report import FIELDS, constant_fields, has_effect, varying_fields
from ep_a2a.commands.bench.rows import Status
from ep_a2a.commands.plotting import Panel, check_can_plot, plot_panels

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

X_LABELS = {"num_tokens": "tokens per rank", "max_sms": "bound on multiprocessors (CTAs)"}
LIMIT_STYLE = {"color": "black", "linestyle": "--"}


def plot_round_trips(records: Sequence[dict[str, Any]], path: Path, note: str = "") -> None:
    """Writes a picture: a line per contender (and per other thing that varies), the limit dashed.

    The x axis is the tokens per rank, or max_sms where that is all that varies; no bound is drawn rightmost, as "all".

    Args:
        records: as make_records makes them; those without times are left out.
        path: *.png or *.svg.
        note: a line below the title.

    Raises:
        MissingPackageError, ConfigError: as `check_can_plot`.
    """
    check_can_plot(path)
    x_field = choose_x(records)
    places = _places(records, x_field)
    ticks = {place: "all" if x_field == "max_sms" and not value else str(value) for value, place in places.items()}
    panel = Panel(X_LABELS[x_field], "round trip, µs", ticks, log_y=True)
    for label, points in make_lines(records).items():
        style = LIMIT_STYLE if label.split(",")[0] == LIMIT else {"marker": "o"}
        panel.lines.append((label, sorted((places[value], us) for value, us in points.items()), style))
    constant = constant_fields(records)
    if x_field != "num_tokens":
        constant = f"T {records[0]['num_tokens']}, {constant}"
    plot_panels([panel], "\n".join(filter(None, (constant, note))), path)


def choose_x(records: Sequence[dict[str, Any]]) -> str:
    """Returns the field of the x axis: max_sms where nothing else varies, else num_tokens."""
    if len({record["num_tokens"] for record in records}) == 1 and varying_fields(records) == ["num_tokens", "max_sms"]:
        return "max_sms"
    return "num_tokens"


def make_lines(records: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Returns microseconds by `choose_x`'s field by label: the best where a contender was timed several times alike."""
    x_field = choose_x(records)
    varying = [name for name in varying_fields(records) if name not in ("num_tokens", x_field)]
    lines: dict[str, dict[int, float]] = {}
    for record in sorted(records, key=lambda record: int(record[x_field])):
        if record["status"] == Status.OK:
            named = [name for name in varying if has_effect(record, name)]
            label = ", ".join([record["contender"], *(f"{FIELDS[name]} {record[name]}" for name in named)])
            line = lines.setdefault(label, {})
            x = record[x_field]
            line[x] = min(line.get(x, float("inf")), record["round_trip_us"])
    return lines


def _places(records: Sequence[dict[str, Any]], x_field: str) -> dict[int, int]:
    """Returns where each value lies on a logarithmic axis, in the order of the values."""
    values = sorted({int(record[x_field]) for record in records})
    # Only a bound can be 0, which means that there is none.
    return {value: value or 2 * max(values) for value in values}
