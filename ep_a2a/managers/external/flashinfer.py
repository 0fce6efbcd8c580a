"""FlashInfer over NVLink: the backends flashinfer_nvlink_one_sided and flashinfer_nvlink_two_sided."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ep_a2a.config import Layout, QuantType
from ep_a2a.errors import StateError
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.interface import CombineResult
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import conversions
from ep_a2a.managers.external.libraries import Library
from ep_a2a.managers.external.library_manager import LibraryAll2AllManager, SingleGroupGuard
from ep_a2a.managers.external.library_op import LibraryDispatchCombineOp, ReceivedRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from ep_a2a.ops.adapter import RowsBack
    from ep_a2a.ops.arguments import StepInputs
    from ep_a2a.topology import Topology

ONE_SIDED = Library(
    "flashinfer",
    "flashinfer-python",
    "pip install 'flashinfer-python>=0.7'",
    "0.7",
    needs=("comm.mapping:Mapping", "comm.mnnvl:MnnvlConfig", "comm.trtllm_moe_alltoall:MoeAlltoAll"),
)
TWO_SIDED = replace(ONE_SIDED, needs=(*ONE_SIDED.needs[:2], "comm.trtllm_alltoall:MnnvlMoe"))

WORKSPACES = SingleGroupGuard("FlashInfer's workspaces", by_ranks=True)
"""Both classes find a process's workspaces by sizes and rank, not by group. A process agrees on fabric handles once, so
later groups must have the same ranks."""

TOPKS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)
"""Values of K that the one-sided kernels are instantiated for."""
MAX_RANKS = 64
_OUTLIVE_WORKSPACES: list[Any] = []
"""FlashInfer hangs a workspace's description on its tensor, and torch reads it once the tensor has let go of it."""
WORKSPACE_ALIGNMENT_BYTES = 128
NO_EXPERT = -1
WORD_BYTES = 16
"""Bytes of the widest store of FlashInfer's dispatch."""
POSITION_WORDS = 4
"""int32 words of a position that travels: FlashInfer moves rows of a multiple of 16 bytes."""


class NVLinkOneSided:
    """FlashInfer's MoeAlltoAll for one set of payloads. dispatch and combine alternate and never wait on the host.

    Construction is collective.

    Args:
        payloads: by name, (elements, dtype) of each tensor that travels with a token; rows of any number of bytes.
        num_experts: experts over all ranks, owned linearly.
        topk: experts per token.
        max_num_tokens: most tokens of a rank in any step, >= 1.
        combine_row_bytes: bytes of the rows that combine sums.
        group: all ranks. rank, world_size: this one, and their number.
        index: objects whose steps overlap need different ones; those of one size and index share a workspace.
    """

    def __init__(
        self,
        payloads: Mapping[str, tuple[int, torch.dtype]],
        *,
        num_experts: int,
        topk: int,
        max_num_tokens: int,
        combine_row_bytes: int,
        group: ProcessGroup,
        rank: int,
        world_size: int,
        index: int = 0,
    ) -> None:
        from flashinfer.comm.mnnvl import MnnvlConfig
        from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank

        self._group, self._world_size = group, world_size
        # FlashInfer packs payloads without gaps. In order of falling alignment, each starts at a multiple of its own.
        ordered = sorted(payloads.items(), key=lambda item: -row_alignment(*item[1]))
        self._dtypes = {name: dtype for name, (_, dtype) in ordered}
        row_bytes = sum(elements * dtype.itemsize for elements, dtype in payloads.values())
        workspace_bytes = moe_a2a_get_workspace_size_per_rank(world_size, max_num_tokens, row_bytes, combine_row_bytes)
        # The class caches workspaces by size, so each index gets a size of its own.
        workspace_bytes += index * WORKSPACE_ALIGNMENT_BYTES
        self._native: Any = MoeAlltoAll(
            ep_mapping(rank, world_size),
            max_num_tokens,
            topk,
            num_experts,
            workspace_size_per_rank=workspace_bytes,
            mnnvl_config=MnnvlConfig(comm_backend=comm_backend(group)),
        )
        # Each rank has zeroed its own counters; no rank may write to them before all have.
        dist.barrier(group)

    def packed(self, payloads: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the payloads [T, n] as `dispatch` takes them; some of the declared ones may be missing."""
        return {name: payloads[name].view(torch.uint8) for name in self._dtypes if name in payloads}

    @outside_graphs
    def dispatch(
        self, ids: torch.Tensor, packed: Mapping[str, torch.Tensor], step_tokens: int
    ) -> dict[str, torch.Tensor]:
        """Sends payloads, and returns the received ones, [W, step_tokens, n] by name.

        Their addresses depend on the payloads and step_tokens.

        Args:
            ids: int32 [T, K], an expert in every slot.
            packed: from `packed`.
            step_tokens: the most tokens that any rank brings to the step, equal on all ranks.
        """
        received = self._native.dispatch(ids, list(packed.values()), step_tokens)
        return {name: each.view(self._dtypes[name]) for name, each in zip(packed, received, strict=True)}

    def mark_padding(self, ids: torch.Tensor, pad_id: int) -> None:
        """Overwrites received ids past the received rows, by one launch. For use between dispatch and combine."""
        from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_sanitize_expert_ids

        native = self._native
        moe_a2a_sanitize_expert_ids(ids, native.workspace, native.metainfo, native.ep_rank, pad_id)

    def combine_rows(self, step_tokens: int, hidden_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory [W, step_tokens, H] that combine reads in place. For use between dispatch and combine."""
        rows: torch.Tensor = self._native.get_combine_payload_tensor_in_workspace(step_tokens, hidden_dim, dtype)
        return rows.view(self._world_size, step_tokens, hidden_dim)

    @outside_graphs
    def combine(
        self, rows: torch.Tensor, step_tokens: int, out: torch.Tensor, *, in_workspace: bool, fp8: bool = False
    ) -> torch.Tensor:
        """Sums rows [W, step_tokens, H] of the ranks that each token went to, into out [T, H].

        Args:
            rows: from `combine_rows` if in_workspace, else any.
            step_tokens: as given to dispatch.
            out: contiguous.
            in_workspace: combine reads rows in place, else it copies them first.
            fp8: cast rows to fp8 on the wire, without scales.
        """
        result: torch.Tensor = self._native.combine(
            rows, step_tokens, payload_in_workspace=in_workspace, output=out, use_low_precision=fp8
        )
        return result

    def close(self) -> None:
        """Unmaps the workspace once no rank uses it. Collective."""
        torch.cuda.synchronize()
        dist.barrier(self._group)
        # The class caches workspaces for the life of the process, so a sweep over sizes would use up memory. An object
        # that shares this workspace may have closed it: then the cache does not have it.
        native, self._native = self._native, None
        if any(each is native._WORKSPACE for each in native._WORKSPACE_CACHE.values()):
            _OUTLIVE_WORKSPACES.append(getattr(native.workspace, "_capsule_wrapper", None))
            native._reset_workspace()


def row_alignment(elements: int, dtype: torch.dtype) -> int:
    """Returns the largest power of two up to WORD_BYTES that divides a row's bytes."""
    row_bytes = elements * dtype.itemsize
    return min(row_bytes & -row_bytes, WORD_BYTES)


def ep_mapping(rank: int, world_size: int) -> Any:
    """Returns FlashInfer's description of a group on one node with expert parallelism only."""
    from flashinfer.comm.mapping import Mapping as NativeMapping

    return NativeMapping(
        world_size=world_size,
        rank=rank,
        gpus_per_node=world_size,
        tp_size=world_size,
        moe_tp_size=1,
        moe_ep_size=world_size,
    )


def comm_backend(group: ProcessGroup) -> Any:
    """Returns a backend by which FlashInfer exchanges file descriptors over this group; it is never split."""
    from flashinfer.comm.mnnvl import TorchDistBackend

    class WholeGroup(TorchDistBackend):  # type: ignore[misc]
        def Split(self, color: int, key: int) -> Any:
            return self

    return WholeGroup(group)


class FlashInferOneSidedOp(LibraryDispatchCombineOp):
    """An op of layout rank_major, in FlashInfer's workspace; rows of a source come in any order.

    A token without an expert goes to its own rank as a row without ids, and combines to zeros. Combine reads rows of
    `get_registered_combine_input_buffer`, which is in the workspace, in place. It copies other rows there.
    """

    def _allocated(self, manager: LibraryAll2AllManager, topology: Topology, index: int) -> NVLinkOneSided:
        config, device = self.config, self.device
        num_most, topk = config.max_num_inp_token_per_rank, config.topk
        payloads = {
            "tokens": (config.hidden_dim, config.wire_dtype),
            "ids": (topk, torch.int32),
            "weights": (topk, torch.float32),
            "positions": (1, torch.int32),
        }
        if config.num_scales:
            payloads["scales"] = (config.num_scales * config.scale_bytes, torch.uint8)
        own = torch.arange(num_most, dtype=torch.int32, device=device)[:, None]
        self._own_positions = own + config.rank * self.max_num_tokens_to_send()
        self._result = torch.empty(num_most, config.hidden_dim, dtype=config.combined_dtype, device=device)
        self._received: dict[str, torch.Tensor] = {}
        self._workspace_rows: torch.Tensor | None = None
        self._exchange = NVLinkOneSided(
            payloads,
            num_experts=config.total_experts,
            topk=topk,
            max_num_tokens=num_most,
            combine_row_bytes=config.hidden_dim * config.combined_dtype.itemsize,
            group=manager.cpu_group,
            rank=config.rank,
            world_size=config.world_size,
            index=index,
        )
        return self._exchange

    def _exchange_rows(self, step: StepInputs) -> ReceivedRows:
        config = self.config
        sent = {"tokens": step.tokens, "ids": step.ids, "positions": self._own_positions[: step.num_tokens]}
        if step.weights is not None:
            sent["weights"] = step.weights
        if step.scales is not None:
            sent["scales"] = step.scales.view(torch.uint8)
        routed = conversions.routed_ids(step.ids, config.total_experts, config.first_expert)
        received = self._exchange.dispatch(routed, self._exchange.packed(sent), step.step_tokens)
        self._exchange.mark_padding(received["positions"], NO_EXPERT)
        came = received["positions"] >= 0
        ids = torch.where(came, received["ids"], step.pad_id)
        self._received = received
        counts = came.flatten(1).sum(1, dtype=torch.int32)
        scales = None if step.scales is None else received["scales"].view(step.scales.dtype)
        return ReceivedRows(received["tokens"], scales, ids, received.get("weights"), per_source=counts)

    def _bring_back(self, given: RowsBack) -> CombineResult:
        rows, step = given.rows, given.step
        result = self._result[: step.num_tokens] if given.out is None else given.out
        in_place = self._is_registered(rows)
        fp8 = self.config.combine_quant is QuantType.FP8_DIRECT_CAST
        # a cast in place would destroy the rows
        self._exchange.combine(rows, step.step_tokens, result, in_workspace=in_place and not fp8, fp8=fp8)
        self._workspace_rows = None
        named = conversions.valid_ids(step.ids, self.config.total_experts).any(1, keepdim=True)
        return CombineResult(result.masked_fill_(~named, 0), None)

    def _is_registered(self, rows: torch.Tensor) -> bool:
        return self._workspace_rows is not None and rows.data_ptr() == self._workspace_rows.data_ptr()

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """Returns rows [W * step_tokens, H] of the workspace, for this step. Raises StateError between steps."""
        self._check_buffer_request(dtype, hidden_dim)
        inputs = self._open_inputs
        if inputs is None:
            raise StateError("a dispatch before the combine buffer is asked for", "none", "Ask for it after dispatch.")
        self._workspace_rows = self._exchange.combine_rows(inputs.step_tokens, self.config.hidden_dim, dtype)
        return self._workspace_rows.flatten(0, 1)

    def _positions(self) -> torch.Tensor:
        positions = self._received["positions"].flatten()
        return positions[positions >= 0]

    def _destroy(self) -> None:
        self._received, self._workspace_rows = {}, None
        self._exchange.close()


class FlashInferOneSidedAll2AllManager(LibraryAll2AllManager):
    """FlashInfer's MoeAlltoAll, which vLLM calls flashinfer_nvlink_one_sided."""

    backend = "flashinfer_nvlink_one_sided"
    library = ONE_SIDED
    op_type = FlashInferOneSidedOp
    group_guard = WORKSPACES
    capabilities = Capabilities(
        layouts=(Layout.RANK_MAJOR.value,),
        row_order="source",
        weight_sums=False,
        combine_casts=("none", "fp8_direct_cast"),
        combine_cast_dtypes=("bfloat16",),
        topks=TOPKS,
        even_experts=True,
        single_node=True,
        max_ranks=MAX_RANKS,
        was_run="two H200s, with flashinfer-python 0.7.2.post1; its kernels on four by `ep-a2a bench`",
        notes=(
            "a token without an expert is a row without ids on its own rank",
            "one set of ranks per process",
        ),
    )


class FlashInferTwoSidedOp(LibraryDispatchCombineOp):
    """An op of layout compact, with rows ordered by source; those of a source come in any order."""

    def _allocated(self, manager: LibraryAll2AllManager, topology: Topology, index: int) -> Any:
        from flashinfer.comm.mnnvl import MnnvlConfig, MnnvlMemory

        config, most = self.config, self.config.max_num_inp_token_per_rank
        own = torch.arange(most, dtype=torch.int32, device=self.device)[:, None]
        self._own_positions = (own + config.rank * self.max_num_tokens_to_send()).repeat(1, POSITION_WORDS)
        self._no_weights = torch.zeros(most, config.topk, device=self.device)
        native = manager.library.load("comm.trtllm_alltoall").MnnvlMoe
        mapping = ep_mapping(config.rank, config.world_size)
        mnnvl_config = MnnvlConfig(comm_backend=comm_backend(manager.cpu_group))
        MnnvlMemory.initialize()
        with warnings.catch_warnings():
            # later versions have no other function for these workspaces
            warnings.filterwarnings("ignore", "MnnvlMoe is deprecated", DeprecationWarning)
            self._workspace = native.get_moe_workspaces(mapping=mapping, config=mnnvl_config)
            self._prepare_workspace = native.get_moe_prepare_workspace(mapping=mapping, config=mnnvl_config)
        return native

    def _exchange_rows(self, step: StepInputs) -> ReceivedRows:
        config, experts = self.config, self.config.total_experts
        # an id that is the number of experts belongs to no rank
        ids = torch.where(conversions.valid_ids(step.ids, experts), step.ids, experts)
        self._handle, recv_ids, weights, _ = self._native.mnnvl_moe_alltoallv_prepare_without_allgather(
            expert_ids=ids,
            scales=self._no_weights[: step.num_tokens] if step.weights is None else step.weights,
            expert_statics=None,
            workspace=self._prepare_workspace,
            max_token_count_per_rank=step.step_tokens,
            ep_rank=config.rank,
            ep_size=config.world_size,
            expert_count=experts,
            slot_count=experts,
            top_k=config.topk,
        )
        tokens = self._alltoallv(step.tokens)
        scales = None if step.scales is None else self._alltoallv(step.scales)
        counts = conversions.counts_from_prefix(self._handle.recv_rank_count_cumsum)
        recv_ids = conversions.padded_ids(
            torch.where(recv_ids == experts, step.pad_id, recv_ids), counts.sum(0, keepdim=True), step.pad_id
        )
        return ReceivedRows(tokens, scales, recv_ids, weights, per_source=counts)

    def _alltoallv(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchanges rows [T, n]. Returns those for this rank, [W * step_tokens, n], dense by source."""
        # as bfloat16, a dtype that FlashInfer moves, whatever the rows hold
        received: torch.Tensor = self._native.mnnvl_moe_alltoallv(
            x=rows.view(torch.bfloat16),
            alltoall_info=self._handle,
            workspace=self._workspace,
            ep_rank=self.config.rank,
            ep_size=self.config.world_size,
        )
        return received.view(rows.dtype)

    def _bring_back(self, given: RowsBack) -> CombineResult:
        result = self._native.mnnvl_moe_alltoallv_combine(
            x=given.rows,
            alltoall_info=self._handle,
            workspace=self._workspace,
            ep_rank=self.config.rank,
            ep_size=self.config.world_size,
            top_k=self.config.topk,
            token_count=given.step.num_tokens,
        )
        return self._combine_result(result, given)

    def _positions(self) -> torch.Tensor:
        inputs = self._open_inputs
        assert inputs is not None
        rows = self._alltoallv(self._own_positions[: inputs.num_tokens].contiguous())
        return rows[: int(self._total_recv), 0]


class FlashInferTwoSidedAll2AllManager(LibraryAll2AllManager):
    """FlashInfer's MnnvlMoe, which vLLM calls flashinfer_all2allv and flashinfer_nvlink_two_sided.

    The library has one pair of workspaces per process.
    """

    backend = "flashinfer_nvlink_two_sided"
    library = TWO_SIDED
    op_type = FlashInferTwoSidedOp
    group_guard = WORKSPACES
    capabilities = Capabilities(
        layouts=("compact",),
        row_order="source",
        ids="local",
        micro_batches=False,
        weight_sums=False,
        source_positions="collective",
        scale_row_multiple=16,
        experts_multiple=4,
        even_experts=True,
        min_ranks=2,
        single_node=True,
        was_run="two H200s, with flashinfer-python 0.7.2.post1",
        notes=(
            "one set of ranks per process",
            "its class is deprecated since 0.7.1",
        ),
    )
