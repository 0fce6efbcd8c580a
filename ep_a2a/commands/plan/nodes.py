"""Predicts exchanges between nodes, for `ep-a2a plan --nodes` and `--published`."""

from __future__ import annotations

from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ep_a2a.commands import messages
from ep_a2a.commands.files import give_json
from ep_a2a.commands.options import given, refuse, values_of_fields
from ep_a2a.commands.simulation import published
from ep_a2a.commands.simulation.simulator import Cluster, Copies, Phase, Shape, predict
from ep_a2a.commands.tables import fitting_tables
from ep_a2a.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import SimpleNamespace

CASTS = ("none", "fp8_per_1x128")
"""Casts of dispatch that the simulator knows; combine's rows are bf16."""
UNKNOWN = ("layout", "combine_quant", "scale_format", "max_total_recv_tokens", "flagged_max_tokens", "dtype")
"""Options of an op that the simulator does not know."""
PREDICTED = "PREDICTED by a simulator, not measured; kernels between nodes have not run over a network."
SAID_ABOVE = frozenset({"predicted", "gpus_per_node", "nic_gbps", "tokens", "experts"})
"""Fields of a prediction that are the same in all rows, or follow."""


def show_nodes(options: SimpleNamespace, values: Mapping[str, Any]) -> None:
    """Prints and writes predictions, or published times of other libraries beside the simulator's.

    Args:
        options: of `ep-a2a plan`.
        values: those of its options that could act on predictions, None where not given.

    Raises:
        ConfigError: numbers are impossible or do not agree, or an option is given that has no effect.
        UnsupportedError: the simulator does not know the cast.
    """
    if options.published:
        refuse(values, "with --published", "Leave it out: the published tables decide it.")
        key, (found, title, notes) = "compared", published_times()
    else:
        without_effect = {name: values[name] for name in UNKNOWN}
        refuse(without_effect, "with --nodes", "Leave it out: the simulator does not know it.")
        key, (found, title, notes) = "predictions", predicted(options)
    give_json({key: found}, options.output, as_json=options.as_json)
    if options.as_json:
        return
    console = messages.output()
    console.print(Text(PREDICTED, style="bold yellow"), Text(title, style="italic"), sep="\n")
    left_out = {"source", "machine"} if options.published else SAID_ABOVE
    headings = [_heading(field) for field in found[0] if field not in left_out]
    right = set(headings) - {"copy per", "phase"}
    for name, rows in groupby(found, key=lambda row: f"{row['source']}, {row['machine']}" if options.published else ""):
        texts = [[_text(value) for field, value in row.items() if field not in left_out] for row in rows]
        console.print(*fitting_tables(name, headings, texts, num_names=3, width=console.width, right=right), sep="\n")
    console.print(*map(Text, notes), sep="\n")


def _heading(field: str) -> str:
    return field.replace("_us", "_µs").replace("percent", "%").replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(f"{each:+.0f}" for each in value)
    return value if isinstance(value, str) else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def predicted(options: SimpleNamespace) -> tuple[list[dict[str, Any]], str, list[str]]:
    """Returns predictions for a copy per node and a copy per rank, for each number of nodes; a title, and notes."""
    quant = "none" if options.quant is None else options.quant.value
    if quant not in CASTS:
        raise UnsupportedError(f"{' or '.join(CASTS)} with --nodes", quant, "Choose one of these.", field="quant")
    of_shape = given(values_of_fields(options, ("hidden_dim", "topk", "num_experts")))
    shape = Shape(options.max_tokens or 4096, casts=quant != "none", **of_shape)
    of_cluster = given(values_of_fields(options, ("gpus_per_node", "nic_gbps", "chunk_tokens", "num_credits")))
    clusters = [Cluster(count, **of_cluster) for count in options.nodes]
    for each in clusters:
        if options.ranks not in (None, each.num_ranks):
            expected = f"{each.num_ranks}, which is --nodes {each.num_nodes} x --gpus-per-node {each.gpus_per_node}"
            raise ConfigError(expected, str(options.ranks), "Leave --ranks out, or make them agree.", field="ranks")
    copies = (Copies.NODE, Copies.RANK)
    found = [_prediction(each, shape, kind, options.seed or 0) for each in clusters for kind in copies]
    cluster = clusters[0]
    title = (
        f"{shape.num_tokens} tokens per GPU, hidden size {shape.hidden_dim}, top-{shape.topk} of {shape.num_experts} "
        f"experts, dispatch {'cast to fp8 (1x128)' if shape.casts else 'bf16'}, combine bf16, {cluster.gpus_per_node} "
        f"GPUs per node, NICs of {cluster.nic_gbps:g} Gb/s"
    )
    notes = [
        f"copy per node: InterNodeV1, chunks of {cluster.chunk_tokens} tokens, {cluster.num_credits} credits",
        "copy per rank: each row goes straight to its rank, without dedup by node",
        "times until the last GPU is done, copies and bytes per GPU, for one uniform routing",
        "error %: the lowest and the highest of the simulator for DeepSeek-V3's times that others have published:",
    ]
    for kind in copies:
        lines = [each.published for each in published.nearest(shape.num_tokens, kind)]
        sources = ", ".join(dict.fromkeys(line.source for line in lines))
        notes.append(f"- copy per {kind}: a copy per {lines[0].copies}, {lines[0].shape.num_tokens} tokens: {sources}")
    return found, title, notes


def _prediction(cluster: Cluster, shape: Shape, copies: Copies, seed: int) -> dict[str, Any]:
    """Returns a prediction's fields of JSON; its errors are those of the published times that are most like it."""
    found = predict(cluster, shape, copies, seed)
    like = published.nearest(shape.num_tokens, copies) if cluster.num_nodes > 1 else []
    times: dict[str, Any] = {}
    for phase, time_us in zip(Phase, (found.dispatch_us, found.combine_us)):
        errors = sorted(round(each.error_percent, 1) for each in like if each.phase is phase)
        times |= {f"{phase}_us": round(time_us, 2), f"{phase}_error_percent": [*errors[:1], *errors[-1:]]}
    return {
        "predicted": True,
        "nodes": cluster.num_nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "ranks": cluster.num_ranks,
        "nic_gbps": cluster.nic_gbps,
        "tokens": shape.num_tokens,
        "experts": shape.placed_experts(cluster.num_ranks),
        "copy_per": copies.value,
        **times,
        "remote_copies_per_token": round(found.remote_copies, 4),
        "nic_dispatch_bytes": found.nic_dispatch_bytes,
        "nic_combine_bytes": found.nic_combine_bytes,
    }


def published_times() -> tuple[list[dict[str, Any]], str, list[str]]:
    """Returns published times beside predicted ones, one of dispatch and one of combine for each line; title, notes."""
    compared = [each for line in published.published_tables() for each in published.compare(line)]
    found = [
        {
            "source": each.published.source,
            "machine": each.published.machine,
            "ranks": each.published.num_ranks,
            "tokens": each.published.shape.num_tokens,
            "copy_per": each.published.copies.value,
            "phase": each.phase.value,
            "published_us": round(each.published_us, 1),
            "predicted_us": round(each.predicted_us, 1),
            "error_percent": round(each.error_percent, 1),
        }
        for each in compared
    ]
    errors: dict[str, list[float]] = {}
    for each in compared:
        errors.setdefault(each.published.source, []).append(each.error_percent)
    of_all = [error for some in errors.values() for error in some]
    notes = [
        f"error: predicted over published, less 1; median {median(of_all):+.1f} %, "
        f"of absolute values {median(map(abs, of_all)):.1f} %, {len(of_all)} rows",
        "median by library: " + ", ".join(f"{name} {median(some):+.1f} %" for name, some in errors.items()),
        "published: the authors' claims; where they give logical GB/s the time follows from the rows they count",
        "no constant is fitted to a row; simulation/simulator.py says where each comes from",
    ]
    return found, "Published times between nodes beside the simulator's", notes
