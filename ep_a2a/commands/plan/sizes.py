"""Adds up an op's buffers, part by part, from the byte layout that ops are built with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_a2a.config import EpDispatchCombineConfig, Layout
from ep_a2a.kernels.layout import Field, OpLayout, Region
from ep_a2a.kernels.ring_shape import Rings
from ep_a2a.ops.bounds import num_rows
from ep_a2a.ops.memory import block_sizes

WEIGHT_BYTES = ID_BYTES = 4
PLACE_BYTES = 8
OWN_PARTS = frozenset({"flagged_region", "control", "local"})
"""Parts that an op shares with no other."""


@dataclass(frozen=True)
class Part:
    """One part of an op's memory on one GPU.

    Attributes:
        name: key of the part in JSON.
        num_bytes: with what alignment adds.
        holds: the content, in words.
        is_shared: with other ops of the same manager and index.
        fields: the regions that it is made of; () for what is allocated later.
    """

    name: str
    num_bytes: int
    holds: str
    is_shared: bool
    fields: tuple[Field, ...] = ()


RINGS_ASSUMED = (
    "nodes that reach each other's memory: over torch.distributed ops have lines for all nodes' tokens, no rings"
)


@dataclass(frozen=True)
class Plan:
    """Memory of one op, in bytes.

    Attributes:
        config: that of rank 0, which owns the most experts.
        parts: what rank 0 allocates when the op is built.
        later: parts that only certain calls allocate, at their first use; the arena counts them then.
        bytes_by_rank: of each rank when the op is built; what a manager's `num_buffer_bytes` is with this op alone.
        kept: for training, what each layer keeps on a rank from forward to backward, beside the op; see `for_training`.
    """

    config: EpDispatchCombineConfig
    parts: tuple[Part, ...]
    later: tuple[Part, ...]
    bytes_by_rank: tuple[int, ...]
    kept: dict[str, int] | None = None

    def as_json_object(self) -> dict[str, Any]:
        """Plain values; all sizes in bytes, with what alignment adds."""
        return {
            "op": op_facts(self.config),
            "bytes_per_gpu": {part.name: part.num_bytes for part in self.parts} | {"total": self.bytes_by_rank[0]},
            "bytes_allocated_later": {part.name: part.num_bytes for part in self.later},
            "bytes_by_rank": list(self.bytes_by_rank),
            "bytes_of_all_gpus": sum(self.bytes_by_rank),
            **({} if self.kept is None else {"bytes_kept_per_layer": self.kept}),
        }


def plan_of(configs: Sequence[EpDispatchCombineConfig], *, brings_own_rows: bool = False) -> Plan:
    """Returns the plan of the op of these configs.

    Args:
        configs: one for each rank, in rank order.
        brings_own_rows: combine gets rows that lie in none of the op's memory, and no weights, so that nothing is
            allocated later.
    """
    config, layout = configs[0], OpLayout.of(configs[0])
    table = _parts(config)
    part_of = {region: name for name, (_, regions) in table.items() for region in regions}
    made_of: dict[str, list[Field]] = {name: [] for name in table}
    for block in ("control", "dispatch", "combine", "result", "expert", "local"):
        for field in getattr(layout, block).fields:
            if field.num_bytes:
                made_of[part_of.get(field.region, block)].append(field)
    parts = tuple(
        Part(name, sum(field.padded_bytes for field in fields), table[name][0], name not in OWN_PARTS, tuple(fields))
        for name, fields in made_of.items()
        if fields
    )
    by_rank = tuple(block_sizes(each).num_bytes for each in configs)
    return Plan(config, parts, () if brings_own_rows else _later(config), by_rank)


def for_training(plan: Plan) -> Plan:
    """Returns the plan of an op whose calls are those of ep_a2a.autograd.

    Such calls allocate nothing later. Each layer keeps what its dispatch returns, with all of a step's tokens on each
    rank; or inside an activation checkpoint, which dispatches again, what the dispatch was given. A layer that calls
    group and ungroup keeps the experts' rows and results, with what sorts them, instead of received ones.

    Raises:
        UnsupportedError: gradients cannot travel through the op.
    """
    # a torch that is too old for gradients is not too old for plans
    from ep_a2a.autograd import check_gradients

    check_gradients(plan.config)
    config, row_bytes = plan.config, plan.config.hidden_dim * plan.config.data_type.itemsize
    slot_bytes = config.topk * (WEIGHT_BYTES + ID_BYTES)
    tokens = config.max_num_inp_token_per_rank
    rows = num_rows(config, tokens)
    slots = rows * config.topk
    # of each slot: its place, row and weight, the place's slot, and whether each of the two has one
    sorting_bytes = 3 * PLACE_BYTES + WEIGHT_BYTES + 2
    ids_bytes = tokens * config.topk * ID_BYTES
    kept = {
        "received_rows": rows * row_bytes,
        "received_weights_and_ids": rows * slot_bytes,
        "ids": ids_bytes,
        "in_a_checkpoint": tokens * (row_bytes + slot_bytes),
        "with_group": slots * (2 * row_bytes + sorting_bytes) + ids_bytes,
    }
    return replace(plan, later=(), kept=kept)


def op_facts(config: EpDispatchCombineConfig) -> dict[str, Any]:
    """Returns the op's sizes and choices, as plain values."""
    return {
        "ranks": config.world_size,
        "max_tokens_per_rank": config.max_num_inp_token_per_rank,
        "hidden_dim": config.hidden_dim,
        "topk": config.topk,
        "experts": config.total_experts,
        "layout": config.layout,
        "dtype": _name(config.data_type),
        "quant": config.dispatch_quant.value,
        "scale_format": config.scale_format if config.casts_in_dispatch else None,
        "combine_quant": config.combine_quant.value,
        "max_total_recv_tokens": config.max_total_recv_tokens,
        "flagged_max_tokens": config.low_latency_tokens,
    }


def _parts(config: EpDispatchCombineConfig) -> dict[str, tuple[str, tuple[Region, ...]]]:
    """Returns, by part in the order of the table, its content in words and its regions.

    Regions of no part belong to their block's, control or local. Between nodes an op has lines for all tokens of a step
    where the host moves them, else rings.
    """
    rings = Rings.of(config)
    lines = f"{rings.num_nodes * rings.num_chunks * rings.chunk_tokens} lines"
    between: dict[str, tuple[str, tuple[Region, ...]]] = {
        "lines_sent": (f"{lines}: rows and what belongs to them, for all nodes", (Region.STAGED_CHUNKS,)),
        "lines_received": (f"{lines}, of all nodes", (Region.CHUNKS,)),
        "sums_between_nodes": (f"{lines}, sent back and received", (Region.CHUNKS_BACK, Region.CHUNKS_SENT_BACK)),
    }
    if not rings.by_host:
        slots = f"{rings.num_nodes} nodes x {rings.num_channels} channels x {rings.num_slots} chunks"
        regions = (Region.CHUNKS, Region.CHUNKS_BACK, Region.STAGED_CHUNKS, Region.CHUNKS_SENT_BACK)
        between = {"rings": (f"{slots} of {rings.chunk_tokens} tokens, to experts and back", regions)}
    return {
        "dispatch_rows": ("received rows", (Region.TOKENS,)),
        "scales_and_weights": ("of received rows", (Region.SCALES, Region.WEIGHTS)),
        "flagged_region": ("low-latency dispatch", (Region.LOW_LATENCY_ROWS, Region.LOW_LATENCY_SIDES)),
        "control": ("flags, counts, ids and source positions", ()),
        "combine_rows": ("rows that come back", (Region.COMBINE_ROWS, Region.COMBINE_SCALES, Region.COMBINE_WEIGHTS)),
        "result": ("sums and weights", (Region.RESULT, Region.RESULT_WEIGHTS)),
        "expert_rows": ("rows by expert", (Region.EXPERT_ROWS, Region.EXPERT_SCALES, Region.EXPERT_WEIGHTS)),
        "reduced_rows": ("the experts' sums", (Region.EXPERT_SLOTS, Region.REDUCED_ROWS)),
        **between,
        "local": ("counters and the routing record", ()),
    }


def _later(config: EpDispatchCombineConfig) -> tuple[Part, ...]:
    rows, hidden_dim, topk = config.max_num_expert_rows, config.hidden_dim, config.topk
    row_bytes = hidden_dim * config.combined_dtype.itemsize
    shape = f"{rows} x {hidden_dim} {_name(config.combined_dtype)}"
    parts = [Part("combine_input", rows * row_bytes, f"{shape}, when first asked for", True)]
    if config.layout == Layout.EXPERT_MAJOR:
        return tuple(parts)
    if config.wire_dtype == config.combined_dtype:
        copied = f"{shape}, when combine's input is dispatch's rows"
        parts.append(Part("combine_rows_copy", rows * row_bytes, copied, True))
    copied = f"{rows} x {topk}, when combine gets dispatch's weights"
    parts.append(Part("combine_weights_copy", rows * topk * WEIGHT_BYTES, copied, True))
    return tuple(parts)


def rows_of(field: Field) -> str:
    """Returns a field's shape and dtype, in words."""
    return f"{' x '.join(map(str, field.shape))} {_name(field.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
