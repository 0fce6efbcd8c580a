"""The plan of an op between hosts over torch.distributed: lines around one hop, and an op inside of each node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.plan.sizes import Part, Plan, plan_of, rows_of
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.ops.staged_layout import RailLayout, in_node_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.config import EpDispatchCombineConfig


def plan_over_rail(configs: Sequence[EpDispatchCombineConfig]) -> Plan:
    """What an InterNodeDispatchCombineOp of these configs takes, whose combine gets rows of its own and no weights.

    Args:
        configs: one for each rank, in rank order; gpu_per_node divides their number.
    """
    config = configs[0]
    num_nodes = config.world_size // config.gpu_per_node
    grids = [NodeGrid.even(num_nodes, config.gpu_per_node, rank) for rank in range(config.world_size)]
    in_node = plan_of([in_node_config(*pair) for pair in zip(configs, grids, strict=True)], brings_own_rows=True)
    parts = _parts(RailLayout.of(config, num_nodes), num_nodes)
    num_own_bytes = sum(part.num_bytes for part in parts)
    return Plan(config, (*parts, *in_node.parts), (), tuple(each + num_own_bytes for each in in_node.bytes_by_rank))


def _parts(layout: RailLayout, num_nodes: int) -> tuple[Part, ...]:
    of_lines = f"with {', '.join(field.name.removeprefix('sent_') for field in layout.sent[1:])}"
    return tuple(
        Part(name, sum(field.num_bytes for field in fields), f"{rows_of(fields[0])}, {what}", False, fields)
        for name, fields, what in (
            ("lines_sent", layout.sent, f"{of_lines}, for {num_nodes} nodes"),
            ("lines_received", layout.received, f"{of_lines}, of {num_nodes} nodes"),
            ("sums_between_nodes", (layout.sums_sent, layout.sums_received, layout.sum_weights),
             "sent back and received, with weights"),
            ("sum_of_nodes", (layout.output, layout.output_weights, layout.visits), "with weights; which nodes"),
        )
    )  # fmt: skip
