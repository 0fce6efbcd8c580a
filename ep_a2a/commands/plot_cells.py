"""Draws grids of cells: a number, or whether a check passed, for each row and column."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ep_a2a.commands import plotting
from ep_a2a.commands.plot_style import LABEL_POINTS, Caption, Theme, framed_figure, text_inches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_WIDTH_INCHES = 7.0
CELL_INCHES, SMALL_CELL_INCHES, MATRIX_INCHES, COLOUR_BAR_INCHES = 0.62, 0.15, 3.2, 0.2
MAX_RANKS_WITH_NUMBERS = 16
"""Cells of larger matrices are small, without numbers."""
BRIGHT = 0.5
"""Luminance above which an area takes dark text."""
NO_VALUE = "-"
DIGITS = 3
"""Significant digits of what is not an integer."""


def plot_matrix(values: Sequence[Sequence[float | None]], caption: Caption, unit: str, path: Path) -> tuple[Path, Path]:
    """Writes a heat map of a number from each rank (down) to each rank (across); raises as `write_picture`.

    Args:
        values: square, not negative; None where nothing was measured.
        caption, path: of the picture. unit: of the values.
    """
    return plotting.write_picture(functools.partial(matrix_figure, values, caption, unit), path)


def matrix_figure(values: Sequence[Sequence[float | None]], caption: Caption, unit: str, theme: Theme) -> Figure:
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
    image = axes.imshow(cells, cmap=colours, vmin=0, vmax=largest or 1)
    for source, row in enumerate(values if has_numbers else ()):
        for destination, value in enumerate(row):
            text = NO_VALUE if value is None else _number(value)
            background = theme.unmeasured if value is None else image.to_rgba(np.array(value))
            _write_cell(axes, destination, source, text, background)
    step = 1 if has_numbers else 8
    axes.set(xticks=range(0, num_ranks, step), yticks=range(0, num_ranks, step), xlabel="to rank", ylabel="from rank")
    _cell_borders(axes, theme, num_ranks, num_ranks)
    axes.set_anchor("W")
    if not largest:
        return figure
    thickness = COLOUR_BAR_INCHES / side
    bar = figure.colorbar(image, label=unit, cax=axes.inset_axes((1 + thickness, 0, thickness, 1)))
    bar.outline.set_visible(False)
    return figure


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:#.{DIGITS}g}".rstrip(".")


def plot_checks(
    rows: Mapping[str, Mapping[str, bool | None]], caption: Caption, labels: tuple[str, str], path: Path
) -> tuple[Path, Path]:
    """Writes a grid of what was right and what failed; raises as `write_picture`.

    Args:
        rows: by row and column whether the check passed; None where nothing was checked.
        caption, path: of the picture. labels: of the columns and of the rows.
    """
    return plotting.write_picture(functools.partial(checks_figure, rows, caption, labels), path)


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
