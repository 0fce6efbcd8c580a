"""Predicts exchanges between nodes, for `ep-a2a plan --nodes` and `--published`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.options import check_folder, given, numbers, refuse
from ep_a2a.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from ep_a2a.commands.plan.nodes_view import Report
    from ep_a2a.commands.simulation.predict import Prediction

GPUS_PER_NODE = 8
CASTS = ("none", "fp8_per_1x128")
"""Casts of dispatch that the simulator knows; combine's rows are bf16."""
USED_OPTIONS = (
    "nodes", "ranks", "gpus_per_node", "nic_gbps", "chunk_tokens", "num_credits", "max_tokens", "hidden_dim", "topk",
    "experts", "cast",
)  # fmt: skip
"""Parameters of `predictions`."""


def predictions(
    nodes: str, *, ranks: int | None = None, gpus_per_node: int = GPUS_PER_NODE, nic_gbps: float | None = None,
    chunk_tokens: int | None = None, num_credits: int | None = None, max_tokens: int = 4096, hidden_dim: int = 7168,
    topk: int = 8, experts: int = 256, cast: str = "none",
) -> list[Prediction]:  # fmt: skip
    """Returns predictions for a copy per node and a copy per rank, for each number of nodes.

    Raises:
        ConfigError: numbers are impossible, or ranks is not nodes times gpus_per_node.
        UnsupportedError: the simulator does not know this cast.
    """
    from ep_a2a.commands.simulation.cluster import Cluster
    from ep_a2a.commands.simulation.predict import predict
    from ep_a2a.commands.simulation.traffic import Copies, Shape

    if cast not in CASTS:
        raise UnsupportedError(f"--quant {' or '.join(CASTS)} with --nodes", cast, "Choose one of these.")
    options = given({"nic_gbps": nic_gbps, "chunk_tokens": chunk_tokens, "num_credits": num_credits})
    shape = Shape(max_tokens, hidden_dim, topk, experts, casts=cast != "none")
    clusters = [Cluster(count, gpus_per_node, **options) for count in numbers("nodes", nodes, ())]
    for cluster in clusters:
        if ranks not in (None, cluster.num_ranks):
            raise ConfigError(
                f"--ranks {cluster.num_ranks}, which is --nodes {cluster.num_nodes} x --gpus-per-node {gpus_per_node}",
                str(ranks), "Leave --ranks out, or make them agree.",
            )  # fmt: skip
    return [predict(cluster, shape, copies) for cluster in clusters for copies in (Copies.NODE, Copies.RANK)]


@dataclass(frozen=True)
class Files:
    """The outputs: files, or None, and the terminal, as JSON or as a table."""

    markdown: Path | None
    plot: Path | None
    as_json: bool

    def check(self) -> None:
        """Raises, before the simulation, what would keep the files from being written."""
        from ep_a2a.commands.plotting import check_can_plot

        check_folder(self.markdown)
        if self.plot is not None:
            check_can_plot(self.plot)

    def show(self, report: Report, values: dict[str, Any]) -> None:
        """Prints and writes a report; `values` is the same for --json."""
        import json

        import typer
        from rich.console import Console

        if self.markdown is not None:
            self.markdown.write_text(report.as_markdown(), encoding="utf-8")
        if self.as_json:
            typer.echo(json.dumps(values, indent=2))
        else:
            Console().print(report.as_table())


def show_predictions(options: dict[str, Any], files: Files) -> None:
    """Shows the predictions for options of `ep-a2a plan`; those of files are in `files`.

    Raises:
        ConfigError: as `predictions`, or an option is given that the simulator does not know.
    """
    from ep_a2a.commands.plan.nodes_plot import plot_predictions
    from ep_a2a.commands.plan.nodes_view import report_of

    known = (*USED_OPTIONS, "markdown", "plot")
    unknown = {name: value for name, value in options.items() if name not in known}
    refuse(unknown, "with --nodes", "Leave it out: the simulator does not know it.")
    files.check()
    found = predictions(**given({name: options[name] for name in USED_OPTIONS}))
    if files.plot is not None:
        plot_predictions(found, files.plot)
    files.show(report_of(found), {"predictions": [each.as_json_object() for each in found]})


def show_published(options: dict[str, Any], files: Files) -> None:
    """Shows published times of other libraries beside the simulator's.

    Raises:
        ConfigError: any option but --markdown and --json is given.
    """
    from ep_a2a.commands.plan.nodes_view import report_of_published
    from ep_a2a.commands.simulation.published import compare, published_tables

    others = {name: value for name, value in options.items() if name != "markdown"}
    refuse(others, "with --published", "Leave it out: the published tables decide it.")
    files.check()
    found = [compared for published in published_tables() for compared in compare(published)]
    files.show(report_of_published(found), {"compared": [each.as_json_object() for each in found]})
