"""The backend deepep_v2: DeepEP 2's `ElasticBuffer`, over NVLink and NCCL's device side; the host never waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ep_a2a.config import FP8_DTYPE
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import received_rows
from ep_a2a.managers.external.deepep_buffers import ELASTIC_BUFFER, DeepEPOp, elastic_buffer, rows_and_scales
from ep_a2a.managers.external.library_manager import LibraryAll2AllManager
from ep_a2a.managers.external.library_op import Arrived
from ep_a2a.routing import count_ids

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.arguments import StepInputs
    from ep_a2a.topology import Topology


class DeepEPV2Op(DeepEPOp):
    """An op of layout compact: as many rows as could come at most, W * max_num_tokens, so that the host never waits."""

    takes = frozenset({"max_sms"})

    _max_num_tokens = 1
    """Of the latest dispatch."""

    def _exchange_rows(self, step: StepInputs) -> Arrived:
        config = self.config
        self._max_num_tokens = step.max_num_tokens
        received, local_ids, weights, self._native_handle, _ = self._native.dispatch(
            x=step.tokens if step.scales is None else (step.tokens, step.scales),
            topk_idx=self._ids_for_native(step.ids),
            topk_weights=step.weights,
            num_experts=config.total_experts,
            num_max_tokens_per_rank=step.max_num_tokens,
            num_sms=config.max_sms,
            do_cpu_sync=False,
        )
        tokens, scales = rows_and_scales(received)
        # DeepEP's ids and sources past the received rows hold anything
        row = torch.arange(tokens.shape[0], device=self.device)
        total = self._native_handle.psum_num_recv_tokens_per_scaleup_rank[-1:]
        sources = torch.where(row < total, self._global_tokens() // step.max_num_tokens, -1)
        ids = received_rows.global_ids(local_ids, config.first_expert, step.pad_id)
        ids = received_rows.padded_ids(ids, total, step.pad_id)
        return Arrived(tokens, scales, ids, weights, per_source=count_ids(sources, 0, config.world_size))

    def _global_tokens(self) -> torch.Tensor:
        """Returns each row's source, rank * max_num_tokens + token; anything past the received rows."""
        metadata: torch.Tensor = self._native_handle.recv_src_metadata
        return metadata[:, 0]

    def _positions(self) -> torch.Tensor:
        tokens = self._global_tokens()[: int(self._total_recv)]
        stride = self._max_num_tokens
        return received_rows.positions(tokens // stride, tokens % stride, self.max_num_tokens_to_send())


class DeepEPV2All2AllManager(LibraryAll2AllManager):
    """`deep_ep.ElasticBuffer` with do_cpu_sync=False."""

    backend = "deepep_v2"
    library = ELASTIC_BUFFER
    capabilities = Capabilities(
        layouts=("compact",),
        row_order="any",
        ids="local",
        token_dtypes=("bfloat16", "float8_e4m3fn"),
        dispatch_casts=("none", "fp8_per_1x128"),
        scale_formats=("float32", "float32_power_of_two"),
        scales_per_128=True,
        combine_dtypes=("bfloat16",),
        hidden_multiple=128,
        max_topk=32,
        even_experts=True,
        rdma="across nodes",
        was_run="two H200s of one node, with DeepEP dd758ca",
        notes=("an id may not stand twice in a token", "needs NCCL with device-side communication"),
    )

    def _build(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> DeepEPV2Op:
        group = self.groups.of(self.device)
        # DeepEP builds on NCCL's communicator, which NCCL makes for the first collective
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        native = elastic_buffer(
            self.library.load(),
            group,
            max_num_tokens=config.max_num_inp_token_per_rank,
            hidden_dim=config.hidden_dim,
            topk=config.topk,
            fp8_rows=config.wire_dtype == FP8_DTYPE,
        )
        return DeepEPV2Op(self, config, native)
