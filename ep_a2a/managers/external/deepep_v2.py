"""DeepEP 2: `ElasticBuffer`, over NVLink and NCCL's device side, without waits of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ep_a2a.config import FP8_DTYPE
from ep_a2a.interface import DispatchResult
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import received_rows
from ep_a2a.managers.external.deepep_buffers import ELASTIC_BUFFER, dropped_as_minus_one, elastic_buffer, topk_dtype
from ep_a2a.managers.external.library_manager import LibraryAll2AllManager
from ep_a2a.managers.external.library_op import LibraryDispatchCombineOp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.adapter import StepInputs
    from ep_a2a.topology import Topology


class DeepEPV2Op(LibraryDispatchCombineOp):
    """Layout compact: as many rows as could come at most, W * max_num_tokens, so that the host never waits."""

    takes = frozenset({"max_sms"})

    def __init__(
        self, config: EpDispatchCombineConfig, device: torch.device, backend: str, capabilities: Capabilities,
        deep_ep: Any, group: ProcessGroup,
    ) -> None:  # fmt: skip
        super().__init__(config, device, backend, capabilities)
        self._ids_dtype = topk_dtype(deep_ep)
        self._native = elastic_buffer(
            deep_ep, group, max_num_tokens=config.max_num_inp_token_per_rank, hidden_dim=config.hidden_dim,
            topk=config.topk, fp8_rows=config.wire_dtype == FP8_DTYPE,
        )  # fmt: skip
        self._native_handle: Any = None
        self._max_num_tokens = config.max_num_inp_token_per_rank

    def _send(self, step: StepInputs) -> DispatchResult:
        config = self.config
        self._max_num_tokens = step.max_num_tokens
        received, local_ids, weights, self._native_handle, _ = self._native.dispatch(
            x=step.tokens if step.scales is None else (step.tokens, step.scales),
            topk_idx=dropped_as_minus_one(step.ids, config.total_experts, self._ids_dtype), topk_weights=step.weights,
            num_experts=config.total_experts, num_max_tokens_per_rank=step.max_num_tokens, num_sms=config.max_sms,
            do_cpu_sync=False,
        )  # fmt: skip
        tokens, scales = received if isinstance(received, tuple) else (received, None)
        # past the received rows its ids hold anything
        row = torch.arange(tokens.shape[0], device=self.device)
        total = self._native_handle.psum_num_recv_tokens_per_scaleup_rank[-1:]
        sources = torch.where(row < total, self._global_tokens() // step.max_num_tokens, config.world_size)
        counts = torch.zeros(config.world_size + 1, dtype=torch.int32, device=self.device)
        counts.scatter_add_(0, sources.to(torch.int64), torch.ones_like(sources, dtype=torch.int32))
        ids = received_rows.global_ids(local_ids, config.first_expert, step.pad_id)
        ids = received_rows.padded_ids(ids, total, step.pad_id)
        self._arrived(step, counts[:-1], ids)
        return DispatchResult(tokens, weights, scales, ids, self._total_recv)

    def _global_tokens(self) -> torch.Tensor:
        """Where each row comes from, source rank * max_num_tokens + token; anything past the received ones."""
        metadata: torch.Tensor = self._native_handle.recv_src_metadata
        return metadata[:, 0]

    def _bring_back(
        self, rows: torch.Tensor, weights: torch.Tensor | None, step: StepInputs, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result, sums, _ = self._native.combine(x=rows, handle=self._native_handle, topk_weights=weights)
        return self._into(result, out), sums

    def _positions(self) -> torch.Tensor:
        tokens = self._global_tokens()[: int(self._total_recv)]
        stride = self._max_num_tokens
        return received_rows.positions(tokens // stride, tokens % stride, self.max_num_tokens_to_send())

    def _destroy(self) -> None:
        self._native.destroy()
        self._native = self._native_handle = None


class DeepEPV2All2AllManager(LibraryAll2AllManager):
    """`deep_ep.ElasticBuffer` with do_cpu_sync=False."""

    backend = "deepep_v2"
    library = ELASTIC_BUFFER
    capabilities = Capabilities(
        layouts=("compact",), row_order="any", ids="local", token_dtypes=("bfloat16", "float8_e4m3fn"),
        dispatch_casts=("none", "fp8_per_1x128"), scale_formats=("float32", "float32_power_of_two"),
        scales_per_128=True, combine_dtypes=("bfloat16",), hidden_multiple=128, max_topk=32, even_experts=True,
        rdma="across nodes",
        was_run="two H200s of one node, with DeepEP dd758ca",
        notes=("an id may not stand twice in a token", "needs NCCL with device-side communication"),
    )  # fmt: skip

    def _build(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> DeepEPV2Op:
        deep_ep = self.library.load()
        group = self.groups.of(self.device)
        # NCCL connects with the first collective; until then there is no communicator to build on
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return DeepEPV2Op(config, self.device, self.backend, self.capabilities, deep_ep, group)
