"""Draws the demo's traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ep_a2a
from ep_a2a.commands import plots

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ep_a2a.commands.demo.settings import DemoSettings


def plot_traffic(report: Mapping[str, Any], settings: DemoSettings, path: Path) -> tuple[Path, Path]:
    """Writes a heat map of the rows that each rank sends to each rank; raises as `plots.write`.

    Args:
        report: of the demo. settings: that it ran with. path: *.png or *.svg.
    """
    rows: list[list[int]] = report["rows"]
    total = sum(map(sum, rows))
    crossing = total - sum(row[rank] for rank, row in enumerate(rows))
    caption = plots.Caption(
        f"Dispatch sends {crossing:,} of {total:,} rows to another rank",
        "Rows from each rank (down) to each rank (across); the diagonal stays on its rank",
        f"backend {report['backend']}, {settings.num_tokens} tokens, EP {settings.num_ranks}, "
        f"top-{settings.topk} of {settings.num_experts} experts · ep_a2a {ep_a2a.__version__}, ep-a2a demo",
    )
    return plots.write(path, plots.cells, plots.between_ranks(rows), ("to rank", "from rank"), caption, "rows")
