"""Predicts exchanges between nodes, for `ep-a2a plan --nodes` and `--published`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.commands import messages
from ep_a2a.commands.files import check_can_write, different_files, give_json, write_text
from ep_a2a.commands.options import given, refuse
from ep_a2a.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from ep_a2a.commands.simulation.predict import Prediction

GPUS_PER_NODE = 8
CASTS = ("none", "fp8_per_1x128")
"""Casts of dispatch that the simulator knows; combine's rows are bf16."""


def predictions(
    nodes: tuple[int, ...],
    *,
    ranks: int | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
    max_tokens: int = 4096,
    hidden: int = 7168,
    topk: int = 8,
    experts: int = 256,
    quant: str = "none",
    seed: int = 0,
    **of_cluster: Any,
) -> list[Prediction]:
    """Returns predictions for a copy per node and a copy per rank, for each number of nodes.

    Args:
        nodes, ranks, gpus_per_node, max_tokens, hidden, topk, experts, quant, seed: as the options of `ep-a2a plan`.
        of_cluster: other fields of Cluster.

    Raises:
        ConfigError: numbers are impossible, or ranks is not nodes times gpus_per_node.
        UnsupportedError: the simulator does not know this cast.
    """
    from ep_a2a.commands.simulation.cluster import Cluster
    from ep_a2a.commands.simulation.predict import predict
    from ep_a2a.commands.simulation.traffic import Copies, Shape

    if quant not in CASTS:
        raise UnsupportedError(f"{' or '.join(CASTS)} with --nodes", quant, "Choose one of these.", field="quant")
    shape = Shape(max_tokens, hidden, topk, experts, casts=quant != "none")
    clusters = [Cluster(count, gpus_per_node, **of_cluster) for count in nodes]
    for cluster in clusters:
        if ranks not in (None, cluster.num_ranks):
            raise ConfigError(
                f"--ranks {cluster.num_ranks}, which is --nodes {cluster.num_nodes} x --gpus-per-node {gpus_per_node}",
                str(ranks),
                "Leave --ranks out, or make them agree.",
            )
    return [predict(cluster, shape, copies, seed) for cluster in clusters for copies in (Copies.NODE, Copies.RANK)]


FIELDS = {
    **{name: name for name in ("nodes", "ranks", "gpus_per_node", "max_tokens", "hidden", "topk", "experts", "quant")},
    **{name: name for name in ("seed", "nic_gbps", "chunk_tokens")},
    "credits": "num_credits",
}
"""Arguments of `predictions` by option."""


def show_nodes(options: dict[str, Any], *, is_published: bool, as_json: bool) -> None:
    """Prints and writes predictions, or published times of other libraries beside the simulator's.

    Args:
        options: of `ep-a2a plan`, None where not given.
        is_published: show published times. as_json: print JSON.

    Raises:
        ConfigError: as `predictions`, or an option is given that has no effect.
    """
    from ep_a2a.commands.plan.nodes_plot import plot_predictions
    from ep_a2a.commands.plan.nodes_view import report_of, report_of_published
    from ep_a2a.commands.plots import check_can_plot
    from ep_a2a.commands.simulation.published import compare, published_tables

    known, when, why = (*FIELDS, "markdown", "plot", "output"), "--nodes", "the simulator does not know it."
    if is_published:
        known, when, why = ("markdown", "output"), "--published", "the published tables decide it."
    refuse({name: options[name] for name in options if name not in known}, f"with {when}", f"Leave it out: {why}")
    markdown, plot = options["markdown"], options["plot"]
    different_files(markdown, plot, options["output"])
    check_can_write(markdown)
    if plot is not None:
        check_can_plot(plot)
    if is_published:
        compared = [each for published in published_tables() for each in compare(published)]
        report, values = report_of_published(compared), {"compared": [each.as_json_object() for each in compared]}
    else:
        found = predictions(**given({field: options[name] for name, field in FIELDS.items()}))
        report, values = report_of(found), {"predictions": [each.as_json_object() for each in found]}
        if plot is not None:
            plot_predictions(found, plot)
    if markdown is not None:
        write_text(markdown, report.as_markdown())
    give_json(values, options["output"], as_json=as_json)
    if not as_json:
        console = messages.output()
        console.print(report.as_tables(console.width))
