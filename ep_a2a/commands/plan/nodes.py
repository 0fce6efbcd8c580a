"""Predicts exchanges between nodes, for `ep-a2a plan --nodes` and `--published`: tables, markdown and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

import ep_a2a
from ep_a2a.commands import messages, plots
from ep_a2a.commands.files import check_can_write, different_files, give_json, write_text
from ep_a2a.commands.options import given, refuse, values_of_fields
from ep_a2a.commands.simulation import cluster as constants
from ep_a2a.commands.simulation import published
from ep_a2a.commands.simulation.cluster import Cluster
from ep_a2a.commands.simulation.predict import predict
from ep_a2a.commands.simulation.traffic import Copies, Shape
from ep_a2a.commands.tables import fitting_tables, table_lines
from ep_a2a.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import SimpleNamespace

    from rich.console import RenderableType

    from ep_a2a.commands.simulation.predict import Prediction
    from ep_a2a.commands.simulation.published import Compared

CASTS = ("none", "fp8_per_1x128")
"""Casts of dispatch that the simulator knows; combine's rows are bf16."""
UNKNOWN = ("layout", "combine_quant", "scale_format", "max_total_recv_tokens", "flagged_max_tokens", "dtype")
"""Options of an op that the simulator does not know."""

MIB, MB = 1 << 20, 1e6
PREDICTED = "PREDICTED by a simulator, not measured; kernels between nodes have not run over a network."
CONSTANTS = (
    f"Constants: start {constants.START_US} µs, NVLink {constants.NVLINK_GB_PER_S:g} GB/s and "
    f"{constants.NVLINK_HOP_US} µs, NIC {constants.NIC_LATENCY_US} µs and {constants.NIC_EFFICIENCY:.1%} of its rate, "
    f"end {constants.FINISH_US} µs; simulation/cluster.py says where they come from."
)
COLUMNS: dict[str, Callable[[Prediction], str]] = {
    "GPUs": lambda each: str(each.cluster.num_ranks),
    "nodes": lambda each: str(each.cluster.num_nodes),
    "copy per": lambda each: each.copies.value,
    "dispatch µs": lambda each: f"{each.dispatch_us:.1f}",
    "combine µs": lambda each: f"{each.combine_us:.1f}",
    "copies to other nodes": lambda each: f"{each.remote_copies:.3f}",
    "NIC MB dispatch": lambda each: f"{each.nic_dispatch_bytes / MB:.2f}",
    "NIC MB combine": lambda each: f"{each.nic_combine_bytes / MB:.2f}",
    "buffers MiB": lambda each: f"{each.buffer_bytes / MIB:,.0f}",
    "experts' rows MiB": lambda each: f"{each.expert_rows_bytes / MIB:,.0f}",
}
COMPARED_COLUMNS: dict[str, Callable[[Compared], str]] = {
    "library": lambda each: each.published.source,
    "machines": lambda each: each.published.machine,
    "GPUs": lambda each: str(each.published.num_ranks),
    "tokens": lambda each: str(each.published.shape.num_tokens),
    "copy per": lambda each: each.published.copies.value,
    "phase": lambda each: each.phase.value,
    "published µs": lambda each: f"{each.published_us:.1f}",
    "predicted µs": lambda each: f"{each.predicted_us:.1f}",
    "error %": lambda each: f"{each.error_percent:+.1f}",
}
STYLES = {"node": "-", "rank": "--", "expert": ":"}
COLOURS = {"dispatch": plots.DISPATCH, "combine": plots.COMBINE, "buffers": plots.BUFFERS}


def predictions(
    nodes: Sequence[int], shape: Shape, ranks: int | None = None, seed: int = 0, **of_cluster: Any
) -> list[Prediction]:
    """Returns predictions for a copy per node and a copy per rank, for each number of nodes.

    Args:
        nodes: numbers of nodes. shape: the tokens of a step. seed: of the routing.
        ranks: None, or what nodes times GPUs of a node must be.
        of_cluster: other fields of Cluster.

    Raises:
        ConfigError: numbers are impossible, or do not agree.
    """
    clusters = [Cluster(count, **of_cluster) for count in nodes]
    for each in clusters:
        if ranks not in (None, each.num_ranks):
            expected = f"{each.num_ranks}, which is --nodes {each.num_nodes} x --gpus-per-node {each.gpus_per_node}"
            raise ConfigError(expected, str(ranks), "Leave --ranks out, or make them agree.", field="ranks")
    return [predict(cluster, shape, copies, seed) for cluster in clusters for copies in (Copies.NODE, Copies.RANK)]


def chosen_predictions(options: SimpleNamespace) -> list[Prediction]:
    """Returns the predictions that options of `ep-a2a plan` ask for; raises as `predictions`, and UnsupportedError."""
    quant = "none" if options.quant is None else options.quant.value
    if quant not in CASTS:
        raise UnsupportedError(f"{' or '.join(CASTS)} with --nodes", quant, "Choose one of these.", field="quant")
    of_shape = given(values_of_fields(options, ("hidden_dim", "topk", "num_experts")))
    shape = Shape(options.max_tokens or 4096, casts=quant != "none", **of_shape)
    of_cluster = given(values_of_fields(options, ("gpus_per_node", "nic_gbps", "chunk_tokens", "num_credits")))
    return predictions(options.nodes, shape, options.ranks, options.seed or 0, **of_cluster)


def show_nodes(options: SimpleNamespace, values: Mapping[str, Any]) -> None:
    """Prints and writes predictions, or published times of other libraries beside the simulator's.

    Args:
        options: of `ep-a2a plan`.
        values: those of its options that could act on predictions, None where not given.

    Raises:
        ConfigError: as `predictions`, or an option is given that has no effect.
    """
    if options.published:
        without_effect = {name: value for name, value in values.items() if name != "markdown"}
        refuse(without_effect, "with --published", "Leave it out: the published tables decide it.")
    else:
        without_effect = {name: values[name] for name in UNKNOWN}
        refuse(without_effect, "with --nodes", "Leave it out: the simulator does not know it.")
    different_files(options.markdown, options.plot, options.output)
    check_can_write(options.markdown)
    if options.plot is not None:
        plots.check_can_plot(options.plot)
    found: list[Any]
    if options.published:
        found = [each for line in published.published_tables() for each in published.compare(line)]
        report, key = report_of_published(found), "compared"
    else:
        found = chosen_predictions(options)
        report, key = report_of(found), "predictions"
        if options.plot is not None:
            plot_predictions(found, options.plot)
    if options.markdown is not None:
        write_text(options.markdown, report.as_markdown())
    give_json({key: [each.as_json_object() for each in found]}, options.output, as_json=options.as_json)
    if not options.as_json:
        console = messages.output()
        console.print(report.as_tables(console.width))


@dataclass(frozen=True)
class Report:
    """A table with a title above and notes below.

    Attributes:
        title: above the table.
        columns: the text of a cell, by heading; takes one of `found`.
        found: what the rows show.
        notes: below the table.
        num_group_columns: first columns, by which a terminal's tables are grouped; their texts are the tables' titles.
        num_names: columns behind those that name a row.
    """

    title: str
    columns: Mapping[str, Callable[[Any], str]]
    found: Sequence[Any]
    notes: tuple[str, ...]
    num_group_columns: int
    num_names: int

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The texts of the table."""
        return [tuple(text(each) for text in self.columns.values()) for each in self.found]

    def as_tables(self, width: int) -> RenderableType:
        """Returns the report for a terminal of `width` characters: a table for each group of rows."""
        first = self.num_group_columns
        headings = list(self.columns)[first:]
        tables = []
        for group, rows in groupby(self.rows, key=lambda row: row[:first]):
            cells = [row[first:] for row in rows]
            right = {heading for heading, text in zip(headings, cells[0]) if text[-1:].isdigit()}
            tables += fitting_tables(
                ", ".join(group), headings, cells, num_names=self.num_names, width=width, right=right
            )
        title = Text(self.title, style="italic")
        return Group(Text(PREDICTED, style="bold yellow"), title, *tables, *map(Text, self.notes))

    def as_markdown(self) -> str:
        """Returns the report as markdown."""
        lines = [f"# {self.title}", "", f"**{PREDICTED}**", "", *table_lines(list(self.columns), self.rows), ""]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)]) + "\n"


def report_of(found: Sequence[Prediction]) -> Report:
    """Returns the table of predictions, a row for each."""
    cluster, shape = found[0].cluster, found[0].shape
    title = (
        f"{shape.num_tokens} tokens per GPU, hidden size {shape.hidden_dim}, top-{shape.topk} of {shape.num_experts} "
        f"experts, dispatch {'cast to fp8 (1x128)' if shape.casts else 'bf16'}, combine bf16, {cluster.gpus_per_node} "
        f"GPUs per node, NICs of {cluster.nic_gbps:g} Gb/s"
    )
    notes = (
        f"copy per node: InterNodeV1, chunks of {cluster.chunk_tokens} tokens, {cluster.num_credits} credits",
        "copy per rank: each row goes straight to its rank, without dedup by node",
        "times until the last GPU is done, one uniform routing; bytes and copies by exact formula, per GPU",
        "buffers: what crossing needs. experts' rows: what experts read, at worst all tokens of all ranks",
        "with more GPUs than experts each expert has as many copies as it takes to fill them",
        CONSTANTS,
    )
    return Report(title, COLUMNS, found, notes, num_group_columns=0, num_names=3)


def report_of_published(found: Sequence[Compared]) -> Report:
    """Returns the table of published times beside predicted ones, a row for dispatch and one for combine."""
    errors = [each.error_percent for each in found]
    by_library: dict[str, list[float]] = {}
    for each in found:
        by_library.setdefault(each.published.source, []).append(each.error_percent)
    notes = (
        f"error: predicted over published, less 1; median {median(errors):+.1f} %, "
        f"of absolute values {median(map(abs, errors)):.1f} %, {len(errors)} rows",
        "median by library: " + ", ".join(f"{name} {median(some):+.1f} %" for name, some in by_library.items()),
        "published: the authors' claims; where they give logical GB/s the time follows from the rows they count",
        "no constant is fitted to a row; NVLink of H800 and links of MI300X and MI355X are the same documents'",
        CONSTANTS,
    )
    title = "Published times between nodes beside the simulator's"
    return Report(title, COMPARED_COLUMNS, found, notes, num_group_columns=2, num_names=4)


def plot_predictions(found: Sequence[Prediction], path: Path) -> tuple[Path, Path]:
    """Writes a picture of three panels: times, bytes through a NIC, buffers; a line for each number of copies.

    Args:
        found: of one shape. path: *.png or *.svg.

    Raises:
        MissingPackageError, ConfigError: as ep_a2a.commands.plots.write.
    """
    ticks = {count: str(count) for count in sorted({each.cluster.num_ranks for each in found})}
    copies = list(dict.fromkeys(each.copies for each in found))
    panels = []
    for label, units, fields in (
        ("time", plots.TIME_UNITS, {"dispatch": "dispatch_us", "combine": "combine_us"}),
        ("sent by a GPU's NIC", plots.BYTE_UNITS, {"dispatch": "nic_dispatch_bytes", "combine": "nic_combine_bytes"}),
        ("buffers of a GPU", plots.BINARY_UNITS, {"buffers": "buffer_bytes"}),
    ):
        size, unit = plots.unit_for(max(getattr(each, field) for each in found for field in fields.values()), units)
        panel = plots.Panel("GPUs (EP size)", f"{label} ({unit})", ticks)
        for name, field in fields.items():
            for kind in copies:
                of_kind = [each for each in found if each.copies == kind]
                points = [(each.cluster.num_ranks, getattr(each, field) / size) for each in of_kind]
                style = {"color": f"C{COLOURS[name]}", "linestyle": STYLES[kind], "marker": "o"}
                panel.lines.append((f"{name}, a copy per {kind}", points, style))
        panels.append(panel)
    key: list[tuple[str, dict[str, Any]]] = [(name, {"color": f"C{colour}"}) for name, colour in COLOURS.items()]
    key += [(f"a copy per {kind}", {"linestyle": STYLES[kind]}) for kind in copies]
    shape, cluster = found[0].shape, found[0].cluster
    caption = plots.Caption(
        "Predicted, not measured: time, traffic and memory of an exchange between nodes",
        "A simulator's values. Solid: a token crosses once to each node; dashed: once to each rank",
        f"{shape.num_tokens} tokens per GPU, hidden {shape.hidden_dim}, top-{shape.topk} of {shape.num_experts} "
        f"experts, dispatch {'fp8' if shape.casts else 'bf16'}; {cluster.gpus_per_node} GPUs per node, a NIC of "
        f"{cluster.nic_gbps:g} Gb/s per GPU · ep_a2a {ep_a2a.__version__}, ep-a2a plan --nodes",
    )
    return plots.write(path, plots.lines, panels, caption, key)
