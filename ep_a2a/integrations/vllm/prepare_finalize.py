"""Our prepare/finalize for vLLM's MoE layers: dispatch before the experts, combine after them."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch.cuda import is_current_stream_capturing
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input, normalize_batched_scales_shape
from vllm.v1.worker.ubatching import (
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_switch_to_comm,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)

from ep_a2a.errors import StateError, UnsupportedError
from ep_a2a.integrations.dispatcher import Dispatcher
from ep_a2a.integrations.token_format import RAW, LayerShape, TokenFormat, agreed_bounds, rounded_up, tokens_per_rank
from ep_a2a.integrations.vllm.manager import VllmAll2AllManager
from ep_a2a.integrations.vllm.token_format import token_format_of
from ep_a2a.interface import DispatchResult

ROWS_MULTIPLE = 128
"""DeepGEMM's masked products write tiles of so many rows, which must not reach into the next expert's."""
QUANTIZE_OPTIONS = frozenset(inspect.signature(moe_kernel_quantize_input).parameters)
EXPERTS_OF_TWO_KINDS = ("experts", "fallback_experts")
"""Attributes of experts that choose between two kinds."""
COUNTED_ROWS = 2048
"""Rows from which the host waits for the counts by expert, for experts that else work on all that could come.

DeepGEMM's experts of DeepSeek-V3 at EP8 took 746 µs without counts and 889 with the wait at 512 rows, and 2,244 and
1,152 at 4,096 (bench/results/2026-11-29_experts_formats.md)."""


def make_prepare_finalize(moe: Any, *, use_monolithic: bool) -> EpA2APrepareAndFinalize:
    """Returns the prepare/finalize of a layer whose tokens travel between ranks.

    Args:
        moe: vLLM's FusedMoEConfig.
        use_monolithic: the experts want router logits instead of ids.

    Raises:
        StateError: the expert-parallel group does not carry our manager.
        UnsupportedError: monolithic experts.
    """
    from vllm.distributed.parallel_state import get_ep_group

    manager = get_ep_group().device_communicator.all2all_manager
    if not isinstance(manager, VllmAll2AllManager):
        raise StateError(
            "the ep_a2a manager on vLLM's expert-parallel group",
            type(manager).__name__,
            "Choose the backend by --all2all-backend ep_a2a before the groups are made.",
        )
    if use_monolithic:
        raise UnsupportedError(
            "experts that work on dispatched ids (modular kernels)",
            "monolithic ones, which want router logits",
            "Choose other experts, for example --moe-backend triton, or --all2all-backend allgather_reducescatter.",
        )
    max_tokens = tokens_per_rank(moe.max_num_tokens, moe.moe_parallel_config.sp_size)
    is_batched = moe.moe_parallel_config.use_batched_activation_format
    kind = BatchedPrepareAndFinalize if is_batched else EpA2APrepareAndFinalize
    return kind(manager, moe, max_tokens)


class EpA2APrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """vLLM's prepare/finalize in its standard activation format, on an op that all layers of one shape share.

    Experts see as many rows as the ranks bring tokens, or where CUDA graphs pad all ranks to t tokens, W * t. Rows
    without a token carry the id of another rank's expert, which expert_map filters out.

    The op is built when vLLM pairs this object with its experts: after the weights are loaded, before memory is
    profiled. Combine sends the experts' rows from where they lie. So vLLM's allocate_fused_expert_output (from 0.32)
    is not overridden: memory of ours would save no copy.

    With dual batch overlap (DBO) vLLM runs a step as micro-batches, each in a thread. Each micro-batch has an op, whose
    calls run on vLLM's communication stream. The thread hands over before each call, so that another micro-batch
    computes meanwhile. Steps that vLLM does not split use the first op, on the current stream.

    Args:
        manager: of the expert-parallel group.
        moe: vLLM's FusedMoEConfig of the layer.
        max_tokens: the most tokens of this rank in any step.
    """

    layout = "rank_major"

    def __init__(self, manager: VllmAll2AllManager, moe: Any, max_tokens: int) -> None:
        super().__init__()
        self._manager = manager
        self._moe = moe
        self._max_tokens = max_tokens
        self._multiple = 1
        self._format: TokenFormat = RAW
        self._dispatchers: list[Dispatcher] = []
        self._takes_counts, self._most_rows = False, 0

    @property
    def activation_format(self) -> Any:
        """vLLM's standard format: one row per received token."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        """The dtype of the ids that `prepare` takes."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int:
        """The most tokens that a rank brings to a step."""
        return self._max_tokens

    def num_dispatchers(self) -> int:
        """The number of ranks that send tokens here."""
        return self._manager.world_size

    def output_is_reduced(self) -> bool:
        """True: `finalize` returns sums over all ranks."""
        return True

    def supports_dbo(self) -> bool:
        """True: a layer may be called by several micro-batches in turn."""
        return True

    def supports_async(self) -> bool:
        """Whether vLLM calls `prepare_async` and `finalize_async`: in micro-batches; it asks in each step."""
        return bool(dbo_enabled())

    def post_init_setup(self, fused_experts: Any) -> None:
        """Builds the op of each micro-batch for these experts. Collective."""
        from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        moe = self._moe
        # vLLM's choice between these and Triton's is certain with such scales alone; Triton's need more scratch memory
        kinds = [getattr(fused_experts, name, None) for name in EXPERTS_OF_TWO_KINDS if is_deep_gemm_e8m0_used()]
        self._takes_counts = any(isinstance(each, DeepGemmExperts) for each in (fused_experts, *kinds))
        self._format = token_format_of(
            fused_experts.quant_config,
            moe.hidden_dim,
            expects_unquantized=fused_experts.expects_unquantized_inputs,
            powers_of_two=is_deep_gemm_e8m0_used(),
        )
        shape = LayerShape(
            dtype=moe.in_dtype,
            hidden_dim=moe.hidden_dim,
            topk=moe.experts_per_token,
            num_experts=moe.num_experts,
            num_local_experts=moe.num_local_experts,
            max_tokens=self._max_tokens,
            layout=self.layout,
            multiple=self._multiple,
        )
        # vLLM makes one configuration per layer
        self._dispatchers = self._manager.dispatchers(moe, self._format, shape)
        self._raise_row_limit(fused_experts)

    @property
    def _dispatcher(self) -> Dispatcher:
        """That of the micro-batch that this thread runs; the first one outside of micro-batches."""
        if not self._dispatchers:
            raise StateError("post_init_setup before a step", "none", "Build a FusedMoEKernel of this object.")
        return self._dispatchers[int(dbo_current_ubatch_id())]

    def _raise_row_limit(self, fused_experts: Any) -> None:
        """Raises the row limit by which CUTLASS's and Humming's experts size their scratch memory (vLLM below 0.32).

        Humming's experts of 0.30 and 0.31 multiply the limit by the data-parallel ranks, so theirs is divided by that.
        Other experts keep their config: FlashInfer's multiply the limit themselves.
        """
        # experts that choose between two kinds in each step hold both, each with a reference to the config
        of_two_kinds = (getattr(fused_experts, name, None) for name in EXPERTS_OF_TWO_KINDS)
        for experts in (fused_experts, *of_two_kinds):
            if hasattr(experts, "_get_permute_scratch"):
                experts.moe_config = moe = copy.copy(experts.moe_config)
                multiplies = "dp_size" in experts._get_permute_scratch.__code__.co_names
                num_rows = self._manager.world_size * self._max_tokens
                moe.max_num_tokens = -(-num_rows // (self._manager.dp_group.world_size if multiplies else 1))

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `prepare_async`, and returns the result."""
        return self.prepare_async(*args, **kwargs)()

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Callable[[], Any]:
        """Dispatches a1 [T, H] with its ids and weights [T, K].

        In a micro-batch, dispatch runs on vLLM's communication stream, and the compute stream waits for it. Inputs and
        their copies live until then.

        Args:
            a1: this rank's tokens; [T, less than H] where vLLM leaves the columns that pad H to quantisation
                (skip_forward_padding). Zeros travel in their place.
            topk_weights, topk_ids: [T, K], their router weights and global expert ids.
            num_experts: over all ranks.
            expert_map: global to local ids; used on CPU only.
            apply_router_weight_on_input: multiply tokens by their weight first; K must be 1.
            quant_config: how received rows are quantised, where dispatch does not cast them.
            defer_input_quant: vLLM's: the experts quantise received rows themselves.

        Returns:
            A function that returns
            (rows [R, H], their scales or None, ExpertTokensMetadata or None, ids [R, K] int32 global, weights [R, K]),
            where R is the sum of `_bounds`.
        """
        dispatcher = self._dispatcher
        fitted = dispatcher.fitted(a1, topk_weights, topk_ids, weights_on_input=apply_router_weight_on_input)
        dbo_yield_and_switch_from_compute_to_comm()
        bounds = self._bounds()
        counts = self._has_counts(bounds * self._manager.world_size if isinstance(bounds, int) else sum(bounds))
        received = dispatcher.dispatch(*fitted, step_tokens=bounds, call_local_expert_count=counts)
        dbo_switch_to_compute_sync()
        metadata = self._counts_of_experts() if counts else None
        quant_config = None if defer_input_quant else quant_config
        return lambda: self._rows_for_experts(received, expert_map, quant_config, metadata)

    def _has_counts(self, num_rows: int) -> bool:
        """Whether the experts get their numbers of rows in this step, for which the host waits.

        Not inside CUDA graphs, nor in micro-batches, whose overlap the wait would end. Nor in the first step of as many
        rows: in vLLM's memory profile, experts without counts reserve as much scratch memory as they can ever need.
        """
        in_graph = self._manager.device.type == "cuda" and is_current_stream_capturing()
        if not self._takes_counts or num_rows < COUNTED_ROWS or dbo_enabled() or in_graph:
            return False
        is_first, self._most_rows = num_rows > self._most_rows, max(num_rows, self._most_rows)
        return not is_first

    def _counts_of_experts(self) -> Any:
        """Returns the rows of each local expert, on the device and on the host. Synchronises."""
        counts = self._dispatcher.op.local_expert_count
        return mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=counts.cpu())

    def _bounds(self) -> int | tuple[int, ...]:
        """The most tokens of every rank in this step, or those of each: equal on all ranks, one inside a CUDA graph.

        vLLM exchanges the token counts of data-parallel ranks on the host before a forward pass, and pads them to be
        equal where it replays a graph or splits the step. With sequence parallelism each rank of a replica takes an
        equal share.
        """
        metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
        counts = None if metadata is None else metadata.num_tokens_across_dp_cpu.tolist()
        config, sp_size = self._dispatcher.op.config, self._moe.moe_parallel_config.sp_size
        bounds = agreed_bounds(counts, sp_size, config.max_num_inp_token_per_rank, self._manager.tokens_option)
        # where ranks may be masked, places of rows follow from one bound
        return bounds if isinstance(bounds, int) or not config.masks else max(bounds)

    def _rows_for_experts(
        self, received: DispatchResult, expert_map: torch.Tensor | None, quant_config: Any, counts: Any
    ) -> Any:
        """Returns what `prepare` does; quant_config: None where the experts quantise. counts: of the experts' rows."""
        if self._format.quantize_after and quant_config is not None:
            received = self._quantized(received, quant_config)
        return self._in_format(received, expert_map, counts)

    def _in_format(self, received: DispatchResult, expert_map: torch.Tensor | None, counts: Any) -> Any:
        """Returns what `prepare` does, of rows that are quantised as the experts want them."""
        rows, weights, scales, ids, _ = received
        assert weights is not None  # dispatch was given them
        if rows.device.type == "cpu":
            ids, weights = local_ids(ids, weights, expert_map)
        return rows, scales, counts, ids, weights

    def _has_token(self, received: DispatchResult) -> torch.Tensor:
        """Returns which of the received rows hold a token: bool [R]."""
        return received.indices.ne(self._dispatcher.pad_id).any(1)

    def _quantized(self, received: DispatchResult, quant_config: Any) -> DispatchResult:
        """Returns the received rows as vLLM's helper quantises them, with their scales."""
        rows = received.tokens
        if self._format.by_whole_tensor:
            rows = torch.where(self._has_token(received)[:, None], rows, 0)
        options = {
            name: getattr(quant_config, name)
            for name in ("is_scale_swizzled", "is_scale_transposed", "mx_alignment")
            if name in QUANTIZE_OPTIONS and hasattr(quant_config, name)
        }
        rows, scales = moe_kernel_quantize_input(
            rows,
            quant_config.a1_gscale if quant_config.quant_dtype == "nvfp4" else quant_config.a1_scale,
            quant_dtype=quant_config.quant_dtype,
            per_act_token_quant=quant_config.per_act_token_quant,
            block_shape=quant_config.block_shape,
            **options,
        )
        return received._replace(tokens=rows, scales=scales)

    def finalize(self, *args: Any, **kwargs: Any) -> None:
        """Runs `finalize_async` to its end."""
        self.finalize_async(*args, **kwargs)()

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], object]:
        """Combines the experts' rows into output [T, H]. Returns a function that must run before output is read.

        In a micro-batch, combine runs on vLLM's communication stream, and the function makes the compute stream wait
        for it.

        Args:
            output: overwritten with the sums for the tokens that this rank dispatched; [T, less than H] where the
                experts drop the columns that pad H (vLLM's output_hidden_dim, from 0.33).
            fused_expert_output: the experts' rows, one per received row or one per slot.
            topk_weights, topk_ids: [R, K], of the received rows.
            apply_router_weight_on_input: the weights have been applied already.
            weight_and_reduce_impl: vLLM's; how slots are weighed and added to one row per received row.
        """
        dispatcher = self._dispatcher
        rows = self._row_sums(
            weight_and_reduce_impl,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        # experts may leave out the last columns, which only pad H; what combine reads is held until it has ended
        rows = dispatcher.padded(rows)
        if rows.data_ptr() == output.data_ptr():
            # vLLM gives experts output's memory where the shapes are equal: if no other rank has tokens
            rows = rows.clone()
        if dbo_enabled():
            dbo_yield_and_switch_from_compute_to_comm()
            dispatcher.combine(rows, output)
            dbo_switch_to_compute()
            return functools.partial(_wait_for_combine, rows)
        dispatcher.combine(rows, output)
        return lambda: None

    def _row_sums(self, weight_and_reduce_impl: Any, **given: Any) -> torch.Tensor:
        """Returns what combine takes of the experts' output: a weighted sum for each received row."""
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        sums: torch.Tensor = weight_and_reduce_impl.apply(output=None, **given)
        return sums


class BatchedPrepareAndFinalize(EpA2APrepareAndFinalize):
    """The same in vLLM's batched format: rows [E, R, H] by local expert, and their number per expert on the device.

    R is W * t, t being the most tokens that any rank brings to the step, rounded up so that ROWS_MULTIPLE divides R.
    Combine weighs and adds the experts' rows.
    """

    layout = "expert_major"

    def __init__(self, manager: VllmAll2AllManager, moe: Any, max_tokens: int) -> None:
        multiple = ROWS_MULTIPLE // math.gcd(ROWS_MULTIPLE, manager.world_size)
        super().__init__(manager, moe, rounded_up(max_tokens, multiple))
        self._multiple = multiple

    @property
    def activation_format(self) -> Any:
        """vLLM's batched format: the rows of each expert."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    def post_init_setup(self, fused_experts: Any) -> None:
        """Builds the op of each micro-batch for these experts. Collective."""
        super().post_init_setup(fused_experts)
        self._experts = fused_experts
        if fused_experts.quant_config.quant_dtype == "nvfp4":
            # whose only batched experts quantise rows themselves, and do not say so
            self._format = RAW

    def _bounds(self) -> int:
        bounds = super()._bounds()
        return rounded_up(bounds if isinstance(bounds, int) else max(bounds), self._multiple)

    def _in_format(self, received: DispatchResult, *_: Any) -> Any:
        counts = self._dispatcher.op.expert_recv_count
        rows = received.tokens.view(len(counts), -1, received.tokens.shape[-1])
        # by whose product experts size their memory in each step
        self._experts.max_num_tokens, self._experts.num_dispatchers = rows.shape[1], 1
        metadata = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
        return rows, normalize_batched_scales_shape(received.scales, len(counts)), metadata, None, None

    def _has_token(self, received: DispatchResult) -> torch.Tensor:
        counts = self._dispatcher.op.expert_recv_count
        place = torch.arange(len(received.tokens) // len(counts), device=counts.device)
        is_used: torch.Tensor = place < counts[:, None]
        return is_used.flatten()

    def _row_sums(self, weight_and_reduce_impl: Any, **given: Any) -> torch.Tensor:
        rows: torch.Tensor = given["fused_expert_output"]
        return rows


def _wait_for_combine(_rows: torch.Tensor) -> None:
    """Makes the compute stream wait for a micro-batch's combine, behind which the other micro-batches compute.

    Args:
        _rows: held so that no other tensor gets their memory while combine reads them.
    """
    dbo_switch_to_comm()
    dbo_yield_and_switch_from_comm_to_compute()


def local_ids(
    ids: torch.Tensor, weights: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and weights [rows, K] for experts that take local ids and ignore expert_map.

    A slot of another rank's expert, or of none (-1), becomes one of expert 0 with weight 0.
    """
    if expert_map is None:
        return ids, weights
    local = torch.where(ids < 0, -1, expert_map[ids])
    return local.clamp(min=0).to(torch.int32), torch.where(local < 0, 0.0, weights)
