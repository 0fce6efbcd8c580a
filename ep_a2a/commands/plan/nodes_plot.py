"""Draws predicted times and bytes against the number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.plotting import Panel, plot_panels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ep_a2a.commands.simulation.predict import Prediction

STYLES = {"node": "-", "rank": "--", "expert": ":"}
MB, GB = 1e6, 1e9
X_LABEL = "GPUs (EP size)"


def plot_predictions(found: Sequence[Prediction], path: Path) -> None:
    """Writes a picture of three panels: times, bytes through a NIC, buffers; a line for each number of copies.

    Args:
        found: of one shape. path: *.png or *.svg.

    Raises:
        MissingPackageError, ConfigError: as ep_a2a.commands.plotting.check_can_plot.
    """
    ticks = {count: str(count) for count in sorted({each.cluster.num_ranks for each in found})}
    panels = times, wires, buffers = tuple(
        Panel(X_LABEL, label, ticks) for label in ("time, µs", "bytes sent by a GPU's NIC, MB", "buffers of a GPU, GB")
    )

    def draw(panel: Panel, label: str, color: str, copies: str, value: Callable[[Prediction], float]) -> None:
        points = [(each.cluster.num_ranks, value(each)) for each in found if each.copies == copies]
        panel.lines.append((label, points, {"color": color, "linestyle": STYLES[copies], "marker": "o"}))

    for copies in dict.fromkeys(each.copies for each in found):
        name = f"a copy per {copies}"
        draw(times, f"dispatch, {name}", "C0", copies, lambda each: each.dispatch_us)
        draw(times, f"combine, {name}", "C1", copies, lambda each: each.combine_us)
        draw(wires, f"dispatch, {name}", "C0", copies, lambda each: each.nic_dispatch_bytes / MB)
        draw(wires, f"combine, {name}", "C1", copies, lambda each: each.nic_combine_bytes / MB)
        draw(buffers, name, "C2", copies, lambda each: each.buffer_bytes / GB)
    tokens, gbps = found[0].shape.num_tokens, found[0].cluster.nic_gbps
    plot_panels(panels, f"PREDICTED, not measured: {tokens} tokens per GPU, {gbps:g} Gb/s", path)
