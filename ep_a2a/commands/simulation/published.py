"""Compares published times of other libraries between nodes with the simulator's.

Times are the authors' claims, read in their documents in 2026 (DeepEP: README and docs/legacy.md; pplx-garden:
docs/fabric-lib.md; NCCL: contrib/nccl_ep/README.md; MORI: README); none was measured by this project. All are for
DeepSeek-V3's shape and NICs of 400 Gb/s, eight GPUs per node.

Of published.csv, gb_per_s_row_bytes is empty where dispatch and combine are microseconds. Else they are GB/s, "logical"
ones, which count rows that stay in the token's own node; the column says how many bytes they count of a row of dispatch
(MORI's leave scales out), and times follow. nvlink_gb_per_s is the rate inside a node: for H800 the highest by DeepEP's
document; for MI300X and MI355X MORI's own figure for dispatch with eight GPUs, 307 and 345 GB/s, of which 7/8 leave the
GPU; else NVLINK_GB_PER_S of simulator.py, where the column is empty.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ep_a2a.commands.simulation.simulator import BYTES_PER_US, NVLINK_GB_PER_S, Cluster, Copies, Phase, Shape, predict


class Published(NamedTuple):
    """One line of a published table.

    Attributes:
        source: whose table. machine: GPUs and NICs.
        num_ranks: eight per node. shape: tokens and types. copies: how often the library sends a token.
        dispatch, combine: microseconds, or GB/s (1e9) of logical rows where row_bytes is not 0.
        row_bytes: of dispatch, as GB/s count them.
        nvlink_gb_per_s: inside a node, by the same source; else as measured here.
    """

    source: str
    machine: str
    num_ranks: int
    shape: Shape
    copies: Copies
    dispatch: float
    combine: float
    row_bytes: int
    nvlink_gb_per_s: float


class Compared(NamedTuple):
    """A predicted time beside a published one, in microseconds, for one phase of one line."""

    published: Published
    phase: Phase
    published_us: float
    predicted_us: float

    @property
    def error_percent(self) -> float:
        """Relative error of the prediction; below 0 it is too fast."""
        return (self.predicted_us / self.published_us - 1) * 100


def published_tables() -> list[Published]:
    """Returns all lines of published.csv, by source."""
    with (Path(__file__).parent / "published.csv").open(encoding="utf-8", newline="") as file:
        return [
            Published(
                row["source"],
                row["machine"],
                int(row["num_ranks"]),
                Shape(int(row["num_tokens"]), casts=row["casts"] == "fp8", max_nodes=int(row["max_nodes"])),
                Copies(row["copies"]),
                float(row["dispatch"]),
                float(row["combine"]),
                int(row["gb_per_s_row_bytes"] or 0),
                float(row["nvlink_gb_per_s"] or NVLINK_GB_PER_S),
            )
            for row in csv.DictReader(file)
        ]


def compare(published: Published) -> tuple[Compared, Compared]:
    """Returns the comparison of dispatch and of combine for one line."""
    shape, cluster = published.shape, Cluster(published.num_ranks // 8, nvlink_gb_per_s=published.nvlink_gb_per_s)
    found = predict(cluster, shape, published.copies)
    # A logical bandwidth counts a rank's rows for all nodes, its own included.
    rows = found.copies * shape.num_tokens / BYTES_PER_US if published.row_bytes else 0
    dispatch_us = rows * published.row_bytes / published.dispatch or published.dispatch
    combine_us = rows * shape.combine_row_bytes / published.combine or published.combine
    return (
        Compared(published, Phase.DISPATCH, dispatch_us, found.dispatch_us),
        Compared(published, Phase.COMBINE, combine_us, found.combine_us),
    )


@cache
def nearest(num_tokens: int, copies: Copies) -> list[Compared]:
    """Returns the comparisons that are most like an exchange: nearest in tokens, of all numbers of nodes.

    With a copy per rank rows go straight to their GPUs, as with a copy per expert, of which there are published times.
    """
    like = [each for each in published_tables() if (each.copies is Copies.NODE) == (copies is Copies.NODE)]
    tokens = min((each.shape.num_tokens for each in like), key=lambda each: abs(math.log(each / num_tokens)))
    return [found for each in like if each.shape.num_tokens == tokens for found in compare(each)]
