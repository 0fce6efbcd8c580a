"""The backend deepep_high_throughput: `deep_ep.Buffer.dispatch` and `combine`, over NVLink and, between nodes, RDMA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.errors import ConfigError
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import received_rows
from ep_a2a.managers.external.deepep_buffers import (
    BUFFER,
    RANK_COUNTS,
    DeepEPOp,
    high_throughput_buffer,
    rows_and_scales,
)
from ep_a2a.managers.external.library_manager import LibraryAll2AllManager
from ep_a2a.managers.external.library_op import Arrived

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.arguments import StepInputs
    from ep_a2a.topology import Topology

PREFIX_MATRIX, SOURCE_TOKENS = 0, 3
"""Places in the handle of a dispatch on one node: the prefix sums of rows by (source, destination), tokens by row."""
GLOBAL_PREFIX = 6
"""Place in the handle of a dispatch on several nodes: the prefix sum of rows by source."""


class DeepEPHighThroughputOp(DeepEPOp):
    """An op on `deep_ep.Buffer`'s dispatch and combine.

    On one node a step returns as many rows as could come at most, so that the host never waits for their number. On
    several nodes DeepEP makes the host wait, and a step returns the rows that came.
    """

    def __init__(
        self, manager: LibraryAll2AllManager, config: EpDispatchCombineConfig, native: Any, internode: bool
    ) -> None:
        super().__init__(manager, config, native)
        self._internode = internode
        # DeepEP sends ids only together with weights
        self._ones = torch.ones(config.max_num_inp_token_per_rank, config.topk, device=self.device)

    def _exchange_rows(self, step: StepInputs) -> Arrived:
        config, native = self.config, self._native
        ids = self._ids_for_native(step.ids)
        per_rank, per_node, per_expert, in_rank, _ = native.get_dispatch_layout(
            topk_idx=ids, num_experts=config.total_experts
        )
        sent = step.tokens if step.scales is None else (step.tokens, step.scales)
        received, local_ids, weights, _, self._native_handle, _ = native.dispatch(
            x=sent,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=self._ones[: step.num_tokens] if step.weights is None else step.weights,
            num_worst_tokens=0 if self._internode else self.num_rows(step.max_num_tokens),
        )
        recv_ids = received_rows.global_ids(local_ids, config.first_expert, step.pad_id)
        counts = received_rows.counts_from_prefix(self._prefix())
        return Arrived(*rows_and_scales(received), recv_ids, weights, per_source=counts)

    def _prefix(self) -> torch.Tensor:
        """Returns the prefix sum [W] of received rows by source."""
        if self._internode:
            prefix: torch.Tensor = self._native_handle[GLOBAL_PREFIX]
            return prefix
        by_pair: torch.Tensor = self._native_handle[PREFIX_MATRIX]
        return by_pair[:, self.config.rank]

    def _positions(self) -> torch.Tensor:
        if self._internode:
            raise self._unsupported("source positions on several nodes")
        sources = received_rows.sources_of_rows(self._recv_counts)
        tokens = self._native_handle[SOURCE_TOKENS][: sources.numel()]
        return received_rows.positions(sources, tokens, self.max_num_tokens_to_send())


class DeepEPHighThroughputAll2AllManager(LibraryAll2AllManager):
    """`deep_ep.Buffer` without low-latency mode; its multiprocessors are bounded by `set_num_sms`, for the process."""

    backend = "deepep_high_throughput"
    library = BUFFER
    capabilities = Capabilities(
        layouts=("compact",),
        ids="local",
        token_dtypes=("bfloat16", "float8_e4m3fn"),
        dispatch_casts=("none", "fp8_per_1x128"),
        scale_formats=("float32", "float32_power_of_two"),
        scales_per_128=True,
        combine_dtypes=("bfloat16",),
        hidden_multiple=16,
        even_experts=True,
        rdma="across nodes",
        rank_counts=RANK_COUNTS,
        was_run="two H200s of one node, with DeepEP dd758ca",
        notes=("several nodes: the host waits, no CUDA graphs, no source positions",),
    )

    def _build(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> DeepEPHighThroughputOp:
        deep_ep = self.library.load()
        if self._num_sms:
            deep_ep.Buffer.set_num_sms(new_num_sms=self._num_sms)
        native = high_throughput_buffer(
            deep_ep,
            self.cpu_group,
            row_bytes=config.hidden_dim * 2,
            world_size=config.world_size,
            internode=topology.internode,
        )
        return DeepEPHighThroughputOp(self, config, native, topology.internode)

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
