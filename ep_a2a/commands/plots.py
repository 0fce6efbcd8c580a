"""Draws the pictures of all commands by matplotlib, each for light and for dark pages: lines, cells, bars over time.

matplotlib is optional; check_can_plot says whether it is there.
"""

from __future__ import annotations

import importlib
import io
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.files import check_can_write, write_bytes
from ep_a2a.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
TIME_UNITS = ((1e-3, "ns"), (1.0, "µs"), (1e3, "ms"), (1e6, "s"))
BYTE_UNITS = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"))
MOST_RANKS_WITH_TEXT = 16
"""Ranks of a heat map whose cells have their values in words."""

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
YELLOW = "#F0E442"
DISPATCH, EXPERTS, COMBINE = range(3)
"""Places in `Theme.colours` of what has the same colour in all pictures."""


@dataclass(frozen=True)
class Theme:
    """Colours for one page background.

    Attributes:
        name: "light" or "dark".
        page: background. lane: areas on it. text, faint: of words, and of axes and remarks.
        colours: of lines and bars, in this order. on_colour: text on a bright area of them.
        ramp: matplotlib's name of the colours of a heat map.
    """

    name: str
    page: str
    lane: str
    text: str
    faint: str
    colours: tuple[str, ...]
    on_colour: str
    ramp: str


LIGHT_COLOURS, DARK_COLOURS = (
    (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY),
    (SKY, ORANGE, GREEN, PURPLE, VERMILION, YELLOW),
)
LIGHT = Theme("light", "#ffffff", "#f3f5f8", "#1b2430", "#5b6676", LIGHT_COLOURS, "#ffffff", "Blues")
DARK = Theme("dark", "#0d1117", "#1a212b", "#e6edf3", "#98a4b3", DARK_COLOURS, "#0d1117", "Blues_r")
THEMES = (LIGHT, DARK)


@dataclass(frozen=True)
class Caption:
    """The words around a picture: its title says what is seen, its subtitle how to read it, its footer parameters."""

    title: str
    subtitle: str = ""
    footer: str = ""


@dataclass
class Panel:
    """One diagram; its x axis is logarithmic.

    Attributes:
        x_label, y_label: of the axes.
        ticks: text by place on the x axis.
        log_y: whether the y axis is logarithmic; else it starts at 0.
        lines: (name, points (x, y), style of matplotlib's plot) of each line.
    """

    x_label: str
    y_label: str
    ticks: Mapping[int, str]
    log_y: bool = False
    lines: list[tuple[str, Sequence[tuple[float, float]], dict[str, Any]]] = field(default_factory=list)


def dark_variant(path: Path) -> Path:
    """The file beside a picture with the same picture for dark pages: NAME.dark.png of NAME.png."""
    return path.with_name(f"{path.stem}.dark{path.suffix}")


def check_can_plot(path: Path) -> None:
    """Checks, before any work, that a picture can be written to `path`, with its dark variant.

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
    for each in (path, dark_variant(path)):
        check_can_write(each)


def write(path: Path, draw: Callable[..., Figure], *args: Any) -> tuple[Path, Path]:
    """Writes a picture for light pages to `path`, and for dark ones beside it; returns both files.

    Args:
        path: *.png or *.svg. draw, args: lines, cells or bars of this module, and their arguments after the theme.

    Raises:
        MissingPackageError, ConfigError: as `check_can_plot`, or a file could not be written.
    """
    check_can_plot(path)
    import matplotlib as mpl

    paths, contents = (path, dark_variant(path)), []
    for theme in THEMES:
        with mpl.rc_context(style_of(theme)):
            buffer = io.BytesIO()
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            draw(theme, *args).savefig(buffer, format=path.suffix[1:], metadata=metadata)
            contents.append(buffer.getvalue())
    for each, content in zip(paths, contents):
        write_bytes(each, content)
    return paths


def unit_for(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Returns the last of the units (size, name), ascending, that is not above `largest`, or the first."""
    return next((each for each in reversed(units) if each[0] <= largest), units[0])


def style_of(theme: Theme) -> dict[str, Any]:
    """Returns matplotlib's rcParams for a theme."""
    colours = {"figure.facecolor": theme.page, "axes.facecolor": theme.page}
    colours |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), theme.text)
    colours |= dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), theme.faint)
    return colours | {
        "axes.prop_cycle": f"cycler('color', {list(theme.colours)})",
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


def lines(
    theme: Theme, panels: Sequence[Panel], caption: Caption, key: Sequence[tuple[str, dict[str, Any]]] = ()
) -> Figure:
    """Returns diagrams side by side, with the names of their lines on the right.

    Args:
        key: (name, style of matplotlib's plot) of each entry; () names the lines of the last panel, by their ends.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator

    num_names = len(key) or len(panels[-1].lines)
    figure = framed_figure(caption, theme, 5.0 * len(panels) + 4.0, max(4.5, 0.22 * num_names))
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, axes in zip(panels, all_axes):
        axes.set(xscale="log", xlabel=panel.x_label, ylabel=panel.y_label)
        for name, points, style in panel.lines:
            axes.plot(*zip(*points), label=name, **{"marker": "D" if len(points) == 1 else ""} | style)
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axes.grid(visible=True)
        if panel.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            axes.yaxis.set_major_formatter("{x:,.10g}")
        else:
            axes.set_ylim(bottom=0)
        axes.minorticks_off()
    by_end = sorted(all_axes[-1].lines, key=lambda line: -line.get_ydata()[-1])
    handles = [Line2D([], [], label=name, **{"color": theme.faint} | style) for name, style in key] or by_end
    all_axes[-1].legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)
    return figure


def cells(theme: Theme, values: Sequence[Sequence[float]], caption: Caption, unit: str) -> Figure:
    """Returns a heat map of numbers that are not negative, from each rank (down) to each (across)."""
    import numpy as np
    from matplotlib import colormaps

    num_ranks = len(values)
    step, inches = (1, 0.55) if num_ranks <= MOST_RANKS_WITH_TEXT else (8, 0.15)
    figure = framed_figure(caption, theme, max(7.0, inches * num_ranks + 3.5), max(2.0, inches * num_ranks + 0.8))
    axes = figure.add_subplot(xlabel="to rank", ylabel="from rank")
    found, shades = np.array(values, float), colormaps[theme.ramp]
    image = axes.imshow(found, cmap=shades, vmin=0, vmax=found.max(initial=0) or 1, aspect="auto")
    for (y, x), value in np.ndenumerate(found) if step == 1 else ():
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        is_bright = sum(shades(image.norm(value))[:3]) > 1.5
        axes.text(x, y, text, ha="center", va="center", color="black" if is_bright else "white")
    axes.set(xticks=range(0, num_ranks, step), yticks=range(0, num_ranks, step))
    figure.colorbar(image, label=unit, ax=axes)
    return figure


def bars(
    theme: Theme,
    rows: Sequence[tuple[str, str, int | None, Sequence[tuple[float, float]]]],
    x_label: str,
    caption: Caption,
) -> Figure:
    """Returns bars that may overlap, a row below the other.

    Args:
        rows: (group, name, number of the colour or None for grey, (start, length) of each bar). A row with a group
            starts it; the others have "".
    """
    figure = framed_figure(caption, theme, 11.0, max(1.5, 0.24 * len(rows) + 0.6))
    axes = figure.add_subplot(xlabel=x_label)
    for place, (group, _, number, spans) in enumerate(rows):
        if group and place:
            axes.axhline(place - 0.5, color=theme.faint, linewidth=0.8)
        colour = theme.faint if number is None else theme.colours[number % len(theme.colours)]
        axes.broken_barh(spans, (place - 0.4, 0.8), alpha=0.45, color=colour, linewidth=0)
    axes.set_yticks(range(len(rows)), [f"{group}   {name}".strip() for group, name, _, _ in rows])
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(visible=True, axis="x")
    return figure


def framed_figure(caption: Caption, theme: Theme, width: float, body_height: float) -> Figure:
    """Returns a figure, sizes in inches, with its title above, and how to read it and its parameters below the axes."""
    from matplotlib.figure import Figure

    title = textwrap.fill(caption.title, int(6 * width))
    foot = [
        textwrap.fill(part, int(10 * width)) for part in f"{caption.subtitle}\n{caption.footer}".strip().splitlines()
    ]
    num_lines = 2 * title.count("\n") + "\n".join(foot).count("\n") + 3
    figure = Figure(figsize=(width, body_height + 0.2 * num_lines), layout="constrained")
    figure.suptitle(title, x=0.02, ha="left", size=15, weight="bold")
    figure.supxlabel("\n".join(foot), x=0.02, ha="left", size=9, color=theme.faint)
    return figure
