"""The backend deepep_low_latency: DeepEP's low-latency kernels, with rows by expert that combine weighs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.config import ScaleFormat
from ep_a2a.interface import CombineResult
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import received_rows
from ep_a2a.managers.external.deepep_buffers import (
    BUFFER,
    LOW_LATENCY_HIDDEN_SIZES,
    LOW_LATENCY_MAX_TOKENS,
    LOW_LATENCY_MAX_TOPK,
    DeepEPOp,
    low_latency_buffer,
    rows_and_scales,
)
from ep_a2a.managers.external.library_manager import LibraryAll2AllManager
from ep_a2a.managers.external.library_op import Arrived

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.adapter import RowsBack
    from ep_a2a.ops.arguments import StepInputs
    from ep_a2a.topology import Topology

RANGES = 1
"""Place in the handle of a dispatch: rows of each local expert by source."""


class DeepEPLowLatencyOp(DeepEPOp):
    """An op of layout expert_major: tokens [E, W * M, H] whatever max_num_tokens is.

    `expert_recv_count` rows of each expert are there. dispatch returns None for weights and ids. combine multiplies by
    the weights that dispatch was given. With a cast the scales [E, W * M, H / 128] have their last two dimensions
    transposed in memory.
    """

    casts_inside = True

    def _exchange_rows(self, step: StepInputs) -> Arrived:
        config = self.config
        self._native_ids = self._ids_for_native(step.ids)
        # num_max_dispatch_tokens_per_rank places DeepEP's signals, which must be zero: the same number in every step.
        received, counts, self._native_handle, _, _ = self._native.low_latency_dispatch(
            x=step.tokens,
            topk_idx=self._native_ids,
            num_max_dispatch_tokens_per_rank=config.max_num_inp_token_per_rank,
            num_experts=config.total_experts,
            use_fp8=config.casts_in_dispatch,
            round_scale=config.scale_format != ScaleFormat.FLOAT32,
        )
        sources = received_rows.rows_per_source(self._native_handle[RANGES])
        return Arrived(*rows_and_scales(received), per_source=sources, per_expert=counts)

    def _bring_back(self, given: RowsBack) -> CombineResult:
        result, _, _ = self._native.low_latency_combine(
            x=given.rows,
            topk_idx=self._native_ids,
            topk_weights=given.step.weights,
            handle=self._native_handle,
            out=given.out,
        )
        return CombineResult(result, None)


class DeepEPLowLatencyAll2AllManager(LibraryAll2AllManager):
    """`deep_ep.Buffer` in low-latency mode, over NVLink inside a node and RDMA between nodes."""

    backend = "deepep_low_latency"
    library = BUFFER
    capabilities = Capabilities(
        layouts=("expert_major",),
        row_order="any",
        ids="none",
        weights_applied_by="combine",
        source_positions="no",
        weight_sums=False,
        token_dtypes=("bfloat16",),
        dispatch_casts=("none", "fp8_per_1x128"),
        cast="inside",
        scale_formats=("float32", "float32_power_of_two"),
        combine_dtypes=("bfloat16",),
        hidden_sizes=LOW_LATENCY_HIDDEN_SIZES,
        max_topk=LOW_LATENCY_MAX_TOPK,
        even_experts=True,
        max_tokens=LOW_LATENCY_MAX_TOKENS,
        rdma="across nodes",
        was_run="two H200s of one node, with DeepEP dd758ca",
        notes=(
            "an expert's rows lie together by source, the sources as they came",
            "total_recv and recv_counts count a row per expert",
            "rows for M tokens whatever max_num_tokens is",
            "its documentation asks for RDMA between all ranks",
        ),
    )

    def _build(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> DeepEPLowLatencyOp:
        native = low_latency_buffer(
            self.library.load(),
            self.cpu_group,
            max_num_tokens=config.max_num_inp_token_per_rank,
            hidden_dim=config.hidden_dim,
            world_size=config.world_size,
            num_experts=config.total_experts,
        )
        return DeepEPLowLatencyOp(self, config, native)
