"""The backend flashinfer_nvlink_one_sided: dispatch pushes a token once to each distinct rank, combine pulls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_a2a.config import Layout, QuantType
from ep_a2a.errors import EpA2AError, StateError, UnsupportedError
from ep_a2a.interface import CombineResult
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import received_rows
from ep_a2a.managers.external.flashinfer_exchange import MAX_RANKS, ONE_SIDED, TOPKS, WORKSPACES, NVLinkOneSided
from ep_a2a.managers.external.library_manager import LibraryAll2AllManager
from ep_a2a.managers.external.library_op import Arrived, LibraryDispatchCombineOp

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.managers.external.single_group_guard import SingleGroupGuard
    from ep_a2a.ops.adapter import RowsBack
    from ep_a2a.ops.arguments import StepInputs
    from ep_a2a.topology import Topology

NO_EXPERT = -1


class FlashInferOneSidedOp(LibraryDispatchCombineOp):
    """An op of layout rank_major, in FlashInfer's workspace; rows of a source come in any order.

    A token without an expert goes to its own rank as a row without ids, and combines to zeros. Combine reads rows of
    `get_registered_combine_input_buffer`, which is in the workspace, in place. It copies other rows there.
    """

    def __init__(self, manager: LibraryAll2AllManager, config: EpDispatchCombineConfig, index: int) -> None:
        super().__init__(manager, config, None)
        num_most, topk, device = config.max_num_inp_token_per_rank, config.topk, self.device
        payloads = {
            "tokens": (config.hidden_dim, config.wire_dtype),
            "ids": (topk, torch.int32),
            "weights": (topk, torch.float32),
            "positions": (1, torch.int32),
        }
        if config.num_scales:
            payloads["scales"] = (config.num_scales * config.scale_bytes, torch.uint8)
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
        own = torch.arange(num_most, dtype=torch.int32, device=device)[:, None]
        self._own_positions = own + config.rank * self.max_num_tokens_to_send()
        self._result = torch.empty(num_most, config.hidden_dim, dtype=config.combined_dtype, device=device)
        self._received: dict[str, torch.Tensor] = {}
        self._workspace_rows: torch.Tensor | None = None

    def _exchange_rows(self, step: StepInputs) -> Arrived:
        config, limit = self.config, step.max_num_tokens
        sent = {"tokens": step.tokens, "ids": step.ids, "positions": self._own_positions[: step.num_tokens]}
        if step.weights is not None:
            sent["weights"] = step.weights
        if step.scales is not None:
            sent["scales"] = step.scales.view(torch.uint8)
        routed = received_rows.routed_ids(step.ids, config.total_experts, config.first_expert)
        received = self._exchange.dispatch(routed, self._exchange.packed(sent), limit, tuple(sent))
        self._exchange.mark_padding(received["positions"], NO_EXPERT)
        came = received["positions"] >= 0
        ids = torch.where(came, received["ids"], step.pad_id)
        self._received = received
        counts = came.flatten(1).sum(1, dtype=torch.int32)
        scales = None if step.scales is None else received["scales"].view(step.scales.dtype)
        return Arrived(received["tokens"], scales, ids, received.get("weights"), per_source=counts)

    def _bring_back(self, given: RowsBack) -> CombineResult:
        rows, step = given.rows, given.step
        result = self._result[: step.num_tokens] if given.out is None else given.out
        in_place = self._is_registered(rows)
        fp8 = self.config.combine_quant is QuantType.FP8_DIRECT_CAST
        # a cast in place would destroy the rows
        self._exchange.combine(rows, step.max_num_tokens, result, in_workspace=in_place and not fp8, fp8=fp8)
        self._workspace_rows = None
        named = received_rows.valid_ids(step.ids, self.config.total_experts).any(1, keepdim=True)
        return CombineResult(result.masked_fill_(~named, 0), None)

    def _is_registered(self, rows: torch.Tensor) -> bool:
        return self._workspace_rows is not None and rows.data_ptr() == self._workspace_rows.data_ptr()

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """Returns rows [W * max_num_tokens, H] of the workspace, for this step. Raises StateError between steps."""
        self._check_buffer_request(dtype, hidden_dim)
        if self._inputs is None:
            raise StateError("a dispatch before the combine buffer is asked for", "none", "Ask for it after dispatch.")
        self._workspace_rows = self._exchange.combine_rows(self._inputs.max_num_tokens, self.config.hidden_dim, dtype)
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
    capabilities = Capabilities(
        layouts=(Layout.RANK_MAJOR.value,),
        row_order="source",
        weight_sums=False,
        combine_casts=("none", "fp8_direct_cast"),
        topks=TOPKS,
        even_experts=True,
        single_node=True,
        max_ranks=MAX_RANKS,
        was_run="two H200s, with flashinfer-python 0.7.2.post1; its kernels on four by `ep-a2a bench`",
        notes=(
            "a token without an expert is a row without ids on its own rank",
            "fp8_direct_cast: bfloat16",
            "one set of ranks per process",
        ),
    )

    def _refusal(self, config: EpDispatchCombineConfig, topology: Topology) -> EpA2AError | None:
        if config.combine_quant is not QuantType.NONE and config.combined_dtype != torch.bfloat16:
            return UnsupportedError(
                "a cast of bfloat16 rows in combine, which is what this backend can do",
                str(config.combined_dtype),
                "Pass combine_dtype=torch.bfloat16 or quant_type='none'.",
            )
        return super()._refusal(config, topology)

    def _group_guard(self, topology: Topology) -> SingleGroupGuard:
        return WORKSPACES

    def _build(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> FlashInferOneSidedOp:
        return FlashInferOneSidedOp(self, config, index)
