"""Draws the path of one token over four ranks, as SVG for light and dark pages.

python tools/draw_token_path.py docs/pictures
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ep_a2a.commands.plots import COMBINE, DISPATCH, EXPERTS, THEMES, Theme

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HEIGHT = 960, 436
LANE_TOP, LANE_HEIGHT, LANE_GAP = 52, 84, 12
NUM_RANKS, EXPERTS_PER_RANK = 4, 4
TOKEN_EXPERTS = (1, 5, 6, 14)
HOME = 0
TOKEN_X, ROW_X, EXPERTS_X, SUM_X, RESULT_X = 82, 308, 426, 642, 862
BOX_WIDTH, SUM_WIDTH, BOX_HEIGHT, EXPERT_SIZE = 84, 112, 34, 34
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")

TITLE = "A token's path over four ranks: one copy per rank that owns one of its experts, one sum back from each"


def lane_middle(rank: int) -> float:
    """The vertical middle of a rank's lane."""
    return LANE_TOP + rank * (LANE_HEIGHT + LANE_GAP) + LANE_HEIGHT / 2


def experts_of(rank: int) -> tuple[int, ...]:
    """The token's experts on a rank."""
    return tuple(e for e in TOKEN_EXPERTS if e // EXPERTS_PER_RANK == rank)


@dataclass
class Picture:
    """Collects the elements of one picture."""

    theme: Theme
    title: str
    height: int = HEIGHT
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 14,
        fill: str = "",
        anchor: str = "middle",
        weight: int = 400,
    ) -> None:
        """A line of text; y is its middle."""
        style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill or self.theme.text}"'
        self.parts.append(f'<text x="{x:g}" y="{y + size * 0.35:.1f}" {style}>{text}</text>')

    def box(self, x: float, y: float, width: float, height: float, *, fill: str = "none", stroke: str = "none") -> None:
        """A rectangle with round corners, around its middle."""
        place = f'x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}" rx="6"'
        self.parts.append(f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float, colour: str, *, dashed: bool = False) -> None:
        """An arrow that leaves and arrives level; dashed where no wire is crossed."""
        bend = (x1 - x0) * 0.5
        path = f"M{x0:g},{y0:g} C{x0 + bend:g},{y0:g} {x1 - bend:g},{y1:g} {x1 - 9:g},{y1:g}"
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5"{dash}/>')
        head = f"M{x1:g},{y1:g} l-10,-5 v10 z"
        self.parts.append(f'<path d="{head}" fill="{colour}"/>')

    def svg(self) -> str:
        """The whole picture."""
        font = "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif\""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" {font}>'
        page = f'<rect width="{WIDTH}" height="{self.height}" rx="10" fill="{self.theme.page}"/>'
        return "\n".join([head, f"<title>{self.title}</title>", page, *self.parts, "</svg>", ""])


def draw_lane(picture: Picture, rank: int) -> None:
    """A rank's lane with its experts; a faint one where the token does not go."""
    theme, y = picture.theme, lane_middle(rank)
    picture.box(WIDTH / 2, y, WIDTH - 16, LANE_HEIGHT, fill=theme.lane)
    picture.text(18, y - LANE_HEIGHT / 2 + 15, f"rank {rank}", size=13, anchor="start", fill=theme.faint, weight=600)
    for i in range(EXPERTS_PER_RANK):
        expert, x = rank * EXPERTS_PER_RANK + i, EXPERTS_X + i * (EXPERT_SIZE + 6)
        chosen = expert in TOKEN_EXPERTS
        fill, stroke = (theme.colours[EXPERTS], theme.colours[EXPERTS]) if chosen else ("none", theme.faint)
        picture.box(x, y, EXPERT_SIZE, EXPERT_SIZE, fill=fill, stroke=stroke)
        picture.text(x, y, f"E{expert}", size=13, fill=theme.on_colour if chosen else theme.faint)


def draw_visit(picture: Picture, rank: int) -> None:
    """The token's row on a rank that owns some of its experts, and the sum that goes back."""
    theme, y, home = picture.theme, lane_middle(rank), lane_middle(HOME)
    local = rank == HOME
    picture.arrow(TOKEN_X + BOX_WIDTH / 2, home, ROW_X - BOX_WIDTH / 2, y, theme.colours[DISPATCH], dashed=local)
    picture.box(ROW_X, y, BOX_WIDTH, BOX_HEIGHT, stroke=theme.colours[DISPATCH], fill=theme.lane)
    picture.text(ROW_X, y, "one row")
    picture.box(SUM_X, y, SUM_WIDTH, BOX_HEIGHT, stroke=theme.colours[COMBINE], fill=theme.lane)
    picture.text(SUM_X, y, " + ".join(f"w{str(e).translate(SUBSCRIPTS)}·E{e}" for e in experts_of(rank)), size=13)
    picture.arrow(SUM_X + SUM_WIDTH / 2, y, RESULT_X - BOX_WIDTH / 2, home, theme.colours[COMBINE], dashed=local)


def draw(theme: Theme) -> str:
    """The picture for one theme."""
    picture = Picture(theme, TITLE)
    for rank in range(NUM_RANKS):
        draw_lane(picture, rank)
    for rank in reversed(range(NUM_RANKS)):
        if experts_of(rank):
            draw_visit(picture, rank)
        else:
            picture.text(ROW_X, lane_middle(rank), "nothing sent", size=13, fill=theme.faint)
    y = lane_middle(HOME)
    for x, name in ((TOKEN_X, "token"), (RESULT_X, "result")):
        picture.box(x, y, BOX_WIDTH, BOX_HEIGHT, fill=theme.text)
        picture.text(x, y, name, fill=theme.page, weight=600)
    picture.text(TOKEN_X, y + 29, f"experts {', '.join(map(str, TOKEN_EXPERTS))}", size=12, fill=theme.faint)
    picture.text(RESULT_X, y + 29, "added in rank order", size=12, fill=theme.faint)
    for x, name, colour in (
        (200, "dispatch: one copy per rank", theme.colours[DISPATCH]),
        (EXPERTS_X + 60, "experts: weighted sum", theme.colours[EXPERTS]),
        (760, "combine: one row back per rank", theme.colours[COMBINE]),
    ):
        picture.text(x, 27, name, size=15, fill=colour, weight=600)
    return picture.svg()


def write_pictures(name: str, draw_one: Callable[[Theme], str], folder: Path) -> None:
    """Writes NAME_light.svg and NAME_dark.svg into a folder."""
    for theme in THEMES:
        path = folder / f"{name}_{theme.name}.svg"
        path.write_text(draw_one(theme))
        print(path)


def main(name: str, draw_one: Callable[[Theme], str], what: str) -> None:
    """Writes a picture into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=what.splitlines()[0])
    parser.add_argument("folder", type=Path)
    write_pictures(name, draw_one, parser.parse_args().folder)


if __name__ == "__main__":
    main("token_path", draw, __doc__)
