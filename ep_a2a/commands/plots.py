"""Draws the pictures of all commands by matplotlib: lines, cells, bars over time.

matplotlib is optional; check_can_plot says whether it is there.
"""

from __future__ import annotations

import importlib
import io
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.files import check_can_write, write_bytes
from ep_a2a.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
TIME_UNITS = ((1e-3, "ns"), (1.0, "µs"), (1e3, "ms"), (1e6, "s"))
MOST_RANKS_WITH_TEXT = 16
"""Ranks of a heat map whose cells have their values in words."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of lines and bars, in this order: blue, vermilion, green, purple, orange, sky."""
FAINT = "#5b6676"
STYLE = {
    "axes.prop_cycle": f"cycler('color', {list(COLOURS)})",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "figure.dpi": 150,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    # text stays text: small files, and words that can be searched; the salt makes equal pictures equal files
    "svg.fonttype": "none",
    "svg.hashsalt": "ep_a2a",
}
"""matplotlib's rcParams."""


@dataclass(frozen=True)
class Caption:
    """The words around a picture: its title says what is seen, its subtitle how to read it, its footer parameters."""

    title: str
    subtitle: str = ""
    footer: str = ""


def check_can_plot(path: Path) -> None:
    """Checks, before any work, that a picture can be written to `path`.

    Raises:
        MissingPackageError: matplotlib is not installed, or cannot be imported.
        ConfigError: path ends in neither .png nor .svg, or cannot be written.
    """
    try:
        importlib.import_module("matplotlib.figure")
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise MissingPackageError("matplotlib, which draws pictures", found, "pip install matplotlib") from error
    if path.suffix not in SUFFIXES:
        remedy = f"Name a file that ends in {' or '.join(SUFFIXES)}."
        raise ConfigError(f"a picture named *{' or *'.join(SUFFIXES)}", str(path), remedy)
    check_can_write(path)


def write(path: Path, draw: Callable[..., Figure], *args: Any) -> None:
    """Writes a picture.

    Args:
        path: *.png or *.svg. draw, args: lines, cells or bars of this module, and their arguments.

    Raises:
        MissingPackageError, ConfigError: as `check_can_plot`, or the file could not be written.
    """
    check_can_plot(path)
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        buffer = io.BytesIO()
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        draw(*args).savefig(buffer, format=path.suffix[1:], metadata=metadata)
    write_bytes(path, buffer.getvalue())


def unit_for(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Returns the last of the units (size, name), ascending, that is not above `largest`, or the first."""
    return next((each for each in reversed(units) if each[0] <= largest), units[0])


def lines(
    named: Sequence[tuple[str, Sequence[tuple[float, float]], dict[str, Any]]],
    x_label: str,
    y_label: str,
    ticks: Mapping[int, str],
    caption: Caption,
) -> Figure:
    """Returns a diagram with logarithmic axes, with the names of its lines on the right, by their ends.

    Args:
        named: (name, points (x, y), style of matplotlib's plot) of each line.
        ticks: text by place on the x axis.
    """
    from matplotlib.ticker import LogLocator

    figure = framed_figure(caption, 9.0, max(4.5, 0.22 * len(named)))
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
    handles = {}
    for name, points, style in named:
        marker = {"marker": "D" if len(points) == 1 else ""}
        handles[name] = axes.plot(*zip(*points), label=name, **marker | style)[0]
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.minorticks_off()
    axes.grid(visible=True)
    by_end = sorted(named, key=lambda line: -line[1][-1][1])
    axes.legend(
        handles=[handles[name] for name, *_ in by_end], loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0
    )
    return figure


def cells(values: Sequence[Sequence[float]], caption: Caption, unit: str) -> Figure:
    """Returns a heat map of numbers that are not negative, from each rank (down) to each (across)."""
    import numpy as np

    num_ranks = len(values)
    step, inches = (1, 0.55) if num_ranks <= MOST_RANKS_WITH_TEXT else (8, 0.15)
    figure = framed_figure(caption, max(7.0, inches * num_ranks + 3.5), max(2.0, inches * num_ranks + 0.8))
    axes = figure.add_subplot(xlabel="to rank", ylabel="from rank")
    found = np.array(values, float)
    most = found.max(initial=0) or 1
    image = axes.imshow(found, cmap="Blues", vmin=0, vmax=most, aspect="auto")
    for (y, x), value in np.ndenumerate(found) if step == 1 else ():
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        axes.text(x, y, text, ha="center", va="center", color="black" if value < most / 2 else "white")
    axes.set(xticks=range(0, num_ranks, step), yticks=range(0, num_ranks, step))
    figure.colorbar(image, label=unit, ax=axes)
    return figure


def bars(
    rows: Sequence[tuple[str, str, int | None, Sequence[tuple[float, float]]]], x_label: str, caption: Caption
) -> Figure:
    """Returns bars that may overlap, a row below the other.

    Args:
        rows: (group, name, number of the colour or None for grey, (start, length) of each bar). A row with a group
            starts it; the others have "".
    """
    figure = framed_figure(caption, 11.0, max(1.5, 0.24 * len(rows) + 0.6))
    axes = figure.add_subplot(xlabel=x_label)
    for place, (group, _, number, spans) in enumerate(rows):
        if group and place:
            axes.axhline(place - 0.5, color=FAINT, linewidth=0.8)
        colour = FAINT if number is None else COLOURS[number]
        axes.broken_barh(spans, (place - 0.4, 0.8), alpha=0.45, color=colour, linewidth=0)
    axes.set_yticks(range(len(rows)), [f"{group}   {name}".strip() for group, name, _, _ in rows])
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(visible=True, axis="x")
    return figure


def framed_figure(caption: Caption, width: float, body_height: float) -> Figure:
    """Returns a figure, sizes in inches, with its title above, and how to read it and its parameters below the axes."""
    from matplotlib.figure import Figure

    title = textwrap.fill(caption.title, int(6 * width))
    foot = [
        textwrap.fill(part, int(10 * width)) for part in f"{caption.subtitle}\n{caption.footer}".strip().splitlines()
    ]
    num_lines = 2 * title.count("\n") + "\n".join(foot).count("\n") + 3
    figure = Figure(figsize=(width, body_height + 0.2 * num_lines), layout="constrained")
    figure.suptitle(title, x=0.02, ha="left", size=15, weight="bold")
    figure.supxlabel("\n".join(foot), x=0.02, ha="left", size=9, color=FAINT)
    return figure
