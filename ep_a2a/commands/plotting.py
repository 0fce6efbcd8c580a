"""Writes pictures, each for light and dark pages, and chooses units. matplotlib is optional."""

from __future__ import annotations

import importlib
import importlib.util
import io
from typing import TYPE_CHECKING

from ep_a2a.commands.files import check_can_write, whole_file
from ep_a2a.commands.plot_style import THEMES, Theme, style_of
from ep_a2a.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
TIME_UNITS = ((1e-3, "ns"), (1.0, "µs"), (1e3, "ms"), (1e6, "s"))
BINARY_UNITS = ((1.0, "B"), (1024.0, "KiB"), (1024.0**2, "MiB"), (1024.0**3, "GiB"))
"""Of memory, as the tables have it; BYTE_UNITS are those of what travels."""
BYTE_UNITS = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"))


def dark_variant(path: Path) -> Path:
    """The file beside a picture with the same picture for dark pages: NAME.dark.png of NAME.png."""
    return path.with_name(f"{path.stem}.dark{path.suffix}")


def check_can_plot(path: Path) -> None:
    """Checks, before any work, that a picture can be written to `path`, with its dark variant.

    Raises:
        MissingPackageError: matplotlib is not installed, or cannot be imported.
        ConfigError: path ends in neither .png nor .svg, or cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib, which draws pictures", "none", "pip install matplotlib")
    try:
        importlib.import_module("matplotlib.figure")
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise MissingPackageError("a matplotlib that can be imported", found, "Install matplotlib anew.") from error
    if path.suffix not in SUFFIXES:
        remedy = f"Name a file that ends in {' or '.join(SUFFIXES)}."
        raise ConfigError(f"a picture named *{' or *'.join(SUFFIXES)}", str(path), remedy)
    for each in (path, dark_variant(path)):
        check_can_write(each)


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
        with whole_file(each) as place:
            place.write_bytes(content)
    return paths
