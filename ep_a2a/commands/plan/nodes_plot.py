"""Draws predicted times and bytes against the number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ep_a2a
from ep_a2a.commands import plots
from ep_a2a.commands.plots import (
    BINARY_UNITS,
    BUFFERS,
    BYTE_UNITS,
    COMBINE,
    DISPATCH,
    TIME_UNITS,
    Caption,
    Panel,
    unit_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ep_a2a.commands.simulation.predict import Prediction

STYLES = {"node": "-", "rank": "--", "expert": ":"}
X_LABEL = "GPUs (EP size)"
KEY = {"dispatch": DISPATCH, "combine": COMBINE, "buffers": BUFFERS}


def plot_predictions(found: Sequence[Prediction], path: Path) -> tuple[Path, Path]:
    """Writes a picture of three panels: times, bytes through a NIC, buffers; a line for each number of copies.

    Args:
        found: of one shape. path: *.png or *.svg.

    Raises:
        MissingPackageError, ConfigError: as ep_a2a.commands.plots.write.
    """
    ticks = {count: str(count) for count in sorted({each.cluster.num_ranks for each in found})}
    values: dict[str, tuple[Sequence[tuple[float, str]], dict[str, Callable[[Prediction], float]]]] = {
        "time": (TIME_UNITS, {"dispatch": lambda each: each.dispatch_us, "combine": lambda each: each.combine_us}),
        "sent by a GPU's NIC": (
            BYTE_UNITS,
            {"dispatch": lambda each: each.nic_dispatch_bytes, "combine": lambda each: each.nic_combine_bytes},
        ),
        "buffers of a GPU": (BINARY_UNITS, {"buffers": lambda each: each.buffer_bytes}),
    }
    copies = list(dict.fromkeys(each.copies for each in found))
    panels = []
    for label, (units, lines) in values.items():
        size, unit = unit_for(max(value(each) for each in found for value in lines.values()), units)
        panel = Panel(X_LABEL, f"{label} ({unit})", ticks)
        for name, value in lines.items():
            for kind in copies:
                points = [(each.cluster.num_ranks, value(each) / size) for each in found if each.copies == kind]
                style = {"color": f"C{KEY[name]}", "linestyle": STYLES[kind], "marker": "o"}
                panel.lines.append((f"{name}, a copy per {kind}", points, style))
        panels.append(panel)
    key = [(name, {"color": f"C{number}"}) for name, number in KEY.items()]
    key += [(f"a copy per {kind}", {"linestyle": STYLES[kind]}) for kind in copies]
    return plots.write(path, plots.lines, panels, _caption(found), key)


def _caption(found: Sequence[Prediction]) -> Caption:
    shape, cluster = found[0].shape, found[0].cluster
    return Caption(
        "Predicted, not measured: time, traffic and memory of an exchange between nodes",
        "A simulator's values. Solid: a token crosses once to each node; dashed: once to each rank",
        f"{shape.num_tokens} tokens per GPU, hidden {shape.hidden_dim}, top-{shape.topk} of {shape.num_experts} "
        f"experts, dispatch {'fp8' if shape.casts else 'bf16'}; {cluster.gpus_per_node} GPUs per node, a NIC of "
        f"{cluster.nic_gbps:g} Gb/s per GPU · ep_a2a {ep_a2a.__version__}, ep-a2a plan --nodes",
    )
