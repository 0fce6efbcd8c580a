"""Predicts exchanges between nodes, for `ep-a2a plan --nodes` and `--published`."""

from collections.abc import Mapping
from itertools import groupby
from statistics import median
from types import SimpleNamespace
from typing import Any

from rich.text import Text

from ep_a2a.commands import messages
from ep_a2a.commands.files import give_json
from ep_a2a.commands.options import given, refuse
from ep_a2a.commands.plan.predict import Cluster, Copies, Shape, predict
from ep_a2a.commands.plan.published import nearest, published_times
from ep_a2a.commands.tables import fitting_tables
from ep_a2a.errors import ConfigError, UnsupportedError

CASTS = ("none", "fp8_per_1x128")
"""Casts of dispatch that are predicted; combine's rows are bf16."""
UNKNOWN = ("layout", "combine_quant", "scale_format", "max_total_recv_tokens", "flagged_max_tokens", "dtype")
"""Options of an op that predictions do not know."""
PREDICTED = "PREDICTED by arithmetic, not measured; kernels between nodes have not run over a network."
SAID_ABOVE = frozenset({"predicted", "gpus_per_node", "nic_gbps", "tokens", "experts", "source", "machine"})
"""Fields of a row that are the same in all rows of a table, or follow."""


def show_nodes(options: SimpleNamespace, values: Mapping[str, Any]) -> None:
    """Prints and writes predictions, or published times of other libraries beside predicted ones.

    Args:
        options: of `ep-a2a plan`.
        values: those of its options that could act on predictions, None where not given.

    Raises:
        ConfigError: numbers are impossible or do not agree, or an option is given that has no effect.
        UnsupportedError: the cast is not predicted.
    """
    if options.published:
        refuse(values, "with --published", "Leave it out: the published tables decide it.")
        key, found = "compared", published_times()
        title, notes = "Published times between nodes beside predicted ones", _notes_on_published()
    else:
        without_effect = {name: values[name] for name in UNKNOWN}
        refuse(without_effect, "with --nodes", "Leave it out: predictions do not know it.")
        key, (found, title, notes) = "predictions", _predictions(options)
    give_json({key: found}, options.output, as_json=options.as_json)
    if options.as_json:
        return
    console = messages.output()
    console.print(Text(PREDICTED, style="bold yellow"), Text(title, style="italic"), sep="\n")
    fields = [field for field in found[0] if field not in SAID_ABOVE]
    headings = [field.replace("_us", "_µs").replace("percent", "%").replace("_", " ") for field in fields]
    right = set(headings) - {"copy per", "phase"}
    for name, rows in groupby(found, key=lambda row: f"{row['source']}, {row['machine']}" if options.published else ""):
        texts = [[_text(row[field]) for field in fields] for row in rows]
        console.print(*fitting_tables(name, headings, texts, num_names=3, width=console.width, right=right), sep="\n")
    console.print(*map(Text, notes), sep="\n")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(f"{each:+.0f}" for each in value)
    return value if isinstance(value, str) else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _predictions(options: SimpleNamespace) -> tuple[list[dict[str, Any]], str, list[str]]:
    """Returns predictions for a copy per node and a copy per rank, for each number of nodes; a title, and notes."""
    quant = "none" if options.quant is None else options.quant.value
    if quant not in CASTS:
        raise UnsupportedError(f"{' or '.join(CASTS)} with --nodes", quant, "Choose one of these.", field="quant")
    of_shape = given({"hidden_dim": options.hidden, "topk": options.topk, "num_experts": options.experts})
    shape = Shape(options.max_tokens or 4096, casts=quant != "none", **of_shape)
    of_cluster = given({"gpus_per_node": options.gpus_per_node, "nic_gbps": options.nic_gbps})
    clusters = [Cluster(count, **of_cluster) for count in options.nodes]
    for each in clusters:
        if options.ranks not in (None, each.num_ranks):
            expected = f"{each.num_ranks}, which is --nodes {each.num_nodes} x --gpus-per-node {each.gpus_per_node}"
            raise ConfigError(expected, str(options.ranks), "Leave --ranks out, or make them agree.", field="ranks")
    copies = (Copies.NODE, Copies.RANK)
    found = [_prediction(each, shape, kind, options.seed or 0) for each in clusters for kind in copies]
    title = (
        f"{shape.num_tokens} tokens per GPU, hidden size {shape.hidden_dim}, top-{shape.topk} of {shape.num_experts} "
        f"experts, dispatch {'cast to fp8 (1x128)' if shape.casts else 'bf16'}, combine bf16, "
        f"{clusters[0].gpus_per_node} GPUs per node, NICs of {clusters[0].nic_gbps:g} Gb/s"
    )
    notes = [
        "copy per node: InterNodeV1; copy per rank: each row goes straight to its rank, without dedup by node",
        "times until the last GPU is done, copies and bytes per GPU, for one uniform routing",
        "error %: the lowest and the highest of predictions for DeepSeek-V3's times that others have published:",
    ]
    for kind in copies:
        lines = nearest(shape.num_tokens, kind)
        sources = ", ".join(dict.fromkeys(line["source"] for line in lines))
        notes.append(f"- copy per {kind}: a copy per {lines[0]['copy_per']}, {lines[0]['tokens']} tokens: {sources}")
    return found, title, notes


def _prediction(cluster: Cluster, shape: Shape, copies: Copies, seed: int) -> dict[str, Any]:
    """Returns a prediction's fields of JSON; its errors are those of the published times that are most like it."""
    found = predict(cluster, shape, copies, seed)
    like = nearest(shape.num_tokens, copies) if cluster.num_nodes > 1 else []
    times: dict[str, Any] = {}
    for phase, time_us in (("dispatch", found.dispatch_us), ("combine", found.combine_us)):
        errors = sorted(each["error_percent"] for each in like if each["phase"] == phase)
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


def _notes_on_published() -> list[str]:
    errors = [(each["source"], each["error_percent"]) for each in published_times()]
    of_all = [error for _, error in errors]
    medians = {name: median(error for source, error in errors if source == name) for name, _ in errors}
    return [
        f"error: predicted over published, less 1; median {median(of_all):+.1f} %, "
        f"of absolute values {median(map(abs, of_all)):.1f} %, {len(of_all)} rows",
        "median by library: " + ", ".join(f"{name} {error:+.1f} %" for name, error in medians.items()),
        "published: the authors' claims; where they give logical GB/s the time follows from the rows they count",
        "no constant is fitted to a row; plan/predict.py says where each comes from",
    ]
