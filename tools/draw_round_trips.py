"""Draws round trips over tokens per rank from rows of `ep-a2a bench`, as SVG for light and dark pages.

python tools/draw_round_trips.py bench/results/2026-11-26_h100x4.jsonl docs/pictures

Of rows of one contender and size the first counts.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from draw_token_path import Picture, write_pictures

if TYPE_CHECKING:
    from ep_a2a.commands.plots import Theme

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 436, 170, 910, 72, 380
MIN_US, MAX_US = 5.0, 1200.0
TICKS_US = (10, 100, 1000)
WORDS = {2: "two", 4: "four", 8: "eight"}
SHAPE = {"quant_type": "fp8_per_1x128", "combine_quant": "none", "max_sms": 0, "gpus_per_node": 0}
LABELS = {
    "nccl_agrs": "NCCL",
    "deepep": "DeepEP",
    "flashinfer": "FlashInfer",
    "ep_a2a": "ep_a2a",
    "reference_push": "reference push",
}
FORMER_NAMES = {"wire_limit": "reference_push"}
"""Contenders by the names that older rows have."""
LABEL_SHIFT = {"nccl_agrs": -4, "deepep": 4, "ep_a2a": 8, "reference_push": -6}
"""Pixels by which the labels of two near lines are moved apart."""
SUBTITLE = "DeepSeek-V3 shape, cast to fp8 inside dispatch, bf16 combine, CUDA graph; both axes logarithmic"


def read_lines(path: Path) -> tuple[str, dict[str, dict[int, float]]]:
    """The GPUs in words, and microseconds by contender and tokens per rank."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    gpus = rows[0]["gpus"]
    rows = [row for row in rows if row.get("status") == "ok" and all(row[name] == SHAPE[name] for name in SHAPE)]
    found: dict[str, dict[int, float]] = {name: {} for name in LABELS}
    for row in rows:
        contender = FORMER_NAMES.get(row["contender"], row["contender"])
        if contender in found:
            found[contender].setdefault(row["num_tokens"], row["round_trip_us"])
    return f"{WORDS.get(len(gpus), len(gpus))} {gpus[0].split()[1]}s", found


def colour_of(theme: Theme, name: str) -> str:
    """The colour of a contender's line."""
    return dict(zip(("ep_a2a", "flashinfer", "nccl_agrs", "deepep"), theme.colours)).get(name, theme.faint)


def place(num_tokens: int, micros: float, most: int) -> tuple[float, float]:
    """Where a measurement lies in the picture."""
    across = math.log(num_tokens) / math.log(most)
    up = math.log(micros / MIN_US) / math.log(MAX_US / MIN_US)
    return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)


def draw(theme: Theme, gpus: str, lines: dict[str, dict[int, float]]) -> str:
    """The picture for one theme."""
    title = f"Round trip of dispatch and combine on {gpus}: µs over tokens per rank"
    picture = Picture(theme, title, HEIGHT)
    picture.text(24, 24, title, size=17, anchor="start", weight=600)
    picture.text(24, 48, SUBTITLE, size=13, anchor="start", fill=theme.faint)
    sizes = sorted({tokens for line in lines.values() for tokens in line})
    for micros in TICKS_US:
        y = place(1, micros, sizes[-1])[1]
        picture.parts.append(f'<path d="M{LEFT},{y:.1f} H{RIGHT}" stroke="{theme.faint}" opacity="0.35"/>')
        picture.text(RIGHT + 8, y, f"{micros}", size=12, anchor="start", fill=theme.faint)
    for tokens in sizes:
        picture.text(place(tokens, MIN_US, sizes[-1])[0], BOTTOM + 18, f"{tokens}", size=12, fill=theme.faint)
    picture.text((LEFT + RIGHT) / 2, BOTTOM + 42, "tokens per rank", size=13, fill=theme.faint)
    for name, line in lines.items():
        colour = colour_of(theme, name)
        points = [place(tokens, micros, sizes[-1]) for tokens, micros in sorted(line.items())]
        path = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if name == "reference_push" else ""
        picture.parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"{dash}/>')
        if not dash:
            picture.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
        x, y = points[0]
        label = f"{LABELS[name]} {line[sizes[0]]:.1f}"
        weight = 700 if name == "ep_a2a" else 500
        picture.text(x - 12, y + LABEL_SHIFT.get(name, 0), label, size=14, anchor="end", fill=colour, weight=weight)
    return picture.svg()


def main() -> None:
    """Writes round_trips_light.svg and round_trips_dark.svg into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="JSON lines of `ep-a2a bench`")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    gpus, lines = read_lines(options.rows)
    write_pictures("round_trips", lambda theme: draw(theme, gpus, lines), options.folder)


if __name__ == "__main__":
    main()
