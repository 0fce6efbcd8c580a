"""DeepEP's kernels for few tokens: rows by expert, cast inside dispatch, weighed by combine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.config import ScaleFormat
from ep_a2a.interface import DispatchResult
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import received_rows
from ep_a2a.managers.external.deepep_buffers import (
    BUFFER,
    LOW_LATENCY_HIDDEN_SIZES,
    LOW_LATENCY_MAX_TOKENS,
    LOW_LATENCY_MAX_TOPK,
    dropped_as_minus_one,
    low_latency_buffer,
    topk_dtype,
)
from ep_a2a.managers.external.library_manager import LibraryAll2AllManager
from ep_a2a.managers.external.library_op import NO_INDICES, LibraryDispatchCombineOp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.adapter import StepInputs
    from ep_a2a.topology import Topology

RANGES = 1
"""Member of the handle that dispatch returns: rows of each local expert by source."""


class DeepEPLowLatencyOp(LibraryDispatchCombineOp):
    """Layout expert_major: tokens [E, W * M, H] whatever max_num_tokens is, `expert_recv_count` rows of each expert.

    dispatch returns None for weights and ids; combine multiplies by the weights that dispatch was given. With a cast
    the scales [E, W * M, H / 128] have their last two dimensions transposed in memory.
    """

    casts_inside = True

    def __init__(
        self, config: EpDispatchCombineConfig, device: torch.device, backend: str, capabilities: Capabilities,
        deep_ep: Any, group: ProcessGroup,
    ) -> None:  # fmt: skip
        super().__init__(config, device, backend, capabilities)
        self._ids_dtype = topk_dtype(deep_ep)
        self._native = low_latency_buffer(
            deep_ep, group, max_num_tokens=config.max_num_inp_token_per_rank, hidden_dim=config.hidden_dim,
            world_size=config.world_size, num_experts=config.total_experts,
        )  # fmt: skip
        self._native_handle: Any = None
        self._native_ids = torch.empty(0, config.topk, dtype=self._ids_dtype, device=device)

    def _send(self, step: StepInputs) -> DispatchResult:
        config = self.config
        self._native_ids = dropped_as_minus_one(step.ids, config.total_experts, self._ids_dtype)
        # Its signals lie where num_max_dispatch_tokens_per_rank puts them and must be zero there: always the same.
        received, counts, self._native_handle, _, _ = self._native.low_latency_dispatch(
            x=step.tokens, topk_idx=self._native_ids,
            num_max_dispatch_tokens_per_rank=config.max_num_inp_token_per_rank, num_experts=config.total_experts,
            use_fp8=config.casts_in_dispatch, round_scale=config.scale_format != ScaleFormat.FLOAT32,
        )  # fmt: skip
        tokens, scales = received if isinstance(received, tuple) else (received, None)
        self._arrived(step, received_rows.expert_sources(self._native_handle[RANGES]), None)
        self._expert_recv_count.copy_(counts)
        if step.counts_experts:
            self._local_expert_count.copy_(counts)
        return DispatchResult(tokens, None, scales, NO_INDICES, self._total_recv)

    def _bring_back(
        self, rows: torch.Tensor, weights: torch.Tensor | None, step: StepInputs, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert step.weights is not None  # layout expert_major needs them, which has been checked
        result, _, _ = self._native.low_latency_combine(
            x=rows, topk_idx=self._native_ids, topk_weights=step.weights, handle=self._native_handle, out=out
        )
        return result, None

    def _destroy(self) -> None:
        self._native.destroy()
        self._native = self._native_handle = None


class DeepEPLowLatencyAll2AllManager(LibraryAll2AllManager):
    """`deep_ep.Buffer` in low-latency mode, over NVLink inside a node and RDMA between nodes."""

    backend = "deepep_low_latency"
    library = BUFFER
    capabilities = Capabilities(
        layouts=("expert_major",), row_order="any", ids="none", weights_applied_by="combine",
        source_positions="no", weight_sums=False, token_dtypes=("bfloat16",),
        dispatch_casts=("none", "fp8_per_1x128"), cast="inside",
        scale_formats=("float32", "float32_power_of_two"), combine_dtypes=("bfloat16",),
        hidden_sizes=LOW_LATENCY_HIDDEN_SIZES, max_topk=LOW_LATENCY_MAX_TOPK, even_experts=True,
        max_tokens=LOW_LATENCY_MAX_TOKENS, rdma="across nodes",
        was_run="two H200s of one node, with DeepEP dd758ca",
        notes=(
            "an expert's rows lie together by source, the sources as they came",
            "total_recv and recv_counts count a row per expert", "rows for M tokens whatever max_num_tokens is",
            "its documentation asks for RDMA between all ranks",
        ),
    )  # fmt: skip

    def _build(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> DeepEPLowLatencyOp:
        return DeepEPLowLatencyOp(
            config, self.device, self.backend, self.capabilities, self.library.load(), self.cpu_group
        )
