"""FlashInfer over NVLink: the backends flashinfer_nvlink_one_sided and flashinfer_nvlink_two_sided."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ep_a2a.config import Layout, QuantType
from ep_a2a.errors import StateError
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.interface import CombineResult
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.external import conversions
from ep_a2a.managers.external import library as lib
from ep_a2a.ops.arguments import CombineArguments, Step
from ep_a2a.topology import Topology

LIBRARY = lib.Library(
    "flashinfer",
    "flashinfer-python",
    "pip install 'flashinfer-python>=0.7.2'",
    "0.7.2",
    needs=(
        "comm.mnnvl:TorchDistBackend",
        "moe_ep:BootstrapConfig",
        "moe_ep:MoEEpCommParams",
        "moe_ep:NVLinkOneSidedAlltoAll",
        "moe_ep:NVLinkTwoSidedAlltoAll",
    ),
)

WORKSPACES = lib.SingleGroupGuard("FlashInfer's workspaces", by_ranks=True)
"""Both classes find a process's workspaces by sizes and rank, not by group. A process agrees on fabric handles once, so
later groups must have the same ranks."""

TOPKS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)
"""Values of K that the one-sided kernels of every release are instantiated for."""
MAX_RANKS = 64
WORD_BYTES = 16
"""Bytes of the widest store: rows of another size would leave the payload behind them misaligned before 0.7.4."""
WORKSPACE_ALIGNMENT_BYTES = 256
ROUTING_BYTES = 8
"""Bytes that FlashInfer reserves for each expert of a token: an id and a weight."""
POSITION_WORDS = 4
"""int32 words of a position beside the scales: the two-sided kernels move rows of a multiple of 16 bytes."""
STEP_BOUNDS = ("runtime_max_tokens_per_rank", "max_tokens_per_rank")
"""Names of dispatch's bound on the tokens of a step: from 0.7.4 on, and before."""


def bootstrap_of(group: ProcessGroup) -> Any:
    """Returns FlashInfer's description of a group."""
    from flashinfer.moe_ep import BootstrapConfig

    return BootstrapConfig(world_size=dist.get_world_size(group), rank=dist.get_rank(group))


def comm_backend(group: ProcessGroup) -> Any:
    """Returns a backend by which FlashInfer exchanges handles of memory over this group; it is never split."""
    from flashinfer.comm.mnnvl import TorchDistBackend

    class WholeGroup(TorchDistBackend):  # type: ignore[misc]
        def Split(self, color: int, key: int) -> Any:
            return self

    return WholeGroup(group)


def step_bound(native: Any) -> str:
    """Returns the name of the argument by which `native.dispatch` takes the most tokens of any rank in a step."""
    known = inspect.signature(native.dispatch).parameters
    return next(name for name in STEP_BOUNDS if name in known)


def wire_view(rows: torch.Tensor) -> torch.Tensor:
    """Returns rows [T, n] as FlashInfer takes them: elements of one byte, whatever they are, as bytes."""
    return rows.view(torch.uint8) if rows.itemsize == 1 else rows


class NVLinkOneSided:
    """FlashInfer's NVLinkOneSidedAlltoAll. dispatch and combine alternate and never wait on the host.

    Construction is collective.

    Args:
        hidden_dim, dtype: of the rows that combine sums.
        payload_bytes: of all that travels with a token, at least as many as are sent.
        num_experts: experts over all ranks, owned linearly.
        topk: experts per token.
        max_tokens: most tokens of a rank in any step, >= 1.
        group: all ranks.
        fp8_combine: cast rows to fp8 on the wire, without scales. Rows in the workspace are cast in place.
        index: objects whose steps overlap need different ones; those of one size and index share a workspace.
    """

    def __init__(
        self,
        *,
        hidden_dim: int,
        dtype: torch.dtype,
        payload_bytes: int,
        num_experts: int,
        topk: int,
        max_tokens: int,
        group: ProcessGroup,
        fp8_combine: bool = False,
        index: int = 0,
    ) -> None:
        from flashinfer.moe_ep import MoEEpCommParams, NVLinkOneSidedAlltoAll, NVLinkOneSidedConfig

        self._group = group
        reserved = hidden_dim * dtype.itemsize + ROUTING_BYTES * topk
        params = MoEEpCommParams(
            num_experts=num_experts, top_k=topk, max_tokens_per_rank=max_tokens, hidden_size=hidden_dim, dtype=dtype
        )
        config = NVLinkOneSidedConfig(
            # The class shares workspaces of one size, so each index gets a size of its own.
            extra_payload_bytes_per_token=max(0, payload_bytes - reserved) + index * WORKSPACE_ALIGNMENT_BYTES,
            use_low_precision_combine=fp8_combine,
            comm_backend=comm_backend(group),
        )
        self._native: Any = NVLinkOneSidedAlltoAll(bootstrap_of(group), params, config)
        self._step_bound = step_bound(self._native)

    @outside_graphs
    def dispatch(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        routing: torch.Tensor,
        scales: torch.Tensor | None,
        step_tokens: int,
    ) -> Any:
        """Sends rows, and returns the received ones as [W * step_tokens, n], ids -1 in those without a token.

        Their addresses depend on the rows sent and step_tokens.

        Args:
            tokens: [T, n], as of `wire_view`.
            ids: int32 [T, K], an expert in every slot. The token goes to their ranks.
            routing: float32 [T, n], weights or anything else that goes with a token; `topk_weights` of the result.
            scales: [T, n], as of `wire_view`; rows of a multiple of WORD_BYTES.
            step_tokens: the most tokens that any rank brings to the step, equal on all ranks.
        """
        return self._native.dispatch(
            tokens, ids, routing, hidden_states_scale=scales, **{self._step_bound: step_tokens}
        )

    def combine_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory [W * step_tokens, H] that combine reads in place. For use between dispatch and combine."""
        rows: torch.Tensor = self._native.get_combine_input_buffer(dtype)
        return rows

    @outside_graphs
    def combine(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Sums rows [W * step_tokens, H] of the ranks that each token went to, into out [T, H].

        Args:
            rows: of `combine_rows` of this step, which are read in place, or any.
            out: contiguous.
        """
        self._native.combine(rows, output=out)

    def close(self) -> None:
        """Gives the workspace back once no rank uses it. Collective. Before 0.7.4 the process keeps it."""
        torch.cuda.synchronize()
        dist.barrier(self._group)
        self._native.destroy()


class FlashInferOp(lib.LibraryDispatchCombineOp):
    """Base of the ops on FlashInfer's exchanges, which do not say where rows come from: positions travel with them."""

    def _make_positions(self) -> None:
        own = torch.arange(self.config.max_num_inp_token_per_rank, dtype=torch.int32, device=self.device)[:, None]
        self._own_positions = own + self.config.rank * self._position_stride
        self._received_positions = self._own_positions[:0, 0]

    def _positions(self) -> torch.Tensor:
        return self._received_positions[self._received_positions >= 0]


class FlashInferOneSidedOp(FlashInferOp):
    """An op of layout rank_major, in FlashInfer's workspace; rows of a source come in any order.

    A token without an expert goes to its own rank as a row without ids, and combines to zeros. Combine reads rows of
    `get_registered_combine_input_buffer`, which is in the workspace, in place. It copies other rows there.
    """

    def _allocated(self, manager: lib.LibraryAll2AllManager, topology: Topology, index: int) -> NVLinkOneSided:
        config, device = self.config, self.device
        num_most, topk = config.max_num_inp_token_per_rank, config.topk
        self._make_positions()
        self._result = torch.empty(num_most, config.hidden_dim, dtype=config.combined_dtype, device=device)
        self._workspace_rows: torch.Tensor | None = None
        self._fp8_combine = config.combine_quant is QuantType.FP8_DIRECT_CAST
        routing_bytes = ROUTING_BYTES * topk + torch.int32.itemsize
        self._exchange = NVLinkOneSided(
            hidden_dim=config.hidden_dim,
            dtype=config.combined_dtype,
            payload_bytes=(
                config.hidden_dim * config.wire_dtype.itemsize
                + config.num_scales * config.scale_bytes
                + topk * torch.int32.itemsize
                + routing_bytes
            ),
            num_experts=config.total_experts,
            topk=topk,
            max_tokens=num_most,
            group=manager.cpu_group,
            fp8_combine=self._fp8_combine,
            index=index,
        )
        return self._exchange

    def _exchange_rows(self, step: Step) -> lib.ReceivedRows:
        config, num_tokens = self.config, step.num_tokens
        routed = conversions.routed_ids(step.ids, config.total_experts, config.first_expert)
        # FlashInfer moves four payloads at most. These rows have an odd number of words, so any word may begin them.
        # They are no K weights, which keeps out the transport of compute capability 10 that leaves gaps between rows.
        weights = self._some_weights(step)
        sent = torch.cat([step.ids, weights.view(torch.int32), self._own_positions[:num_tokens]], 1)
        scales = None if step.scales is None else wire_view(step.scales)
        got = self._exchange.dispatch(
            wire_view(step.tokens), routed, sent.view(torch.float32), scales, step.bounds.most
        )
        by_source = (config.world_size, step.bounds.most, -1)
        came = got.topk_ids.view(by_source)[..., :1] >= 0
        routing = got.topk_weights.view(torch.int32).view(by_source)
        ids, received_weights, positions = routing.split([config.topk, config.topk, 1], dim=-1)
        self._received_positions = torch.where(came, positions, -1).flatten()
        counts = came.flatten(1).sum(1, dtype=torch.int32)
        return lib.ReceivedRows(
            got.hidden_states.view(step.tokens.dtype).view(by_source),
            None if step.scales is None else got.hidden_states_scale.view(step.scales.dtype).view(by_source),
            torch.where(came, ids, step.pad_id),
            received_weights.contiguous().view(torch.float32),
            per_source=counts,
        )

    def _bring_back(self, step: Step, args: CombineArguments) -> CombineResult:
        rows = args.rows
        result = self._result[: step.num_tokens] if args.out is None else args.out
        if self._fp8_combine and self._is_registered(rows):
            # a cast in place would destroy the rows
            rows = rows.clone()
        self._exchange.combine(rows.flatten(0, -2), result)
        self._workspace_rows = None
        named = conversions.valid_ids(step.ids, self.config.total_experts).any(1, keepdim=True)
        return CombineResult(result.masked_fill_(~named, 0), None)

    def _is_registered(self, rows: torch.Tensor) -> bool:
        return self._workspace_rows is not None and rows.data_ptr() == self._workspace_rows.data_ptr()

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """Returns rows [W * step_tokens, H] of the workspace, for this step. Raises StateError between steps."""
        self._check_buffer_request(dtype, hidden_dim)
        if self.open_step is None:
            raise StateError("a dispatch before the combine buffer is asked for", "none", "Ask for it after dispatch.")
        self._workspace_rows = self._exchange.combine_rows(dtype)
        return self._workspace_rows

    def _destroy(self) -> None:
        self._workspace_rows = None
        self._exchange.close()


class FlashInferOneSidedAll2AllManager(lib.LibraryAll2AllManager):
    """FlashInfer's NVLinkOneSidedAlltoAll, which vLLM calls flashinfer_nvlink_one_sided."""

    backend = "flashinfer_nvlink_one_sided"
    library = LIBRARY
    op_type = FlashInferOneSidedOp
    group_guard = WORKSPACES
    capabilities = Capabilities(
        layouts=(Layout.RANK_MAJOR.value,),
        row_order="source",
        weight_sums=False,
        scale_row_multiple=WORD_BYTES,
        combine_casts=("none", "fp8_direct_cast"),
        combine_cast_dtypes=("bfloat16",),
        hidden_multiple=WORD_BYTES,
        topks=TOPKS,
        topk_within_experts=True,
        even_experts=True,
        single_node=True,
        max_ranks=MAX_RANKS,
        was_run="flashinfer-python 0.7.2.post1 and 0.7.4, two ranks on one H200; kernels of 0.7.2.post1 on four H200s",
        notes=(
            "a token without an expert is a row without ids on its own rank",
            "one set of ranks per process",
            "all NVLinks of a GPU must be up",
            "before flashinfer-python 0.7.4 a workspace stays until the process ends",
        ),
    )


class FlashInferTwoSidedOp(FlashInferOp):
    """An op of layout compact, with rows ordered by source; those of a source come in any order."""

    def _allocated(self, manager: lib.LibraryAll2AllManager, topology: Topology, index: int) -> Any:
        from flashinfer.moe_ep import MoEEpCommParams, NVLinkTwoSidedAlltoAll, NVLinkTwoSidedConfig

        config, most, group = self.config, self.config.max_num_inp_token_per_rank, manager.cpu_group
        self._make_positions()
        self._own_positions = self._own_positions.repeat(1, POSITION_WORDS)
        self._ranks = torch.arange(config.world_size, dtype=torch.int32, device=self.device)[:, None]
        params = MoEEpCommParams(
            num_experts=config.total_experts,
            top_k=config.topk,
            max_tokens_per_rank=most,
            hidden_size=config.hidden_dim,
            dtype=config.combined_dtype,
        )
        options = NVLinkTwoSidedConfig(comm_backend=comm_backend(group))
        native: Any = NVLinkTwoSidedAlltoAll(bootstrap_of(group), params, options)
        self._step_bound = step_bound(native)
        return native

    def _exchange_rows(self, step: Step) -> lib.ReceivedRows:
        experts, num_tokens = self.config.total_experts, step.num_tokens
        # an id that is the number of experts belongs to no rank
        ids = torch.where(conversions.valid_ids(step.ids, experts), step.ids, experts)
        # positions travel beside the scales
        beside = self._own_positions[:num_tokens]
        if step.scales is not None:
            beside = torch.cat([step.scales.view(torch.int32), beside], 1)
        # as bfloat16, a dtype that FlashInfer moves, whatever the rows hold
        got = self._native.dispatch(
            step.tokens.view(torch.bfloat16),
            ids,
            self._some_weights(step),
            hidden_states_scale=beside.view(torch.bfloat16),
            **{self._step_bound: step.bounds.most},
        )
        came = (got.topk_ids >= 0).any(1)
        received = got.hidden_states_scale.view(torch.int32)
        positions = torch.where(came, received[:, -1], -1)
        self._received_positions = positions
        sources = positions.div(self._position_stride, rounding_mode="floor")
        scales = None
        if step.scales is not None:
            scales = received[:, :-POSITION_WORDS].contiguous().view(step.scales.dtype)
        return lib.ReceivedRows(
            got.hidden_states.view(step.tokens.dtype),
            scales,
            torch.where(got.topk_ids < 0, step.pad_id, got.topk_ids),
            got.topk_weights,
            per_source=(sources == self._ranks).sum(1, dtype=torch.int32),
        )

    def _bring_back(self, step: Step, args: CombineArguments) -> CombineResult:
        return self._combine_result(self._native.combine(args.rows), args)

    def _destroy(self) -> None:
        self._native.destroy()


class FlashInferTwoSidedAll2AllManager(lib.LibraryAll2AllManager):
    """FlashInfer's NVLinkTwoSidedAlltoAll, which vLLM calls flashinfer_all2allv and flashinfer_nvlink_two_sided.

    The library has one pair of workspaces per process.
    """

    backend = "flashinfer_nvlink_two_sided"
    library = LIBRARY
    op_type = FlashInferTwoSidedOp
    group_guard = WORKSPACES
    capabilities = Capabilities(
        layouts=("compact",),
        row_order="source",
        ids="local",
        micro_batches=False,
        weight_sums=False,
        scale_row_multiple=WORD_BYTES,
        hidden_multiple=WORD_BYTES,
        topk_within_experts=True,
        experts_multiple=4,
        even_experts=True,
        min_ranks=2,
        single_node=True,
        was_run="flashinfer-python 0.7.2.post1 and 0.7.4, two ranks on one H200; kernels of 0.7.2.post1 on two H200s",
        notes=("one set of ranks per process", "all NVLinks of a GPU must be up"),
    )
