"""Shows a plan on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ep_a2a.commands.plan.sizes import op_facts
from ep_a2a.compat.deep_ep_sizes import known_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from ep_a2a.commands.plan.sizes import Part, Plan
    from ep_a2a.kernels.layout import Field

MIB = 1 << 20
TITLES = {
    "dispatch_rows": "dispatch rows",
    "scales_and_weights": "scales and weights",
    "flagged_region": "flagged region",
    "control": "flags, counts, ids",
    "combine_rows": "combine rows",
    "result": "result",
    "expert_rows": "rows by expert",
    "reduced_rows": "reduced rows",
    "rings": "rings",
    "local": "local",
    "lines_sent": "lines to nodes",
    "lines_received": "lines from nodes",
    "sums_between_nodes": "sums between nodes",
    "combine_input": "combine input buffer",
    "combine_rows_copy": "copy of the rows",
    "combine_weights_copy": "copy of the weights",
}


def view_of(plan: Plan, assumed: Iterable[str]) -> RenderableType:
    """Returns the tables of a plan, with its assumptions.

    Args:
        plan: the plan.
        assumed: its assumptions, one sentence each.
    """
    assumed = list(assumed)
    lines: list[RenderableType] = [_op(plan), "", _table(plan), "", _deep_ep_table(plan)]
    if assumed:
        lines += ["", Text("Assumed:"), *(Text(f"- {each}") for each in assumed)]
    return Group(*lines)


def _op(plan: Plan) -> Text:
    op = op_facts(plan.config)
    casts = {"dispatch": op["quant"], "combine": op["combine_quant"]}
    cast = ", ".join(f"{name} casts by {quant}" for name, quant in casts.items() if quant != "none")
    return Text(
        f"{op['ranks']} GPUs, at most {op['max_tokens_per_rank']} tokens each, hidden size {op['hidden_dim']}, "
        f"top-{op['topk']} of {op['experts']} experts, {op['dtype']}, {cast or 'no cast'}, layout {op['layout']}"
    )


def _table(plan: Plan) -> Table:
    table = Table(title="an op's memory on each GPU", title_justify="left")
    table.add_column("")
    table.add_column("MiB", justify="right")
    table.add_column("holds", overflow="fold")
    table.add_column("shared")
    for part in plan.parts:
        table.add_row(*_cells(part))
        for field in part.fields if len(part.fields) > 1 else ():
            if field.num_bytes:
                table.add_row(f"  {_words(field.name)}", _mib(field.padded_bytes), _shape(field), style="dim")
    table.add_section()
    fewest, most = min(plan.bytes_by_rank), max(plan.bytes_by_rank)
    differs = f"; down to {_mib(fewest)} on ranks with fewer experts" if fewest < most else ""
    table.add_row("total", _mib(most), f"allocated when the op is built{differs}", "", style="bold")
    table.add_row(f"all {plan.config.world_size} GPUs", _mib(sum(plan.bytes_by_rank)), "", "", style="bold")
    table.add_section()
    for part in plan.later:
        table.add_row(*_cells(part), style="dim")
    later = " Memory below the totals is allocated later, if at all." if plan.later else ""
    table.caption, table.caption_justify = f"shared: one block for all ops of a manager and index.{later}", "left"
    return table


def _deep_ep_table(plan: Plan) -> Table:
    hints, ranks = plan.deep_ep_hints, plan.config.world_size
    table = Table(title="DeepEP for the same shape, by its formulas of early 2025", title_justify="left")
    table.add_column("")
    table.add_column("MiB", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("for", overflow="fold")
    no_config = f"its table of configs has no {ranks} GPUs, but {', '.join(map(str, known_ranks()))}"
    between = "normal kernels, rings between nodes" if hints.rdma_bytes else "none inside one node"
    for title, num_bytes, holds in (
        ("NVL", hints.nvl_bytes, "normal kernels, rings in a node"),
        ("RDMA", hints.rdma_bytes, between),
        ("low latency", hints.low_latency_bytes, "low-latency kernels, in place of the rings"),
    ):
        if num_bytes is None:
            table.add_row(title, "-", "-", no_config)
        else:
            table.add_row(title, _mib(num_bytes), f"{num_bytes:,}", holds)
    return table


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shape(field: Field) -> str:
    dtype = str(field.dtype).removeprefix("torch.")
    return f"{' x '.join(map(str, field.shape))} {dtype}, {field.padded_bytes:,} bytes"


def _cells(part: Part) -> tuple[str, str, str, str]:
    return TITLES[part.name], _mib(part.num_bytes), part.holds, "yes" if part.is_shared else "no"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f}"
