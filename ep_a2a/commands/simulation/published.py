"""Compares published times of other libraries between nodes with the simulator's.

Times are the authors' claims, read in their documents in 2026 (DeepEP: README and docs/legacy.md; pplx-garden:
docs/fabric-lib.md; NCCL: contrib/nccl_ep/README.md; MORI: README); none was measured by this project. All are for
DeepSeek-V3's shape and NICs of 400 Gb/s. Where they give bandwidths these are "logical", they count rows that stay in
the token's own node; times follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ep_a2a.commands.simulation.cluster import NVLINK_GB_PER_S, Cluster
from ep_a2a.commands.simulation.events import BYTES_PER_US_OF_GB_PER_S
from ep_a2a.commands.simulation.exchange import Phase, simulate
from ep_a2a.commands.simulation.traffic import Copies, Shape, sample_chunks

H800_NVLINK_GB_PER_S = 160.0
"""Highest rate of an H800's NVLink, by DeepEP's document."""
MI300X_GB_PER_S = 269.0
MI355X_GB_PER_S = 302.0
"""Inside a node: MORI's own figure for dispatch with eight GPUs, 307 and 345 GB/s, of which 7/8 leave the GPU."""
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
    """Returns all lines, by source."""
    decode, prefill, twice = Shape(128), Shape(4096), Shape(8192)
    h800, hopper, mi300, mi355 = "H800 + CX7", "H100/H200 + CX7", "MI300X + CX7", "MI355X + AINIC"
    tables: list[tuple[str, str, Shape, Copies, bool, float, dict[int, tuple[float, float]]]] = [
        (
            "DeepEP V1 low latency",
            h800,
            decode,
            Copies.EXPERT,
            False,
            H800_NVLINK_GB_PER_S,
            {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)},
        ),
        (
            "DeepEP V1 low latency, timed by pplx-garden",
            hopper,
            decode,
            Copies.EXPERT,
            False,
            NVLINK_GB_PER_S,
            {16: (123.9, 203.0), 32: (159.1, 285.0), 64: (177.9, 325.0)},
        ),
        (
            "pplx-garden",
            hopper,
            decode,
            Copies.EXPERT,
            False,
            NVLINK_GB_PER_S,
            {16: (110.2, 185.5), 32: (153.9, 266.3), 64: (187.5, 309.1)},
        ),
        (
            "pplx-garden",
            hopper,
            prefill,
            Copies.EXPERT,
            False,
            NVLINK_GB_PER_S,
            {16: (2734.8, 1062.2), 32: (4011.8, 7526.8), 64: (4665.2, 8771.1)},
        ),
        (
            "NCCL EP low latency",
            "H100 + CX7",
            Shape(128, casts=False),
            Copies.EXPERT,
            True,
            NVLINK_GB_PER_S,
            {16: (76.7, 73.0), 32: (53.6, 50.0), 64: (48.8, 43.8)},
        ),
        (
            "DeepEP V1 normal",
            h800,
            Shape(4096, max_nodes=4),
            Copies.NODE,
            True,
            H800_NVLINK_GB_PER_S,
            {16: (43, 43), 32: (58, 57), 64: (51, 50)},
        ),
        ("DeepEP V2", "SM90 + CX7", twice, Copies.NODE, True, NVLINK_GB_PER_S, {16: (90, 81), 32: (61, 61)}),
        ("MORI InterNodeV1", mi300, prefill, Copies.NODE, True, MI300X_GB_PER_S, {16: (52, 67), 32: (57, 50)}),
        ("MORI InterNodeV1", mi355, prefill, Copies.NODE, True, MI355X_GB_PER_S, {16: (54, 71), 32: (46, 61)}),
        ("MORI InterNodeV1LL", mi300, decode, Copies.NODE, False, MI300X_GB_PER_S, {16: (76, 122), 32: (157, 280)}),
        ("MORI InterNodeV1LL", mi355, decode, Copies.NODE, False, MI355X_GB_PER_S, {16: (84, 108), 32: (152, 187)}),
    ]
    return [
        Published(source, machine, num_ranks, shape, copies, *times, is_bandwidth, gb_per_s)
        for source, machine, shape, copies, is_bandwidth, gb_per_s, lines in tables
        for num_ranks, times in lines.items()
    ]


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
