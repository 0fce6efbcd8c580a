"""Shows a plan on a terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ep_a2a.commands.plan.sizes import Part, Plan, op_facts, rows_of
from ep_a2a.commands.tables import bytes_text, new_table

MIB = 1 << 20


def view_of(plan: Plan, assumed: Sequence[str]) -> RenderableType:
    """Returns a plan for the terminal: its total, its parts, its assumptions (one sentence each)."""
    heads = (*_total(plan), _op(plan))
    notes = [Text(text) for text in ("", "Assumed:", *(f"- {each}" for each in assumed))] if assumed else []
    return Group(*heads, "", _table(plan), *notes)


def _total(plan: Plan) -> list[Text]:
    """Says what an op takes, and what may come on top."""
    fewest, most = min(plan.bytes_by_rank), max(plan.bytes_by_rank)
    of_all = f"{plan.config.world_size} GPUs, {bytes_text(sum(plan.bytes_by_rank))} in all"
    lines = [Text(f"{bytes_text(most)} on each of {of_all}: allocated when the op is built.", style="bold")]
    if fewest < most:
        lines.append(Text(f"Ranks with fewer experts take less, down to {bytes_text(fewest)}."))
    if plan.later:
        more = bytes_text(sum(part.num_bytes for part in plan.later))
        lines.append(Text(f"Certain calls allocate up to {more} more at their first use."))
    if plan.kept is not None:
        *parts, in_a_checkpoint, with_group = plan.kept.values()
        text = f"Training: each layer keeps {bytes_text(sum(parts))} more from forward to backward, or "
        lines.append(Text(f"{text}{bytes_text(in_a_checkpoint)} in an activation checkpoint. Layers share the op."))
        lines.append(Text(f"With group: {bytes_text(with_group)} instead, the experts' rows and results."))
    return lines


def _op(plan: Plan) -> Text:
    op = op_facts(plan.config)
    casts = {"dispatch": op["quant"], "combine": op["combine_quant"]}
    cast = ", ".join(f"{name} casts by {quant}" for name, quant in casts.items() if quant != "none")
    return Text(
        f"For at most {op['max_tokens_per_rank']} tokens of each rank, hidden size {op['hidden_dim']}, "
        f"top-{op['topk']} of {op['experts']} experts, {op['dtype']}, {cast or 'no cast'}, layout {op['layout']}."
    )


def _table(plan: Plan) -> Table:
    table = new_table("an op's memory on each GPU", ("", "MiB", "holds", "shared"), right=("MiB",))
    for part in plan.parts:
        table.add_row(*_cells(part))
    table.add_section()
    table.add_row("total", _mib(plan.bytes_by_rank[0]), "when the op is built", "", style="bold")
    table.add_section()
    for part in plan.later:
        table.add_row(*_cells(part), style="dim")
    later = " Memory below the total is allocated later, if at all." if plan.later else ""
    table.caption, table.caption_justify = f"shared: one block for all ops of a manager and index.{later}", "left"
    return table


def _cells(part: Part) -> tuple[str, str, str, str]:
    holds = part.holds
    if part.is_shared and part.fields:
        holds = f"{rows_of(max(part.fields, key=lambda field: field.num_bytes))}: {holds}"
    return _words(part.name), _mib(part.num_bytes), holds, "yes" if part.is_shared else "no"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f}"
