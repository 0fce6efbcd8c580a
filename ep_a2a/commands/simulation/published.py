"""Compares published times of other libraries between nodes with the simulator's.

Times are the authors' claims, read in their documents in 2026 (DeepEP: README and docs/legacy.md; pplx-garden:
docs/fabric-lib.md; NCCL: contrib/nccl_ep/README.md; MORI: README); none was measured by this project. All are for
DeepSeek-V3's shape and NICs of 400 Gb/s. Where they give bandwidths these are "logical", they count rows that stay in
the token's own node; times follow from them.

The column nvlink_gb_per_s of published.csv is the rate inside a node: for H800 the highest by DeepEP's document; for
MI300X and MI355X MORI's own figure for dispatch with eight GPUs, 307 and 345 GB/s, of which 7/8 leave the GPU; else
NVLINK_GB_PER_S of cluster.py, where the column is empty.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ep_a2a.commands.simulation.cluster import NVLINK_GB_PER_S, Cluster
from ep_a2a.commands.simulation.exchange import BYTES_PER_US_OF_GB_PER_S, Phase, simulate
from ep_a2a.commands.simulation.traffic import Copies, Shape, sample_chunks

COUNT_NO_SCALES = frozenset({"MORI InterNodeV1"})
"""Sources whose bandwidths count elements only; the others count the scales of fp8 rows too."""


@dataclass(frozen=True)
class Published:
    """One line of a published table.

    Attributes:
        source: whose table. machine: GPUs and NICs.
        num_ranks: eight per node. shape: tokens and types. copies: how often the library sends a token.
        dispatch, combine: microseconds, or GB/s (1e9) of logical rows where is_bandwidth.
        nvlink_gb_per_s: inside a node, by the same source; else as measured here.
    """

    source: str
    machine: str
    num_ranks: int
    shape: Shape
    copies: Copies
    dispatch: float
    combine: float
    is_bandwidth: bool = False
    nvlink_gb_per_s: float = NVLINK_GB_PER_S

    @property
    def cluster(self) -> Cluster:
        """The machines, with NICs of 400 Gb/s."""
        return Cluster(self.num_ranks // 8, nvlink_gb_per_s=self.nvlink_gb_per_s)


@dataclass(frozen=True)
class Compared:
    """A predicted time beside a published one, in microseconds, for one phase of one line."""

    published: Published
    phase: Phase
    published_us: float
    predicted_us: float

    @property
    def error_percent(self) -> float:
        """Relative error of the prediction; below 0 it is too fast."""
        return (self.predicted_us / self.published_us - 1) * 100

    def as_json_object(self) -> dict[str, Any]:
        """Returns the fields for --json."""
        return {
            "source": self.published.source,
            "machine": self.published.machine,
            "ranks": self.published.num_ranks,
            "tokens": self.published.shape.num_tokens,
            "copy_per": self.published.copies.value,
            "phase": self.phase.value,
            "published_us": round(self.published_us, 1),
            "predicted_us": round(self.predicted_us, 1),
            "error_percent": round(self.error_percent, 1),
        }


def published_tables() -> list[Published]:
    """Returns all lines of published.csv, by source."""
    with (Path(__file__).parent / "published.csv").open(encoding="utf-8", newline="") as file:
        return [_line_of(row) for row in csv.DictReader(file)]


def _line_of(row: dict[str, str]) -> Published:
    return Published(
        row["source"],
        row["machine"],
        int(row["num_ranks"]),
        Shape(int(row["num_tokens"]), casts=row["casts"] == "fp8", max_nodes=int(row["max_nodes"])),
        Copies(row["copies"]),
        float(row["dispatch"]),
        float(row["combine"]),
        is_bandwidth=row["unit"] == "GB/s",
        nvlink_gb_per_s=float(row["nvlink_gb_per_s"] or NVLINK_GB_PER_S),
    )


def compare(published: Published, seed: int = 0) -> tuple[Compared, Compared]:
    """Returns the comparison of dispatch and of combine for one line."""
    cluster, shape, copies = published.cluster, published.shape, published.copies
    chunks = sample_chunks(cluster, shape, copies, seed)
    # A logical bandwidth counts a rank's rows for all nodes, its own included.
    rows = sum(chunk.num_records for source in chunks for node in source for chunk in node) / cluster.num_nodes

    counts_scales = published.source not in COUNT_NO_SCALES
    dispatch_row_bytes = shape.dispatch_row_bytes if counts_scales else shape.hidden_dim * (1 if shape.casts else 2)

    def compared(phase: Phase, value: float, row_bytes: int) -> Compared:
        published_us = rows * row_bytes / (value * BYTES_PER_US_OF_GB_PER_S) if published.is_bandwidth else value
        return Compared(published, phase, published_us, simulate(cluster, shape, copies, phase, chunks))

    return (
        compared(Phase.DISPATCH, published.dispatch, dispatch_row_bytes),
        compared(Phase.COMBINE, published.combine, shape.combine_row_bytes),
    )
