"""Round trip over tokens, or over bounds on multiprocessors, both axes logarithmic.

matplotlib is optional and loaded here only."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.bench.contenders import LIMIT
from ep_a2a.commands.bench.report import FIELDS, constant_fields, has_effect, varying_fields
from ep_a2a.commands.bench.rows import Status
from ep_a2a.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SUFFIXES = (".png", ".svg")
DOTS_PER_INCH = 150
X_LABELS = {"num_tokens": "tokens per rank", "max_sms": "bound on multiprocessors (CTAs)"}


def check_can_plot(path: Path) -> None:
    """Raises, before any work is done, what would keep `plot_round_trips` from writing `path`.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: path ends in neither .png nor .svg, or its folder does not exist.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib, which draws pictures", "none", "pip install 'ep-a2a[plot]'")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a picture named *{' or *'.join(SUFFIXES)}", str(path), "Name it so.")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"a folder {path.resolve().parent} for the picture", "none", "Make it, or name another.")


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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    x_field = choose_x(records)
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel=X_LABELS[x_field], ylabel="round trip, µs")
    places = _places(records, x_field)
    for label, points in make_lines(records).items():
        is_limit = label.split(",")[0] == LIMIT
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if is_limit else {"marker": "o"}
        found = sorted((places[value], round_trip_us) for value, round_trip_us in points.items())
        axes.plot(*zip(*found), label=label, **style)
    names = ["all" if x_field == "max_sms" and not value else str(value) for value in places]
    axes.set_xticks(list(places.values()), names)
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    constant = constant_fields(records)
    if x_field != "num_tokens":
        constant = f"T {records[0]['num_tokens']}, {constant}"
    axes.set_title("\n".join(filter(None, (constant, note))), fontsize="small", wrap=True)
    if axes.has_data():
        axes.legend(fontsize="small")
    figure.savefig(path, format=path.suffix[1:], dpi=DOTS_PER_INCH)


def choose_x(records: Sequence[dict[str, Any]]) -> str:
    """The field of the x axis: max_sms where nothing else varies, else num_tokens."""
    if len({record["num_tokens"] for record in records}) == 1 and varying_fields(records) == ["num_tokens", "max_sms"]:
        return "max_sms"
    return "num_tokens"


def make_lines(records: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Microseconds by `choose_x`'s field, by label; where a contender was timed several times alike, its best."""
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
    """Where each value lies on a logarithmic axis, in the order of the values."""
    values = sorted({int(record[x_field]) for record in records})
    # Only a bound can be 0, which means that there is none.
    return {value: value or 2 * max(values) for value in values}
