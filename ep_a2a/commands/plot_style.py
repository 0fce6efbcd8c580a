"""The style of every picture: Okabe-Ito colours for light and dark pages, sizes, and a frame of title and footer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCH_POINTS = 72
TITLE_POINTS, SUBTITLE_POINTS, TEXT_POINTS, LABEL_POINTS, FOOTER_POINTS = 16, 11.5, 11, 10.5, 9
"""Of fonts; labels are names of lines and rows."""
LINE_SPACING = 1.4
MARGIN_INCHES = 0.2

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


def style_of(theme: Theme) -> dict[str, Any]:
    """Returns matplotlib's rcParams for a theme."""
    colours = ", ".join(f"'{colour}'" for colour in theme.colours)
    return {
        "figure.facecolor": theme.page,
        "figure.dpi": 150,
        "savefig.facecolor": theme.page,
        "savefig.dpi": 150,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": TEXT_POINTS,
        "text.color": theme.text,
        "axes.facecolor": theme.page,
        "axes.edgecolor": theme.faint,
        "axes.labelcolor": theme.text,
        "axes.labelsize": TEXT_POINTS,
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
        # Text stays text: small files, and words that can be searched. The salt makes equal pictures equal files.
        "svg.fonttype": "none",
        "svg.hashsalt": "ep_a2a",
    }


def text_inches(text: str, points: float, weight: str = "normal") -> float:
    """Returns the width of a line of text."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    properties = FontProperties(family="DejaVu Sans", size=points, weight=weight)
    return text_to_path.get_text_width_height_descent(text, properties, ismath=False)[0] / INCH_POINTS


def wrap(text: str, width_inches: float, points: float, weight: str = "normal") -> list[str]:
    """Returns the lines of a text of this size that fit into a width; a word that does not is not broken."""
    lines: list[str] = []
    for part in text.splitlines():
        words = part.split()
        line = words[0] if words else ""
        for word in words[1:]:
            longer = f"{line} {word}"
            if text_inches(longer, points, weight) <= width_inches:
                line = longer
            else:
                lines.append(line)
                line = word
        lines.append(line)
    return lines


def framed_figure(
    caption: Caption, theme: Theme, width_inches: float, body_inches: float, *, key_inches: float = 0.0
) -> tuple[Figure, tuple[float, float]]:
    """Returns a figure with a caption, and the upper left corner of its key. Axes share an area `body_inches` high.

    Args:
        caption, theme: of the picture. width_inches: of the figure.
        key_inches: height to leave for a key below the subtitle.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    text_width = width_inches - 2 * MARGIN_INCHES
    head: list[tuple[str, float, str, str]]
    head = [(line, TITLE_POINTS, "bold", theme.text) for line in wrap(caption.title, text_width, TITLE_POINTS, "bold")]
    head += [
        (line, SUBTITLE_POINTS, "normal", theme.faint) for line in wrap(caption.subtitle, text_width, SUBTITLE_POINTS)
    ]
    foot = [(line, FOOTER_POINTS, "normal", theme.faint) for line in wrap(caption.footer, text_width, FOOTER_POINTS)]
    head_inches, foot_inches = (
        sum(LINE_SPACING * points / INCH_POINTS for _, points, _, _ in lines) + MARGIN_INCHES for lines in (head, foot)
    )
    height = head_inches + key_inches + MARGIN_INCHES + body_inches + foot_inches
    if key_inches:
        head_inches += MARGIN_INCHES / 2
        height += MARGIN_INCHES / 2
    left, bottom, right = MARGIN_INCHES / width_inches, foot_inches / height, MARGIN_INCHES / 2 / width_inches
    rect = left, bottom, 1 - left - right, (body_inches + MARGIN_INCHES / 2) / height
    engine = ConstrainedLayoutEngine(rect=rect, w_pad=MARGIN_INCHES / 2)
    figure = Figure(figsize=(width_inches, height), layout=engine)
    for lines, top in ((head, height - MARGIN_INCHES), (foot, foot_inches - MARGIN_INCHES / 2)):
        y = top
        for line, points, weight, colour in lines:
            figure.text(left, y / height, line, size=points, weight=weight, color=colour, va="top", in_layout=False)
            y -= LINE_SPACING * points / INCH_POINTS
    return figure, (left, (height - head_inches) / height)
