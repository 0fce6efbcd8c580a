"""Round trip over tokens, both axes logarithmic. matplotlib is optional and loaded here only."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from ep_a2a.bench.contenders import LIMIT
from ep_a2a.bench.report import FIELDS, constant_fields, varying_fields
from ep_a2a.bench.rows import Status
from ep_a2a.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SUFFIXES = (".png", ".svg")
DOTS_PER_INCH = 150
WITHOUT_EFFECT_ON_LIMIT = ("layout", "max_sms", "max_num_tokens")


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
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="round trip, µs")
    for label, points in make_lines(records).items():
        is_limit = label.split(",")[0] == LIMIT
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if is_limit else {"marker": "o"}
        axes.plot(list(points), list(points.values()), label=label, **style)
    tokens = sorted({record["num_tokens"] for record in records})
    axes.set_xticks(tokens, [str(number) for number in tokens])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.set_title("\n".join(filter(None, (constant_fields(records), note))), fontsize="small", wrap=True)
    if axes.has_data():
        axes.legend(fontsize="small")
    figure.savefig(path, format=path.suffix[1:], dpi=DOTS_PER_INCH)


def make_lines(records: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Microseconds by tokens, by label; where a contender was timed several times alike, its best."""
    varying = [name for name in varying_fields(records) if name != "num_tokens"]
    lines: dict[str, dict[int, float]] = {}
    for record in sorted(records, key=lambda record: int(record["num_tokens"])):
        if record["status"] == Status.OK:
            named = [n for n in varying if record["contender"] != LIMIT or n not in WITHOUT_EFFECT_ON_LIMIT]
            label = ", ".join([record["contender"], *(f"{FIELDS[name]} {record[name]}" for name in named)])
            line = lines.setdefault(label, {})
            tokens = record["num_tokens"]
            line[tokens] = min(line.get(tokens, float("inf")), record["round_trip_us"])
    return lines
