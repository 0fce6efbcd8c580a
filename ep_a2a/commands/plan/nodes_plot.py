"""Predicted time and bytes against the number of GPUs. matplotlib is optional and loaded here only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.bench.plot import DOTS_PER_INCH, check_can_plot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ep_a2a.commands.simulation.predict import Prediction

STYLES = {"node": "-", "rank": "--", "expert": ":"}
MB, GB = 1e6, 1e9


def plot_predictions(found: Sequence[Prediction], path: Path) -> None:
    """Writes a picture of three panels: times, bytes through a NIC, buffers; a line for each number of copies.

    Args:
        found: of one shape. path: *.png or *.svg.

    Raises:
        MissingPackageError, ConfigError: as ep_a2a.commands.bench.plot.check_can_plot.
    """
    check_can_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    labels = ("time, µs", "bytes sent by a GPU's NIC, MB", "buffers of a GPU, GB")
    times, wires, buffers = axes = figure.subplots(1, 3)
    ranks = sorted({each.cluster.num_ranks for each in found})
    for panel, label in zip(axes, labels):
        panel.set(xscale="log", xlabel="GPUs (EP size)", ylabel=label)
        panel.set_xticks(ranks, [str(count) for count in ranks])
        panel.minorticks_off()
        panel.grid(visible=True, alpha=0.3)
    for copies in dict.fromkeys(each.copies for each in found):
        line = [each for each in found if each.copies is copies]
        x, style = [each.cluster.num_ranks for each in line], {"linestyle": STYLES[copies], "marker": "o"}
        name = f"a copy per {copies}"
        times.plot(x, [each.dispatch_us for each in line], color="C0", label=f"dispatch, {name}", **style)
        times.plot(x, [each.combine_us for each in line], color="C1", label=f"combine, {name}", **style)
        sent = [(each.nic_dispatch_bytes / MB, each.nic_combine_bytes / MB) for each in line]
        wires.plot(x, [dispatch for dispatch, _ in sent], color="C0", label=f"dispatch, {name}", **style)
        wires.plot(x, [combine for _, combine in sent], color="C1", label=f"combine, {name}", **style)
        buffers.plot(x, [each.buffer_bytes / GB for each in line], color="C2", label=name, **style)
    for panel in axes:
        panel.set_ylim(bottom=0)
        panel.legend(fontsize="small")
    shape = found[0].shape
    figure.suptitle(f"PREDICTED, not measured: {shape.num_tokens} tokens per GPU, {found[0].cluster.nic_gbps:g} Gb/s")
    figure.savefig(path, format=path.suffix[1:], dpi=DOTS_PER_INCH)
