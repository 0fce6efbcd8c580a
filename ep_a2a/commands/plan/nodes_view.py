"""Shows predictions as tables, on a terminal and in markdown."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING

from ep_a2a.commands.markdown import table_lines
from ep_a2a.commands.simulation.cluster import (
    FINISH_US,
    NIC_EFFICIENCY,
    NIC_LATENCY_US,
    NVLINK_GB_PER_S,
    NVLINK_HOP_US,
    START_US,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ep_a2a.commands.simulation.predict import Prediction
    from ep_a2a.commands.simulation.published import Compared

MIB, MB = 1 << 20, 1e6
PREDICTED = "PREDICTED by a simulator, not measured; kernels between nodes have not run over a network."
CONSTANTS = (
    f"Constants: start {START_US} µs, NVLink {NVLINK_GB_PER_S:g} GB/s and {NVLINK_HOP_US} µs, NIC {NIC_LATENCY_US} µs "
    f"and {NIC_EFFICIENCY:.1%} of its rate, end {FINISH_US} µs; simulation/cluster.py says where they come from."
)


@dataclass(frozen=True)
class Report:
    """A table with a title above and notes below.

    Attributes:
        title, headings, rows, notes: its texts.
        num_group_columns: first columns, by which a terminal's tables are grouped; their texts are the tables' titles.
        num_names: columns behind those that name a row.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    num_group_columns: int
    num_names: int

    def as_tables(self, width: int) -> RenderableType:
        """Returns the report for a terminal of `width` characters: a table for each group of rows."""
        from rich.console import Group
        from rich.text import Text

        from ep_a2a.commands.wide_tables import fitting_tables

        first = self.num_group_columns
        tables = []
        for group, rows in groupby(self.rows, key=lambda row: row[:first]):
            cells = [row[first:] for row in rows]
            right = {heading for heading, text in zip(self.headings[first:], cells[0]) if text[-1:].isdigit()}
            tables += fitting_tables(
                ", ".join(group), self.headings[first:], cells, num_names=self.num_names, width=width, right=right
            )
        title = Text(self.title, style="italic")
        return Group(Text(PREDICTED, style="bold yellow"), title, *tables, *(Text(note) for note in self.notes))

    def as_markdown(self) -> str:
        """Returns the report as markdown."""
        lines = [f"# {self.title}", "", f"**{PREDICTED}**", "", *table_lines(self.headings, self.rows), ""]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)]) + "\n"


def report_of(found: Sequence[Prediction]) -> Report:
    """Returns the table of predictions, a row for each."""
    cluster, shape = found[0].cluster, found[0].shape
    cast = "cast to fp8 (1x128)" if shape.casts else "bf16"
    return Report(
        f"{shape.num_tokens} tokens per GPU, hidden size {shape.hidden_dim}, top-{shape.topk} of {shape.num_experts} "
        f"experts, dispatch {cast}, combine bf16, {cluster.gpus_per_node} GPUs per node, NICs of {cluster.nic_gbps:g} "
        "Gb/s",
        (
            "GPUs",
            "nodes",
            "copy per",
            "dispatch µs",
            "combine µs",
            "copies to other nodes",
            "NIC MB dispatch",
            "NIC MB combine",
            "buffers MiB",
            "experts' rows MiB",
        ),
        tuple(
            (
                str(each.cluster.num_ranks),
                str(each.cluster.num_nodes),
                each.copies.value,
                f"{each.dispatch_us:.1f}",
                f"{each.combine_us:.1f}",
                f"{each.remote_copies:.3f}",
                f"{each.nic_dispatch_bytes / MB:.2f}",
                f"{each.nic_combine_bytes / MB:.2f}",
                f"{each.buffer_bytes / MIB:,.0f}",
                f"{each.expert_rows_bytes / MIB:,.0f}",
            )
            for each in found
        ),
        (
            f"copy per node: InterNodeV1, chunks of {cluster.chunk_tokens} tokens, {cluster.num_credits} credits",
            "copy per rank: each row goes straight to its rank, without dedup by node",
            "times until the last GPU is done, one uniform routing; bytes and copies by exact formula, per GPU",
            "buffers: what crossing needs. experts' rows: what experts read, at worst all tokens of all ranks",
            "with more GPUs than experts each expert has as many copies as it takes to fill them",
            CONSTANTS,
        ),
        num_group_columns=0,
        num_names=3,
    )


def report_of_published(found: Sequence[Compared]) -> Report:
    """Returns the table of published times beside predicted ones, a row for dispatch and one for combine."""
    errors = [each.error_percent for each in found]
    by_library: dict[str, list[float]] = {}
    for each in found:
        by_library.setdefault(each.published.source, []).append(each.error_percent)
    return Report(
        "Published times between nodes beside the simulator's",
        ("library", "machines", "GPUs", "tokens", "copy per", "phase", "published µs", "predicted µs", "error %"),
        tuple(
            (
                each.published.source,
                each.published.machine,
                str(each.published.num_ranks),
                str(each.published.shape.num_tokens),
                each.published.copies.value,
                each.phase.value,
                f"{each.published_us:.1f}",
                f"{each.predicted_us:.1f}",
                f"{each.error_percent:+.1f}",
            )
            for each in found
        ),
        (
            f"error: predicted over published, less 1; median {median(errors):+.1f} %, "
            f"of absolute values {median(map(abs, errors)):.1f} %, {len(errors)} rows",
            "median by library: " + ", ".join(f"{name} {median(some):+.1f} %" for name, some in by_library.items()),
            "published: the authors' claims; where they give logical GB/s the time follows from the rows they count",
            "no constant is fitted to a row; NVLink of H800 and links of MI300X and MI355X are the same documents'",
            CONSTANTS,
        ),
        num_group_columns=2,
        num_names=4,
    )
