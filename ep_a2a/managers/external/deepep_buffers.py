"""DeepEP's buffers and conventions, for its three managers and the benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.managers.external.libraries import Library
from ep_a2a.managers.external.library_op import LibraryDispatchCombineOp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.interface import CombineResult
    from ep_a2a.managers.external.library_manager import LibraryAll2AllManager
    from ep_a2a.ops.adapter import RowsBack

INSTALL = "build it from github.com/deepseek-ai/DeepEP"
BUFFER = Library("deep_ep", "deep_ep", f"{INSTALL} (with NVSHMEM)", needs=(":Buffer",))
ELASTIC_BUFFER = Library("deep_ep", "deep_ep", f"{INSTALL} (2.0 or later, with NCCL 2.30)", needs=(":ElasticBuffer",))

LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LOW_LATENCY_MAX_TOPK = 11
LOW_LATENCY_MAX_TOKENS = 511
"""DeepEP needs 2 * tokens + 2 entries in a queue pair, which has 1024 by default."""
RANK_COUNTS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Numbers of ranks in DeepEP's table of launch numbers."""


def topk_dtype(deep_ep: Any) -> torch.dtype:
    """Returns the dtype of expert ids, which DeepEP's build chooses."""
    dtype: torch.dtype = getattr(deep_ep, "topk_idx_t", torch.int64)
    return dtype


class DeepEPOp(LibraryDispatchCombineOp):
    """Base of the ops on one of DeepEP's buffers."""

    def __init__(self, manager: LibraryAll2AllManager, config: EpDispatchCombineConfig, native: Any) -> None:
        super().__init__(manager, config, native)
        self._ids_dtype = topk_dtype(manager.library.load())

    def _ids_for_native(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns ids [T, K] in DeepEP's dtype, with -1 in every slot without an expert."""
        return torch.where((ids >= 0) & (ids < self.config.total_experts), ids, -1).to(self._ids_dtype)

    def _bring_back(self, given: RowsBack) -> CombineResult:
        result, sums, _ = self._native.combine(x=given.rows, handle=self._native_handle, topk_weights=given.weights)
        return self._combine_result(result, given, sums)

    def _destroy(self) -> None:
        self._native.destroy()


def rows_and_scales(received: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns DeepEP's received rows and their scales: it returns a pair for quantised rows, else a tensor."""
    return received if isinstance(received, tuple) else (received, None)


def low_latency_buffer(
    deep_ep: Any, group: ProcessGroup, *, max_num_tokens: int, hidden_dim: int, world_size: int, num_experts: int
) -> Any:
    """Returns a Buffer for low-latency calls of up to max_num_tokens of each rank. Collective."""
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=max_num_tokens,
        hidden=hidden_dim,
        num_ranks=world_size,
        num_experts=num_experts,
    )
    return deep_ep.Buffer(
        group=group,
        num_nvl_bytes=0,
        num_rdma_bytes=num_bytes,
        low_latency_mode=True,
        num_qps_per_rank=num_experts // world_size,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
    )


def high_throughput_buffer(
    deep_ep: Any, group: ProcessGroup, *, row_bytes: int, world_size: int, internode: bool
) -> Any:
    """Returns a Buffer for dispatch and combine of rows of up to row_bytes. Collective."""
    nvl = rdma = 0
    for native_config in (
        deep_ep.Buffer.get_dispatch_config(num_ranks=world_size),
        deep_ep.Buffer.get_combine_config(num_ranks=world_size),
    ):
        nvl = max(nvl, native_config.get_nvl_buffer_size_hint(row_bytes, world_size))
        if internode:
            rdma = max(rdma, native_config.get_rdma_buffer_size_hint(row_bytes, world_size))
    return deep_ep.Buffer(
        group=group, num_nvl_bytes=nvl, num_rdma_bytes=rdma, low_latency_mode=False, explicitly_destroy=True
    )


def elastic_buffer(
    deep_ep: Any, group: ProcessGroup, *, max_num_tokens: int, hidden_dim: int, topk: int, fp8_rows: bool
) -> Any:
    """Returns an ElasticBuffer for up to max_num_tokens of each rank. Collective. The group must be one of NCCL."""
    return deep_ep.ElasticBuffer(
        group=group,
        num_max_tokens_per_rank=max_num_tokens,
        hidden=hidden_dim,
        num_topk=topk,
        use_fp8_dispatch=fp8_rows,
        explicitly_destroy=True,
    )
