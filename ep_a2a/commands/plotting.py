"""Pictures for the command line. matplotlib is optional and loaded here only."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from ep_a2a.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

INCHES_PER_RANK = 0.6
MARGIN_INCHES = 2.5
DOTS_PER_INCH = 150


def check_can_plot(path: Path) -> None:
    """Raises, before any work is done, what would keep `plot_traffic` from writing `path`.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: path does not end in .png or its folder does not exist.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib, which draws pictures", "none", "pip install 'ep-a2a[plot]'")
    if path.suffix != ".png":
        raise ConfigError("a picture named *.png", str(path), "Name it so.")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"a folder {path.resolve().parent} for the picture", "none", "Make it, or name another.")


def plot_traffic(rows: Sequence[Sequence[int]], title: str, path: Path) -> None:
    """Writes a heat map of the rows that each rank sends to each rank as a PNG.

    Raises:
        MissingPackageError, ConfigError: as `check_can_plot`.
    """
    plot_matrix(rows, title, "rows sent in dispatch", path)


def plot_matrix(values: Sequence[Sequence[float]], title: str, label: str, path: Path, *, digits: int = 9) -> None:
    """Writes a heat map of a number from each rank (down) to each rank (across) as a PNG.

    Args:
        values: square, not negative. title: above it. label: of the colours. path: to write.
        digits: significant digits of the numbers in the cells.

    Raises:
        MissingPackageError, ConfigError: as `check_can_plot`.
    """
    check_can_plot(path)
    from matplotlib.figure import Figure

    num_ranks, most = len(values), max(max(row) for row in values)
    size_inches = MARGIN_INCHES + INCHES_PER_RANK * num_ranks
    figure = Figure(figsize=(size_inches + 1, size_inches), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap="viridis", vmin=0)
    for source, row in enumerate(values):
        for destination, value in enumerate(row):
            color = "white" if value < 0.6 * most else "black"
            axes.text(destination, source, f"{value:.{digits}g}", ha="center", va="center", color=color)
    axes.set(xticks=range(num_ranks), yticks=range(num_ranks), xlabel="to rank", ylabel="from rank", title=title)
    figure.colorbar(image, label=label)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)
