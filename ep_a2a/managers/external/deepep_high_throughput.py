"""DeepEP's kernels for many tokens: `Buffer.dispatch` and `combine`, over NVLink and, between nodes, RDMA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.errors import ConfigError
from ep_a2a.interface import DispatchResult
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import received_rows
from ep_a2a.managers.external.deepep_buffers import (
    BUFFER,
    RANK_COUNTS,
    dropped_as_minus_one,
    high_throughput_buffer,
    topk_dtype,
)
from ep_a2a.managers.external.library_manager import LibraryAll2AllManager
from ep_a2a.managers.external.library_op import LibraryDispatchCombineOp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.adapter import StepInputs
    from ep_a2a.topology import Topology

PREFIX_MATRIX, SOURCE_TOKENS = 0, 3
"""Members of the handle that dispatch on one node returns: rows by (source, destination), and tokens by row."""
GLOBAL_PREFIX = 6
"""Member of the handle that dispatch on several nodes returns: rows of all sources up to each."""


class DeepEPHighThroughputOp(LibraryDispatchCombineOp):
    """On one node a step returns as many rows as could come at most, so that the host never waits for their number.

    On several nodes DeepEP makes the host wait, and a step returns the rows that came.
    """

    def __init__(
        self, config: EpDispatchCombineConfig, device: torch.device, backend: str, capabilities: Capabilities,
        deep_ep: Any, group: ProcessGroup, internode: bool,
    ) -> None:  # fmt: skip
        super().__init__(config, device, backend, capabilities)
        self._internode = internode
        self._ids_dtype = topk_dtype(deep_ep)
        self._native = high_throughput_buffer(
            deep_ep, group, row_bytes=config.hidden_dim * 2, world_size=config.world_size, internode=internode
        )
        # without weights it would not send ids either
        self._ones = torch.ones(config.max_num_inp_token_per_rank, config.topk, device=device)
        self._native_handle: Any = None

    def _send(self, step: StepInputs) -> DispatchResult:
        config, native = self.config, self._native
        ids = dropped_as_minus_one(step.ids, config.total_experts, self._ids_dtype)
        per_rank, per_node, per_expert, in_rank, _ = native.get_dispatch_layout(
            topk_idx=ids, num_experts=config.total_experts
        )
        sent = step.tokens if step.scales is None else (step.tokens, step.scales)
        received, local_ids, weights, _, self._native_handle, _ = native.dispatch(
            x=sent, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=self._ones[: step.num_tokens] if step.weights is None else step.weights,
            num_worst_tokens=0 if self._internode else self.num_rows(step.max_num_tokens),
        )  # fmt: skip
        tokens, scales = received if isinstance(received, tuple) else (received, None)
        recv_ids = received_rows.global_ids(local_ids, config.first_expert, step.pad_id)
        self._arrived(step, received_rows.counts_from_prefix(self._prefix()), recv_ids)
        return DispatchResult(tokens, None if step.weights is None else weights, scales, recv_ids, self._total_recv)

    def _prefix(self) -> torch.Tensor:
        """Rows of all sources up to each, [W]."""
        if self._internode:
            prefix: torch.Tensor = self._native_handle[GLOBAL_PREFIX]
            return prefix
        by_pair: torch.Tensor = self._native_handle[PREFIX_MATRIX]
        return by_pair[:, self.config.rank]

    def _bring_back(
        self, rows: torch.Tensor, weights: torch.Tensor | None, step: StepInputs, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result, sums, _ = self._native.combine(x=rows, handle=self._native_handle, topk_weights=weights)
        return self._into(result, out), sums

    def _positions(self) -> torch.Tensor:
        if self._internode:
            raise self._unsupported("source positions on several nodes")
        sources = received_rows.sources_of_rows(self._recv_counts)
        tokens = self._native_handle[SOURCE_TOKENS][: sources.numel()]
        return received_rows.positions(sources, tokens, self.max_num_tokens_to_send())

    def _destroy(self) -> None:
        self._native.destroy()
        self._native = self._native_handle = None


class DeepEPHighThroughputAll2AllManager(LibraryAll2AllManager):
    """`deep_ep.Buffer` without low-latency mode; its multiprocessors are bounded by `set_num_sms`, for the process."""

    backend = "deepep_high_throughput"
    library = BUFFER
    capabilities = Capabilities(
        layouts=("compact",), ids="local", token_dtypes=("bfloat16", "float8_e4m3fn"),
        dispatch_casts=("none", "fp8_per_1x128"), scale_formats=("float32", "float32_power_of_two"),
        scales_per_128=True, combine_dtypes=("bfloat16",), hidden_multiple=16, even_experts=True, rdma="across nodes",
        rank_counts=RANK_COUNTS,
        was_run="two H200s of one node, with DeepEP dd758ca",
        notes=("several nodes: the host waits, no CUDA graphs, no source positions",),
    )  # fmt: skip

    def _build(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> DeepEPHighThroughputOp:
        deep_ep = self.library.load()
        if self._num_sms:
            deep_ep.Buffer.set_num_sms(new_num_sms=self._num_sms)
        return DeepEPHighThroughputOp(
            config, self.device, self.backend, self.capabilities, deep_ep, self.cpu_group, topology.internode
        )

    _num_sms = 0

    def set_num_sms(self, num_sms: int) -> None:
        """Bounds the multiprocessors of ops made from now on; an even number, the same on every rank; 0: DeepEP's own.

        Raises:
            ConfigError: num_sms is no even number >= 0.
        """
        if not isinstance(num_sms, int) or isinstance(num_sms, bool) or num_sms < 0 or num_sms % 2:
            raise ConfigError("num_sms to be an even integer >= 0", repr(num_sms))
        self._num_sms = num_sms

    def max_sms_used(self) -> int | None:
        """The number given to set_num_sms; None without a bound."""
        return self._num_sms or None
