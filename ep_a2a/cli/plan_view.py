"""A plan on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ep_a2a.cli.plan_sizes import op_facts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from ep_a2a.cli.plan_sizes import Part, Plan

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
    "local": "local",
    "combine_input": "combine input buffer",
    "combine_rows_copy": "copy of the rows",
    "combine_weights_copy": "copy of the weights",
}


def view_of(plan: Plan, assumed: Iterable[str]) -> RenderableType:
    """The table and what belongs to it.

    Args:
        plan: what is shown.
        assumed: what it takes for granted.
    """
    assumed = list(assumed)
    lines: list[RenderableType] = [_op(plan), "", _table(plan)]
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


def _cells(part: Part) -> tuple[str, str, str, str]:
    return TITLES[part.name], _mib(part.num_bytes), part.holds, "yes" if part.is_shared else "no"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f}"
