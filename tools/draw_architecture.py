"""Draws the rooms of the package with the life of a handle and of a warm dispatch, as SVG for light and dark pages.

python tools/draw_architecture.py docs/pictures
"""

from __future__ import annotations

from typing import NamedTuple

from draw_token_path import WIDTH, Picture, main

from ep_a2a.commands.plots import COMBINE, DISPATCH, Theme

HEIGHT, LANE_TOP, LANE_HEIGHT, LANE_GAP, BOX_HEIGHT = 700, 52, 84, 8, 46
LABEL_X, LANE_LEFT = 22, 44
TITLE = "Rooms of the package: imports point down; a handle is built once, a warm dispatch runs in every step"
STEP_SIZE = 9


class Box(NamedTuple):
    """A part of a room: its middle, its width, two lines, and the steps of both paths that it takes."""

    x: float
    width: float
    name: str
    remark: str = ""
    handle: str = ""
    dispatch: str = ""


ROOMS: tuple[tuple[str, tuple[Box, ...]], ...] = (
    (
        "callers",
        (
            Box(230, 150, "cli, commands"),
            Box(420, 170, "integrations", "vLLM, ATOM"),
            Box(640, 210, "compat", "DeepEP, MORI, Triton-distributed"),
            Box(840, 150, "your program", "make_op"),
        ),
    ),
    (
        "managers",
        (
            Box(230, 150, "parallel", "groups of ranks"),
            Box(470, 250, "managers", "config, cache of handles", "1"),
            Box(770, 250, "managers/external", "other libraries"),
        ),
    ),
    (
        "ops",
        (
            Box(270, 230, "op, checked calls", "order, checks, results", "", "1"),
            Box(530, 210, "factory", "which engine, which memory", "2"),
            Box(790, 210, "telemetry", "counters, traces"),
        ),
    ),
    (
        "engines",
        (
            Box(270, 230, "IntraNode", "stores inside a node", "", "2"),
            Box(530, 210, "Ring", "between nodes: stores or puts", "", "2"),
            Box(790, 210, "Staged", "between nodes: host exchanges", "", "2"),
        ),
    ),
    (
        "kernels",
        (
            Box(330, 350, "dispatch and combine in Triton", "one source for GPU and CPU", "", "4"),
            Box(720, 350, "compiled kernels", "launched with addresses", "4", "3"),
        ),
    ),
    (
        "memory",
        (
            Box(220, 130, "arena", "lifetimes", "3"),
            Box(350, 110, "peers", "who is alive"),
            Box(520, 210, "host memory", "symmetric, CUDA IPC, /dev/shm"),
            Box(680, 98, "NVSHMEM", "heap"),
            Box(792, 114, "transports", "of the host"),
            Box(900, 82, "topology", "nodes"),
        ),
    ),
    (
        "ground",
        (
            Box(270, 230, "interface, reference", "contract, oracle"),
            Box(530, 210, "policy, routing"),
            Box(790, 210, "config, env, errors"),
        ),
    ),
)


def draw_step(picture: Picture, x: float, y: float, number: str, colour: str) -> None:
    """The number of a step in a circle."""
    picture.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{STEP_SIZE}" fill="{colour}"/>')
    picture.text(x, y, number, size=12, fill=picture.theme.on_colour, weight=700)


def draw_box(picture: Picture, box: Box, y: float) -> None:
    """A part of a room, with the steps at its upper corners."""
    theme, shift = picture.theme, 9 if box.remark else 0
    picture.box(box.x, y, box.width, BOX_HEIGHT, stroke=theme.faint, fill=theme.page)
    picture.text(box.x, y - shift, box.name, size=14, weight=600)
    if box.remark:
        picture.text(box.x, y + 10, box.remark, size=12, fill=theme.faint)
    top = y - BOX_HEIGHT / 2
    if box.handle:
        draw_step(picture, box.x + box.width / 2 - 4, top + 4, box.handle, theme.colours[COMBINE])
    if box.dispatch:
        draw_step(picture, box.x - box.width / 2 + 4, top + 4, box.dispatch, theme.colours[DISPATCH])


def draw(theme: Theme) -> str:
    """The picture for one theme."""
    picture = Picture(theme, TITLE, HEIGHT)
    draw_step(picture, 190, 26, "1", theme.colours[DISPATCH])
    picture.text(206, 26, "a warm dispatch, every step", anchor="start", fill=theme.colours[DISPATCH], weight=600)
    draw_step(picture, 530, 26, "1", theme.colours[COMBINE])
    picture.text(546, 26, "the life of a handle, once", anchor="start", fill=theme.colours[COMBINE], weight=600)
    for number, (room, boxes) in enumerate(ROOMS):
        y = LANE_TOP + number * (LANE_HEIGHT + LANE_GAP) + LANE_HEIGHT / 2
        picture.box((LANE_LEFT + WIDTH - 8) / 2, y, WIDTH - 8 - LANE_LEFT, LANE_HEIGHT, fill=theme.lane)
        picture.text(LANE_LEFT + 10, y, room, size=13, anchor="start", fill=theme.faint, weight=600)
        for box in boxes:
            draw_box(picture, box, y)
    bottom = LANE_TOP + len(ROOMS) * (LANE_HEIGHT + LANE_GAP) - LANE_GAP
    picture.parts.append(f'<path d="M{LABEL_X},{LANE_TOP} V{bottom - 12}" stroke="{theme.faint}" stroke-width="2"/>')
    picture.parts.append(f'<path d="M{LABEL_X},{bottom} l-5,-12 h10 z" fill="{theme.faint}"/>')
    middle = (LANE_TOP + bottom) / 2
    turned = f'transform="rotate(-90 {LABEL_X - 10} {middle:g})" text-anchor="middle" font-size="13"'
    picture.parts.append(f'<text x="{LABEL_X - 10}" y="{middle:g}" {turned} fill="{theme.faint}">imports</text>')
    return picture.svg()


if __name__ == "__main__":
    main("architecture", draw, __doc__)
