"""Draws what the self-test measured between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ep_a2a
from ep_a2a.commands.plot_cells import plot_checks, plot_matrix
from ep_a2a.commands.plot_style import Caption

if TYPE_CHECKING:
    from pathlib import Path

    from ep_a2a.commands.doctor.selftest import SelfTest


def plot_rates(test: SelfTest, path: Path) -> tuple[Path, Path]:
    """Writes a heat map of the rates between ranks, on CPU which pairs passed; raises as `write_picture`.

    Args:
        test: what was measured. path: *.png or *.svg.
    """
    rates = [[rate or None for rate in row] for row in test.gb_per_s]
    known = [rate for row in rates for rate in row if rate is not None]
    failed = [pair for pair, result in test.pairs.items() if isinstance(result, str)]
    footer = f"EP {test.num_ranks} on {test.device} · ep_a2a {ep_a2a.__version__}, ep-a2a doctor --selftest"
    if test.note:
        footer += f"\n{test.note}"
    if test.device == "cpu":
        words = f"{len(test.pairs) - len(failed)} of {len(test.pairs)} pairs exchange bytes and flags"
        ranks = [str(rank) for rank in range(test.num_ranks)]
        rows: dict[str, dict[str, bool | None]] = {
            a: {b: None if a == b else rates[int(a)][int(b)] is not None for b in ranks} for a in ranks
        }
        caption = Caption(f"Functional check: {words}", "Over shared memory: says nothing about speed", footer)
        return plot_checks(rows, caption, ("to rank", "from rank"), path)
    span = f": {min(known):.3g} to {max(known):.3g} GB/s" if known else ": nothing was measured"
    reading = "From rank (down) to rank (across), pair by pair; grey: not measured"
    if failed:
        reading += f" (failed: {', '.join(f'{a} and {b}' for a, b in failed)})"
    return plot_matrix(rates, Caption(f"Rates of pushes between ranks{span}", reading, footer), "GB/s", path)
