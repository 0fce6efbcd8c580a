"""The backend flashinfer_nvlink_two_sided: senders write FIFOs over NVLink, which receivers empty."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.errors import UnsupportedError
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import received_rows
from ep_a2a.managers.external.flashinfer_exchange import TWO_SIDED, WORKSPACES, comm_backend, ep_mapping
from ep_a2a.managers.external.library_manager import LibraryAll2AllManager
from ep_a2a.managers.external.library_op import Arrived, LibraryDispatchCombineOp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.interface import CombineResult
    from ep_a2a.managers.external.single_group_guard import SingleGroupGuard
    from ep_a2a.ops.adapter import RowsBack
    from ep_a2a.ops.arguments import StepInputs
    from ep_a2a.topology import Topology

POSITION_WORDS = 4
"""int32 words of a position that travels: FlashInfer moves rows of a multiple of 16 bytes."""


class FlashInferTwoSidedOp(LibraryDispatchCombineOp):
    """An op of layout compact, with rows ordered by source; those of a source come in any order."""

    def __init__(
        self,
        manager: LibraryAll2AllManager,
        config: EpDispatchCombineConfig,
        native: Any,
        workspaces: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        super().__init__(manager, config, native)
        self._workspace, self._prepare_workspace = workspaces
        own = torch.arange(config.max_num_inp_token_per_rank, dtype=torch.int32, device=self.device)[:, None]
        self._own_positions = (own + config.rank * self.max_num_tokens_to_send()).repeat(1, POSITION_WORDS)
        self._no_weights = torch.zeros(config.max_num_inp_token_per_rank, config.topk, device=self.device)
        self._native_info: Any = None

    def _exchange_rows(self, step: StepInputs) -> Arrived:
        config, experts = self.config, self.config.total_experts
        # an id that is the number of experts belongs to no rank
        ids = torch.where(received_rows.valid_ids(step.ids, experts), step.ids, experts)
        self._native_info, recv_ids, weights, _ = self._native.mnnvl_moe_alltoallv_prepare_without_allgather(
            expert_ids=ids,
            scales=self._no_weights[: step.num_tokens] if step.weights is None else step.weights,
            expert_statics=None,
            workspace=self._prepare_workspace,
            max_token_count_per_rank=step.max_num_tokens,
            ep_rank=config.rank,
            ep_size=config.world_size,
            expert_count=experts,
            slot_count=experts,
            top_k=config.topk,
        )
        tokens = self._alltoallv(step.tokens)
        scales = None if step.scales is None else self._alltoallv(step.scales)
        counts = received_rows.counts_from_prefix(self._native_info.recv_rank_count_cumsum)
        recv_ids = received_rows.padded_ids(
            torch.where(recv_ids == experts, step.pad_id, recv_ids), counts.sum(0, keepdim=True), step.pad_id
        )
        return Arrived(tokens, scales, recv_ids, weights, per_source=counts)

    def _alltoallv(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchanges rows [T, n]. Returns those for this rank, [W * max_num_tokens, n], dense by source."""
        # as bfloat16, a dtype that FlashInfer moves, whatever the rows hold
        received: torch.Tensor = self._native.mnnvl_moe_alltoallv(
            x=rows.view(torch.bfloat16),
            alltoall_info=self._native_info,
            workspace=self._workspace,
            ep_rank=self.config.rank,
            ep_size=self.config.world_size,
        )
        return received.view(rows.dtype)

    def _bring_back(self, given: RowsBack) -> CombineResult:
        result = self._native.mnnvl_moe_alltoallv_combine(
            x=given.rows,
            alltoall_info=self._native_info,
            workspace=self._workspace,
            ep_rank=self.config.rank,
            ep_size=self.config.world_size,
            top_k=self.config.topk,
            token_count=given.step.num_tokens,
        )
        return self._combine_result(result, given)

    def _positions(self) -> torch.Tensor:
        assert self._inputs is not None
        rows = self._alltoallv(self._own_positions[: self._inputs.num_tokens].contiguous())
        return rows[: int(self._total_recv), 0]

    def _destroy(self) -> None:
        self._native_info = None


class FlashInferTwoSidedAll2AllManager(LibraryAll2AllManager):
    """FlashInfer's MnnvlMoe, which vLLM calls flashinfer_all2allv and flashinfer_nvlink_two_sided.

    The library has one pair of workspaces per process.
    """

    backend = "flashinfer_nvlink_two_sided"
    library = TWO_SIDED
    capabilities = Capabilities(
        layouts=("compact",),
        row_order="source",
        ids="local",
        micro_batches=False,
        weight_sums=False,
        source_positions="collective",
        experts_multiple=4,
        even_experts=True,
        min_ranks=2,
        single_node=True,
        was_run="two H200s, with flashinfer-python 0.7.2.post1",
        notes=(
            "rows of scales: a multiple of 16 bytes",
            "one set of ranks per process",
            "its class is deprecated since 0.7.1",
        ),
    )

    def _build(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> FlashInferTwoSidedOp:
        native = self.library.load("comm.trtllm_alltoall").MnnvlMoe
        workspaces = _workspaces(native, self.rank, self.world_size, self.cpu_group)
        return FlashInferTwoSidedOp(self, config, native, workspaces)

    def _refusal(self, config: EpDispatchCombineConfig, topology: Topology) -> Any:
        scale_row = config.num_scales * config.scale_bytes
        if scale_row % 16:
            return UnsupportedError(
                "scales whose rows are a multiple of 16 bytes, which is what this backend moves",
                f"{scale_row} bytes",
                "Use the backend 'ep_a2a' or 'flashinfer_nvlink_one_sided'.",
            )
        return super()._refusal(config, topology)

    def _group_guard(self, topology: Topology) -> SingleGroupGuard:
        return WORKSPACES


def _workspaces(native: Any, rank: int, world_size: int, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the FIFOs for tokens and for counts. Collective in the first call of a process."""
    from flashinfer.comm.mnnvl import MnnvlConfig, MnnvlMemory

    mapping, config = ep_mapping(rank, world_size), MnnvlConfig(comm_backend=comm_backend(group))
    MnnvlMemory.initialize()
    with warnings.catch_warnings():
        # later versions have no other function for these workspaces
        warnings.filterwarnings("ignore", "MnnvlMoe is deprecated", DeprecationWarning)
        return (
            native.get_moe_workspaces(mapping=mapping, config=config),
            native.get_moe_prepare_workspace(mapping=mapping, config=config),
        )
