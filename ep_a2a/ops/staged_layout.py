"""What an op across nodes over a rail is made of: its own buffers, and the op inside of a node. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ep_a2a.config import EpDispatchCombineKernelType
from ep_a2a.kernels.layout import WORD_BYTES

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.node_grid import NodeGrid


@dataclass(frozen=True)
class RailField:
    """One buffer, an allocation of its own."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """The same: nothing follows in its allocation."""
        return self.num_bytes


@dataclass(frozen=True)
class RailLayout:
    """The buffers of one rank around the hop between N nodes, M tokens per rank.

    Attributes:
        sent, received: lines [N * M, ...] on the way to experts: tokens, ids, weights, and scales where there are any.
        sums_sent, sums_received: rows [N * M, H] on their way back. sum_weights: what comes with them.
        output, output_weights: what combine returns. visits: the nodes that each token goes to, int32 [M, N].
    """

    sent: tuple[RailField, ...]
    received: tuple[RailField, ...]
    sums_sent: RailField
    sums_received: RailField
    sum_weights: RailField
    output: RailField
    output_weights: RailField
    visits: RailField

    @classmethod
    def of(cls, config: EpDispatchCombineConfig, num_nodes: int) -> RailLayout:
        """The buffers for the config of the whole group."""
        most, hidden_dim, topk, dtype = (
            config.max_num_inp_token_per_rank, config.hidden_dim, config.topk, config.combined_dtype,
        )  # fmt: skip
        num_lines, f32, i32 = num_nodes * most, torch.float32, torch.int32
        return cls(
            sent=_lines("sent", config, num_lines),
            received=_lines("received", config, num_lines),
            sums_sent=RailField("sums_sent", dtype, (num_lines, hidden_dim)),
            sums_received=RailField("sums_received", dtype, (num_lines, hidden_dim)),
            sum_weights=RailField("sum_weights_received", f32, (num_lines, topk)),
            output=RailField("sum_of_nodes", dtype, (most, hidden_dim)),
            output_weights=RailField("sum_of_nodes_weights", f32, (most, topk)),
            visits=RailField("nodes_of_tokens", i32, (most, num_nodes)),
        )


def _lines(direction: str, config: EpDispatchCombineConfig, num_lines: int) -> tuple[RailField, ...]:
    def lines(name: str, dtype: torch.dtype, width: int) -> RailField:
        return RailField(f"{direction}_{name}", dtype, (num_lines, width))

    found = (
        lines("tokens", config.wire_dtype, config.hidden_dim),
        lines("ids", torch.int32, config.topk),
        lines("weights", torch.float32, config.topk),
    )
    if not config.num_scales:
        return found
    scale_dtype = torch.float32 if config.scale_bytes == WORD_BYTES else torch.uint8
    return (*found, lines("scales", scale_dtype, config.num_scales))


def in_node_config(config: EpDispatchCombineConfig, grid: NodeGrid) -> EpDispatchCombineConfig:
    """The config of the IntraNode op that forwards what has come from all nodes: N * M tokens of G ranks."""
    return replace(
        config, rank=grid.local_rank, world_size=grid.gpus_per_node, gpu_per_node=grid.gpus_per_node,
        kernel_type=EpDispatchCombineKernelType.IntraNode, data_type=config.wire_dtype,
        max_num_inp_token_per_rank=grid.num_nodes * config.max_num_inp_token_per_rank,
        num_experts=config.total_experts, num_owner_ranks=config.world_size,
        first_rank=grid.node * grid.gpus_per_node, scale_dim=config.num_scales, scale_type_size=config.scale_bytes,
        quant_type=config.combine_quant.value, dispatch_quant_type=None, combine_dtype=config.combined_dtype,
        max_token_type_size=max(config.wire_dtype.itemsize, config.combined_dtype.itemsize),
    )  # fmt: skip
