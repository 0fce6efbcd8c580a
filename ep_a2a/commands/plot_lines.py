"""Draws lines over a logarithmic axis, with their names beside the axes, and bars over time."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ep_a2a.commands import plotting
from ep_a2a.commands.plot_style import INCH_POINTS, LABEL_POINTS, Caption, Theme, framed_figure, wrap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR_INCHES, BARS_WIDTH_INCHES = 0.24, 11.0
PANEL_INCHES = (5.2, 4.4)
ONE_PANEL_INCHES = (9.5, 5.0)
KEY_INCHES = 0.35
LABEL_INCHES = 3.0
"""Greatest width of a line's name beside the axes."""
BAR_OPACITY, BAR_HEIGHT = 0.45, 0.8
MIN_TICK_DISTANCE = 0.035
"""Between texts of the x axis, as a share of its length."""


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
    return plotting.write_picture(functools.partial(lines_figure, panel, caption), path)


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
    return plotting.write_picture(functools.partial(panels_figure, panels, key, caption), path)


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
    legend = figure.legend(
        handles=entries,
        loc="upper left",
        bbox_to_anchor=corner,
        ncols=len(key),
        borderaxespad=0,
        borderpad=0,
        handlelength=2.6,
    )
    legend.set_in_layout(False)
    return figure


def _draw_panel(axes: Axes, panel: Panel, theme: Theme) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set(xscale="log", xlabel=panel.x_label, ylabel=panel.y_label)
    for label, points, style in panel.lines:
        seen = {"marker": "D"} if len(points) == 1 else {}
        axes.plot(*zip(*points), label=label, **seen | {"markeredgecolor": theme.page} | style)
    axes.set_xticks(list(panel.ticks), _spaced(panel.ticks))
    if len(panel.ticks) == 1:
        (place,) = panel.ticks
        axes.set_xlim(place / 2, place * 2)
    axes.minorticks_off()
    axes.grid(visible=True)
    if not panel.log_y:
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # about five texts, whatever the range
    steps = range(1, 10) if high / low < 8 else (1, 2, 5) if high / low < 300 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
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
            name,
            xy=points[-1],
            xytext=(1.03, y),
            textcoords="axes fraction",
            va="center",
            size=LABEL_POINTS,
            color=theme.text,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "linewidth": 1.4,
                "linestyle": ":",
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


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


def plot_bars(
    rows: Sequence[tuple[str, int | None, Sequence[tuple[float, float]]]], x_label: str, caption: Caption, path: Path
) -> tuple[Path, Path]:
    """Writes bars that may overlap, a row below the other; raises as `write_picture`.

    Args:
        rows: (label, number of the colour or None for grey, (start, length) of each bar). A label with a tab starts a
            group, whose name is before the tab.
        x_label, caption, path: of the picture.
    """
    return plotting.write_picture(functools.partial(bars_figure, rows, x_label, caption), path)


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
