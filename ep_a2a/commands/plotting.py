"""Draws every picture of the command line: heat maps, lines and bars, in one style. matplotlib is optional."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ep_a2a.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
DOTS_PER_INCH = 150
MARGIN_INCHES = 2.5
INCHES_PER_RANK = 0.6
INCHES_PER_BAR = 0.22
PANEL_INCHES = (8.0, 5.5)
GRID_OPACITY, BAR_OPACITY = 0.3, 0.35
BAR_HEIGHT = 0.8


def check_can_plot(path: Path) -> None:
    """Checks, before any work, that the functions below can write `path`.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: path ends in neither .png nor .svg, or its folder does not exist.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib, which draws pictures", "none", "pip install matplotlib")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a picture named *{' or *'.join(SUFFIXES)}", str(path), "Name it so.")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"a folder {path.resolve().parent} for the picture", "none", "Make it, or name another.")


def _new_figure(path: Path, width: float, height: float) -> Figure:
    check_can_plot(path)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format=path.suffix[1:], dpi=DOTS_PER_INCH)


def plot_matrix(values: Sequence[Sequence[float]], title: str, label: str, path: Path, *, digits: int = 9) -> None:
    """Writes a heat map of a number from each rank (down) to each rank (across).

    Args:
        values: square, not negative. title: above it. label: of the colours. path: *.png or *.svg.
        digits: significant digits of the numbers in the cells.

    Raises:
        MissingPackageError, ConfigError: as `check_can_plot`.
    """
    num_ranks, most = len(values), max(max(row) for row in values)
    size_inches = MARGIN_INCHES + INCHES_PER_RANK * num_ranks
    figure = _new_figure(path, size_inches + 1, size_inches)
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap="viridis", vmin=0)
    for source, row in enumerate(values):
        for destination, value in enumerate(row):
            color = "white" if value < 0.6 * most else "black"
            axes.text(destination, source, f"{value:.{digits}g}", ha="center", va="center", color=color)
    axes.set(xticks=range(num_ranks), yticks=range(num_ranks), xlabel="to rank", ylabel="from rank", title=title)
    figure.colorbar(image, label=label)
    _save(figure, path)


def plot_traffic(rows: Sequence[Sequence[int]], title: str, path: Path) -> None:
    """Writes a heat map of the rows that each rank sends to each rank; raises as `plot_matrix`."""
    plot_matrix(rows, title, "rows sent in dispatch", path)


@dataclass
class Panel:
    """One diagram of `plot_panels`; its x axis is logarithmic.

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


def plot_panels(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Writes a picture of diagrams side by side.

    Raises:
        MissingPackageError, ConfigError: as `check_can_plot`.
    """
    width, height = PANEL_INCHES
    figure = _new_figure(path, width if len(panels) == 1 else 4.5 * len(panels), height)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0]):
        axes.set(xscale="log", xlabel=panel.x_label, ylabel=panel.y_label)
        for label, points, style in panel.lines:
            axes.plot(*zip(*points), label=label, **style)
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axes.minorticks_off()
        axes.grid(visible=True, alpha=GRID_OPACITY)
        if panel.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        if panel.lines:
            axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="small", wrap=True)
    _save(figure, path)


def plot_bars(
    rows: Sequence[tuple[str, int, Sequence[tuple[float, float]]]], x_label: str, title: str, path: Path
) -> None:
    """Writes a picture of bars that may overlap, a row below the other.

    Args:
        rows: (label, number of the colour, (start, length) of each bar). x_label, title, path: as above.

    Raises:
        MissingPackageError, ConfigError: as `check_can_plot`.
    """
    figure = _new_figure(path, PANEL_INCHES[0] + 3, 1.4 + INCHES_PER_BAR * len(rows))
    axes = figure.add_subplot(xlabel=x_label, title=title)
    for place, (_, color, bars) in enumerate(rows):
        area = (place - BAR_HEIGHT / 2, BAR_HEIGHT)
        axes.broken_barh(bars, area, alpha=BAR_OPACITY, color=f"C{color}", linewidth=0)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize="small")
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x", alpha=GRID_OPACITY)
    _save(figure, path)
