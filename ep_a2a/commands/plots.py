"""Draws the pictures of all commands, each for light and for dark pages: lines, grids of cells, bars over time.

matplotlib is optional; check_can_plot says whether it is there.
"""

from __future__ import annotations

import importlib
import io
import math
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.files import check_can_write, write_bytes
from ep_a2a.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
TIME_UNITS = ((1e-3, "ns"), (1.0, "µs"), (1e3, "ms"), (1e6, "s"))
BINARY_UNITS = ((1.0, "B"), (1024.0, "KiB"), (1024.0**2, "MiB"), (1024.0**3, "GiB"))
"""Of memory, as the tables have it; BYTE_UNITS are those of what travels."""
BYTE_UNITS = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"))

INCH_POINTS = 72
TITLE_POINTS, TEXT_POINTS, LABEL_POINTS, FOOTER_POINTS = 16, 11, 10.5, 9.5
"""Of fonts; labels are names of lines and rows."""
WIDEST_EM = 0.7
"""No text is wider, on average over its letters, than this share of its font's size."""
LINE_INCHES = 0.2
"""Height of a line of the footer, and of a line's name beside the axes."""
PANEL_INCHES, ONE_PANEL_INCHES = (5.2, 4.4), (9.5, 5.0)
LABEL_LETTERS = 36
"""Most letters in a line of a line's name beside the axes."""
MIN_TICK_DISTANCE = 0.035
"""Between texts of the x axis, as a share of its length."""
CELLS_INCHES, CELL_INCHES, SMALL_CELL_INCHES = 7.0, (0.62, 0.5), (0.15, 0.15)
MAX_CELLS_WITH_TEXT = 16
"""Cells of grids with more columns are small, without text."""
BRIGHT = 0.5
"""Luminance above which an area takes dark text."""
BAR_INCHES, BARS_WIDTH_INCHES, BAR_OPACITY, BAR_HEIGHT = 0.24, 11.0, 0.45, 0.8

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
YELLOW = "#F0E442"
DISPATCH, EXPERTS, COMBINE, BUFFERS = range(4)
"""Places in `Theme.colours` of what has the same colour in all pictures."""


@dataclass(frozen=True)
class Theme:
    """Colours for one page background.

    Attributes:
        name: "light" or "dark".
        page: background. lane: areas on it. text, faint: of words, and of axes and remarks.
        unmeasured: cells without a value.
        colours: of lines and bars, in this order.
        ramp: of a heat map, from 0 to the largest value.
        on_colour: text on a bright area of `colours`.
    """

    name: str
    page: str
    lane: str
    text: str
    faint: str
    unmeasured: str
    colours: tuple[str, ...]
    ramp: tuple[str, ...]
    on_colour: str


LIGHT = Theme(
    "light",
    "#ffffff",
    "#f3f5f8",
    "#1b2430",
    "#5b6676",
    "#d5dae1",
    (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY),
    ("#eef5fa", SKY, BLUE, "#003a5c"),
    "#ffffff",
)
DARK = Theme(
    "dark",
    "#0d1117",
    "#1a212b",
    "#e6edf3",
    "#98a4b3",
    "#3a424d",
    (SKY, ORANGE, GREEN, PURPLE, VERMILION, YELLOW),
    ("#14202b", BLUE, SKY, "#e3f3fd"),
    "#0d1117",
)
THEMES = (LIGHT, DARK)


@dataclass(frozen=True)
class Caption:
    """The words around a picture.

    Attributes:
        title: says what is seen. subtitle: how to read it. footer: parameters.
    """

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

    paths = path, dark_variant(path)
    contents = []
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
    colours = ", ".join(f"'{colour}'" for colour in theme.colours)
    return {
        "figure.facecolor": theme.page,
        "figure.dpi": 150,
        "font.size": TEXT_POINTS,
        "text.color": theme.text,
        "axes.facecolor": theme.page,
        "axes.edgecolor": theme.faint,
        "axes.labelcolor": theme.text,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
        "axes.prop_cycle": f"cycler('color', [{colours}])",
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "xtick.labelcolor": theme.text,
        "ytick.labelcolor": theme.text,
        "grid.color": theme.faint,
        "grid.alpha": 0.25,
        "lines.linewidth": 2.2,
        "lines.markersize": 5.5,
        "legend.frameon": False,
        "legend.fontsize": LABEL_POINTS,
        # Text stays text: small files, and words that can be searched. The salt makes equal pictures equal files.
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

    width, height = PANEL_INCHES if len(panels) > 1 else ONE_PANEL_INCHES
    names = [textwrap.fill(name, LABEL_LETTERS) for name, _, _ in panels[-1].lines]
    names_inches = sum(LINE_INCHES * (name.count("\n") + 1.4) for name in names)
    figure = framed_figure(caption, theme, width * len(panels), height if key else max(height, names_inches))
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, axes in zip(panels, all_axes):
        _draw_panel(axes, panel, theme)
    if key:
        entries = [Line2D([], [], label=name, **{"color": theme.faint} | style) for name, style in key]
    else:
        by_end = sorted(zip(panels[-1].lines, names, all_axes[-1].lines), key=lambda each: -each[0][1][-1][1])
        entries = [line for _, _, line in by_end]
        for _, name, line in by_end:
            line.set_label(name)
    all_axes[-1].legend(handles=entries, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0, handlelength=2.6)
    return figure


def _draw_panel(axes: Axes, panel: Panel, theme: Theme) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set(xscale="log", xlabel=panel.x_label, ylabel=panel.y_label)
    for _, points, style in panel.lines:
        seen = {"marker": "D"} if len(points) == 1 else {}
        axes.plot(*zip(*points), **seen | {"markeredgecolor": theme.page} | style)
    axes.set_xticks(list(panel.ticks), _spaced(panel.ticks))
    if len(panel.ticks) == 1:
        (place,) = panel.ticks
        axes.set_xlim(place / 2, place * 2)
    axes.grid(visible=True)
    if panel.log_y:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        # About five texts, whatever the range.
        steps = range(1, 10) if high / low < 8 else (1, 2, 5) if high / low < 300 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=steps))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    else:
        axes.set_ylim(bottom=0)
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


def cells(
    theme: Theme,
    rows: Mapping[str, Mapping[str, float | bool | None]],
    labels: tuple[str, str],
    caption: Caption,
    unit: str = "",
) -> Figure:
    """Returns a grid: numbers as a heat map, checks as passed or failed, grey where there is no value.

    Args:
        rows: by row and column a number that is not negative, whether a check passed, or None.
        labels: of the columns and of the rows. unit: of the numbers; "" for checks.
    """
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb

    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    largest = max((value for row in rows.values() for value in row.values() if value is not None), default=0)
    scale = ScalarMappable(Normalize(0, largest or 1), LinearSegmentedColormap.from_list("ramp", theme.ramp))

    def colour_of(value: float | bool | None) -> tuple[float, float, float]:
        if value is None:
            return to_rgb(theme.unmeasured)
        if isinstance(value, bool):
            return to_rgb(theme.colours[2 if value else 1])
        return to_rgb(scale.to_rgba(np.array(value)))

    has_text = len(columns) <= MAX_CELLS_WITH_TEXT
    wide, high = CELL_INCHES if has_text else SMALL_CELL_INCHES
    names_inches = max(map(len, rows), default=0) * LABEL_POINTS * WIDEST_EM / INCH_POINTS
    width, height = max(CELLS_INCHES, names_inches + len(columns) * wide + 2.6), max(len(rows), 1) * high + 0.8
    figure = framed_figure(caption, theme, width, height)
    axes = figure.add_subplot(xlabel=labels[0], ylabel=labels[1])
    if rows:
        shades = [[colour_of(row.get(name)) for name in columns] for row in rows.values()]
        axes.imshow(shades, aspect="auto")
        for y, row in enumerate(rows.values() if has_text else ()):
            for x, name in enumerate(columns):
                red, green, blue = shades[y][x]
                text_colour = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > BRIGHT else "white"
                axes.text(x, y, _cell_text(row.get(name)), ha="center", va="center", color=text_colour)
    step = 1 if has_text else 8
    axes.set_xticks(range(0, len(columns), step), columns[::step])
    axes.set_yticks(range(0, len(rows), step), list(rows)[::step], size=LABEL_POINTS)
    _draw_borders(axes, theme, len(columns), len(rows))
    if unit and largest:
        bar = figure.colorbar(scale, label=unit, ax=axes)
        bar.outline.set_visible(False)
    return figure


def between_ranks(values: Sequence[Sequence[float | bool | None]]) -> dict[str, dict[str, float | bool | None]]:
    """Returns the rows of `cells` for a square of values, from each rank (down) to each rank (across)."""
    return {str(a): {str(b): value for b, value in enumerate(row)} for a, row in enumerate(values)}


def _cell_text(value: float | bool | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "ok" if value else "failed"
    return f"{value:,}" if isinstance(value, int) else f"{value:#.3g}".rstrip(".")


def _draw_borders(axes: Axes, theme: Theme, num_columns: int, num_rows: int) -> None:
    """Draws the page's colour between cells, and no frame."""
    axes.spines[:].set_visible(False)
    axes.set_xticks([x - 0.5 for x in range(1, num_columns)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, num_rows)], minor=True)
    thickness = 1.5 if max(num_columns, num_rows) <= MAX_CELLS_WITH_TEXT else 0.5
    axes.grid(which="minor", color=theme.page, alpha=1.0, linewidth=thickness)
    axes.tick_params(which="both", length=0)


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
    figure = framed_figure(caption, theme, BARS_WIDTH_INCHES, max(1.5, BAR_INCHES * len(rows) + 0.6))
    axes = figure.add_subplot(xlabel=x_label)
    labels = []
    for place, (group, name, number, spans) in enumerate(rows):
        labels.append(f"$\\bf{{{group.replace(' ', chr(92) + ' ')}}}$   {name}" if group else name)
        if group and place:
            axes.axhline(place - 0.5, color=theme.faint, linewidth=0.8)
        colour = theme.faint if number is None else theme.colours[number % len(theme.colours)]
        axes.broken_barh(spans, (place - BAR_HEIGHT / 2, BAR_HEIGHT), alpha=BAR_OPACITY, color=colour, linewidth=0)
    axes.set_yticks(range(len(rows)), labels, size="small")
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")
    return figure


def framed_figure(caption: Caption, theme: Theme, width_inches: float, body_inches: float) -> Figure:
    """Returns a figure with its title above, and how to read it and its parameters below, whose axes share the rest."""
    from matplotlib.figure import Figure

    def wrapped(text: str, points: float) -> str:
        num_letters = int(width_inches * INCH_POINTS / (points * WIDEST_EM))
        return "\n".join(textwrap.fill(part, num_letters) for part in text.splitlines())

    title = wrapped(caption.title, TITLE_POINTS)
    foot = wrapped(f"{caption.subtitle}\n{caption.footer}".strip(), FOOTER_POINTS)
    height = body_inches + 2 * LINE_INCHES * (title.count("\n") + 1) + LINE_INCHES * (foot.count("\n") + 1)
    figure = Figure(figsize=(width_inches, height), layout="constrained")
    figure.suptitle(title, x=0.02, ha="left", size=TITLE_POINTS, weight="bold")
    figure.supxlabel(foot, x=0.02, ha="left", size=FOOTER_POINTS, color=theme.faint)
    return figure
