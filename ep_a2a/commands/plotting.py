"""Draws every picture of the command line, each for light and dark pages. matplotlib is optional."""

from __future__ import annotations

import functools
import importlib.util
import io
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.plot_style import (
    INCH_POINTS,
    THEMES,
    Caption,
    Theme,
    framed_figure,
    style_of,
    text_inches,
    wrap,
)
from ep_a2a.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
MIN_WIDTH_INCHES = 7.0
CELL_INCHES, SMALL_CELL_INCHES, MATRIX_INCHES, COLOUR_BAR_INCHES = 0.62, 0.15, 3.2, 0.2
MAX_RANKS_WITH_NUMBERS = 16
"""Cells of larger matrices are small, without numbers."""
BAR_INCHES, BARS_WIDTH_INCHES = 0.24, 11.0
PANEL_INCHES = (5.2, 4.4)
ONE_PANEL_INCHES = (9.5, 5.0)
KEY_INCHES = 0.35
LABEL_POINTS, LABEL_INCHES = 10.5, 3.0
"""Of the names of lines beside the axes."""
BAR_OPACITY, BAR_HEIGHT = 0.45, 0.8
MIN_TICK_DISTANCE = 0.035
"""Between texts of the x axis, as a share of its length."""
BRIGHT = 0.5
"""Luminance above which an area takes dark text."""
NO_VALUE = "-"
TIME_UNITS = ((1e-3, "ns"), (1.0, "µs"), (1e3, "ms"), (1e6, "s"))
BYTE_UNITS = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"))


def dark_variant(path: Path) -> Path:
    """The file beside a picture with the same picture for dark pages: NAME.dark.png of NAME.png."""
    return path.with_name(f"{path.stem}.dark{path.suffix}")


def check_can_plot(path: Path) -> None:
    """Checks, before any work, that the functions below can write `path` and its dark variant.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: path ends in neither .png nor .svg, or cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib, which draws pictures", "none", "pip install matplotlib")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a picture named *{' or *'.join(SUFFIXES)}", str(path), "Name a file that ends so.")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"a folder {folder} for the picture", "none", "Make it, or name another.")
    for each in (path, dark_variant(path)):
        if each.is_dir() or not os.access(each if each.exists() else folder, os.W_OK):
            raise ConfigError("a picture that can be written", str(each), "Name another file.")


def unit_for(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Returns the last of the units (size, name), ascending, that is not above `largest`, or the first."""
    return next((each for each in reversed(units) if each[0] <= largest), units[0])


def write_picture(draw: Callable[[Theme], Figure], path: Path) -> tuple[Path, Path]:
    """Writes a picture for light pages to `path`, and for dark ones beside it; returns both files.

    Args:
        draw: makes the figure. path: *.png or *.svg.

    Raises:
        MissingPackageError, ConfigError: as `check_can_plot`, or a file could not be written.
    """
    check_can_plot(path)
    import matplotlib as mpl

    paths = path, dark_variant(path)
    contents = []
    for theme in THEMES:
        with mpl.rc_context(style_of(theme)):
            buffer = io.BytesIO()
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            draw(theme).savefig(buffer, format=path.suffix[1:], metadata=metadata)
            contents.append(buffer.getvalue())
    for each, content in zip(paths, contents):
        try:
            each.write_bytes(content)
        except OSError as error:
            each.unlink(missing_ok=True)
            raise ConfigError("a picture that can be written", f"{each}: {error.strerror}", "Name another.") from error
    return paths


# Heat maps


def plot_matrix(
    values: Sequence[Sequence[float | None]], caption: Caption, unit: str, path: Path, *, digits: int = 3
) -> tuple[Path, Path]:
    """Writes a heat map of a number from each rank (down) to each rank (across); raises as `write_picture`.

    Args:
        values: square, not negative; None where nothing was measured.
        caption, path: of the picture. unit: of the values.
        digits: significant digits of what is not an integer.
    """
    return write_picture(functools.partial(matrix_figure, values, caption, unit, digits=digits), path)


def matrix_figure(
    values: Sequence[Sequence[float | None]], caption: Caption, unit: str, theme: Theme, *, digits: int = 3
) -> Figure:
    """Returns the figure of `plot_matrix`; cells without a value are grey."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    num_ranks = len(values)
    has_numbers = num_ranks <= MAX_RANKS_WITH_NUMBERS
    side = max(MATRIX_INCHES, num_ranks * (CELL_INCHES if has_numbers else SMALL_CELL_INCHES)) + 0.6
    figure, _ = framed_figure(caption, theme, max(MIN_WIDTH_INCHES, side + 2), side)
    axes = figure.add_subplot()
    cells = np.ma.masked_invalid([[np.nan if each is None else float(each) for each in row] for row in values])
    largest = max((each for row in values for each in row if each is not None), default=0.0)
    colours = LinearSegmentedColormap.from_list("ramp", theme.ramp).with_extremes(bad=theme.unmeasured)
    image = axes.imshow(cells, cmap=colours, vmin=0, vmax=largest or 1.0)
    for source, row in enumerate(values if has_numbers else ()):
        for destination, value in enumerate(row):
            text = NO_VALUE if value is None else _number(value, digits)
            background = theme.unmeasured if value is None else image.to_rgba(np.array(value))
            _write_cell(axes, destination, source, text, background)
    step = 1 if has_numbers else 8
    axes.set(xticks=range(0, num_ranks, step), yticks=range(0, num_ranks, step), xlabel="to rank", ylabel="from rank")
    _cell_borders(axes, theme, num_ranks, num_ranks)
    axes.set_anchor("W")
    thickness = COLOUR_BAR_INCHES / side
    bar = figure.colorbar(image, label=unit, cax=axes.inset_axes((1 + thickness, 0, thickness, 1)))
    bar.outline.set_visible(False)
    return figure


def _number(value: float, digits: int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:#.{digits}g}".rstrip(".")


def plot_checks(
    rows: Mapping[str, Mapping[str, bool | None]], caption: Caption, labels: tuple[str, str], path: Path
) -> tuple[Path, Path]:
    """Writes a grid of what was right and what failed; raises as `write_picture`.

    Args:
        rows: by row and column whether the check passed; None where nothing was checked.
        caption, path: of the picture. labels: of the columns and of the rows.
    """
    return write_picture(functools.partial(checks_figure, rows, caption, labels), path)


def checks_figure(
    rows: Mapping[str, Mapping[str, bool | None]], caption: Caption, labels: tuple[str, str], theme: Theme
) -> Figure:
    """Returns the figure of `plot_checks`."""
    from matplotlib.colors import ListedColormap

    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    words = {True: "ok", False: "failed", None: NO_VALUE}
    good, bad = theme.colours[2], theme.colours[1]
    shades = {True: good, False: bad, None: theme.unmeasured}
    cells = [[list(words).index(row.get(name)) for name in columns] for row in rows.values()]
    names_inches = max((text_inches(name, LABEL_POINTS) for name in rows), default=0.0)
    width = max(MIN_WIDTH_INCHES, names_inches + len(columns) * 0.8 + 1.2)
    figure, _ = framed_figure(caption, theme, width, max(len(rows), 1) * 0.45 + 0.7)
    axes = figure.add_subplot(xlabel=labels[0], ylabel=labels[1])
    if rows:
        axes.imshow(cells, cmap=ListedColormap(list(shades.values())), vmin=0, vmax=len(shades) - 1, aspect="auto")
    for y, row in enumerate(rows.values()):
        for x, name in enumerate(columns):
            _write_cell(axes, x, y, words[row.get(name)], shades[row.get(name)])
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), list(rows), size=LABEL_POINTS)
    _cell_borders(axes, theme, len(columns), len(rows))
    return figure


def _write_cell(axes: Axes, x: int, y: int, text: str, background: Any) -> None:
    """Writes into a cell, dark on bright and bright on dark."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(background)
    colour = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > BRIGHT else "white"
    axes.text(x, y, text, ha="center", va="center", color=colour)


def _cell_borders(axes: Axes, theme: Theme, num_columns: int, num_rows: int) -> None:
    """Draws the page's colour between cells, and no frame."""
    axes.spines[:].set_visible(False)
    axes.set_xticks([x - 0.5 for x in range(1, num_columns)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, num_rows)], minor=True)
    axes.grid(
        which="minor",
        color=theme.page,
        alpha=1.0,
        linewidth=1.5 if max(num_columns, num_rows) <= MAX_RANKS_WITH_NUMBERS else 0.5,
    )
    axes.tick_params(which="both", length=0)


# Lines


@dataclass
class Panel:
    """One diagram; its x axis is logarithmic.

    Attributes:
        x_label, y_label: of the axes.
        ticks: text by place on the x axis.
        log_y: whether the y axis is logarithmic; else it starts at 0.
        lines: (label, points (x, y), style of matplotlib's plot) of each line.
    """

    x_label: str
    y_label: str
    ticks: Mapping[int, str]
    log_y: bool = False
    lines: list[tuple[str, Sequence[tuple[float, float]], dict[str, Any]]] = field(default_factory=list)


def plot_lines(panel: Panel, caption: Caption, path: Path) -> tuple[Path, Path]:
    """Writes a diagram with the names of its lines on the right of the axes; raises as `write_picture`."""
    return write_picture(functools.partial(lines_figure, panel, caption), path)


def lines_figure(panel: Panel, caption: Caption, theme: Theme) -> Figure:
    """Returns the figure of `plot_lines`."""
    names = ["\n".join(wrap(label, LABEL_INCHES, LABEL_POINTS)) for label, _, _ in panel.lines]
    label_inches = sum(_text_inches(name) for name in names)
    figure, _ = framed_figure(caption, theme, ONE_PANEL_INCHES[0], max(ONE_PANEL_INCHES[1], label_inches + 0.8))
    axes = figure.add_subplot()
    _draw_panel(axes, panel, theme)
    _name_lines(figure, axes, panel, names, theme)
    return figure


def plot_panels(
    panels: Sequence[Panel], key: Sequence[tuple[str, dict[str, Any]]], caption: Caption, path: Path
) -> tuple[Path, Path]:
    """Writes diagrams side by side below one key; raises as `write_picture`.

    Args:
        panels: the diagrams. key: (text, style of matplotlib's plot) of each entry, "C0" to "C5" being the colours.
        caption, path: of the picture.
    """
    return write_picture(functools.partial(panels_figure, panels, key, caption), path)


def panels_figure(
    panels: Sequence[Panel], key: Sequence[tuple[str, dict[str, Any]]], caption: Caption, theme: Theme
) -> Figure:
    """Returns the figure of `plot_panels`."""
    from matplotlib.lines import Line2D

    width, height = PANEL_INCHES
    figure, corner = framed_figure(caption, theme, width * len(panels), height, key_inches=KEY_INCHES)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0]):
        _draw_panel(axes, panel, theme)
    entries = [Line2D([], [], label=text, **{"color": theme.faint} | style) for text, style in key]
    legend = figure.legend(handles=entries, loc="upper left", bbox_to_anchor=corner, ncols=len(key), borderaxespad=0,
                           borderpad=0, handlelength=2.6)  # fmt: skip
    legend.set_in_layout(False)
    return figure


def _draw_panel(axes: Axes, panel: Panel, theme: Theme) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set(xscale="log", xlabel=panel.x_label, ylabel=panel.y_label)
    for label, points, style in panel.lines:
        axes.plot(*zip(*points), label=label, **{"markeredgecolor": theme.page} | style)
    axes.set_xticks(list(panel.ticks), _spaced(panel.ticks))
    axes.minorticks_off()
    axes.grid(visible=True)
    if not panel.log_y:
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = (1, 2, 5) if high / low < 300 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.minorticks_off()


def _spaced(ticks: Mapping[int, str]) -> list[str]:
    """Returns the texts of an x axis, empty where one would touch the next; the last is kept."""
    places = sorted(ticks)
    length = math.log(places[-1] / places[0]) if len(places) > 1 else 1.0
    kept: list[int] = []
    for place in reversed(places):
        if not kept or math.log(kept[-1] / place) >= MIN_TICK_DISTANCE * length * (len(ticks[kept[-1]]) / 2 + 0.5):
            kept.append(place)
    return [ticks[place] if place in kept else "" for place in ticks]


def _text_inches(text: str) -> float:
    return 1.35 * LABEL_POINTS / INCH_POINTS * (text.count("\n") + 1)


def _name_lines(figure: Figure, axes: Axes, panel: Panel, names: Sequence[str], theme: Theme) -> None:
    """Writes the name of each line on the right of the axes, as near to its end as the others allow."""
    figure.draw_without_rendering()
    height_inches = axes.bbox.height / figure.dpi
    ends, sizes = [], []
    for (_, points, _), name in zip(panel.lines, names):
        y = axes.transAxes.inverted().transform(axes.transData.transform(points[-1]))[1]
        ends.append(float(y))
        sizes.append(_text_inches(name) / height_inches)
    for line, name, points, y in zip(axes.lines, names, (each[1] for each in panel.lines), spread(ends, sizes)):
        axes.annotate(
            name, xy=points[-1], xytext=(1.03, y), textcoords="axes fraction", va="center", size=LABEL_POINTS,
            color=theme.text, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "linewidth": 1.2, "shrinkA": 1, "shrinkB": 4,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


def spread(wanted: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Returns middles of intervals of these sizes in [0, 1], near the wanted ones, that do not overlap.

    They fill [0, 1] or more where the sizes sum up to 1 or more.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = dict.fromkeys(order, 0.0)
    floor = 0.0
    for i in order:
        placed[i] = max(wanted[i], floor + sizes[i] / 2)
        floor = placed[i] + sizes[i] / 2
    ceiling = 1.0
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling - sizes[i] / 2)
        ceiling = placed[i] - sizes[i] / 2
    return [placed[i] for i in range(len(wanted))]


# Bars


def plot_bars(
    rows: Sequence[tuple[str, int | None, Sequence[tuple[float, float]]]], x_label: str, caption: Caption, path: Path
) -> tuple[Path, Path]:
    """Writes bars that may overlap, a row below the other; raises as `write_picture`.

    Args:
        rows: (label, number of the colour or None for grey, (start, length) of each bar). A label with a tab starts a
            group, whose name is before the tab.
        x_label, caption, path: of the picture.
    """
    return write_picture(functools.partial(bars_figure, rows, x_label, caption), path)


def bars_figure(
    rows: Sequence[tuple[str, int | None, Sequence[tuple[float, float]]]], x_label: str, caption: Caption, theme: Theme
) -> Figure:
    """Returns the figure of `plot_bars`."""
    figure, _ = framed_figure(caption, theme, BARS_WIDTH_INCHES, max(1.5, BAR_INCHES * len(rows) + 0.6))
    axes = figure.add_subplot(xlabel=x_label)
    labels = []
    for place, (label, number, bars) in enumerate(rows):
        group, is_first, name = label.rpartition("\t")
        labels.append(f"$\\mathbf{{{group.replace(' ', chr(92) + ' ')}}}$   {name}" if is_first else name)
        if is_first and place:
            axes.axhline(place - 0.5, color=theme.faint, linewidth=0.8)
        colour = theme.faint if number is None else theme.colours[number % len(theme.colours)]
        area = (place - BAR_HEIGHT / 2, BAR_HEIGHT)
        axes.broken_barh(bars, area, alpha=BAR_OPACITY, color=colour, linewidth=0)
    axes.set_yticks(range(len(rows)), labels, size="small")
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")
    return figure
