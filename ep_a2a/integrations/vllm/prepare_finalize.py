"""Our prepare/finalize for vLLM's MoE layers: dispatch before the experts, combine after them."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any, cast

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.v1.worker.ubatching import (
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_switch_to_comm,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)

from ep_a2a.errors import StateError, TooManyTokensError, UnsupportedError
from ep_a2a.integrations.vllm.cpu import local_ids
from ep_a2a.integrations.vllm.manager import VllmAll2AllManager
from ep_a2a.integrations.vllm.token_format import (
    RAW,
    TokenFormat,
    handle_kwargs,
    micro_batch_tokens,
    token_format_of,
    tokens_per_rank,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.telemetry.counters import InstrumentedOp

QUANTIZE_OPTIONS = frozenset(inspect.signature(moe_kernel_quantize_input).parameters)


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
    most = tokens_per_rank(moe.max_num_tokens, moe.moe_parallel_config.sp_size)
    return EpA2APrepareAndFinalize(manager, moe, most)


class EpA2APrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """vLLM's prepare/finalize in its standard activation format, on an op that all layers of one shape share.

    Experts see W * t rows, t being the most tokens that any rank brings to the step. Rows without a token carry the id
    of another rank's expert, which expert_map filters out.

    The op is built when vLLM pairs this object with its experts: after the weights are loaded, before memory is
    profiled. Combine sends the experts' rows from where they lie. So vLLM's allocate_fused_expert_output (from 0.32)
    is not overridden: memory of ours would save no copy.

    With dual batch overlap (DBO) vLLM runs a step as micro-batches, each in a thread. Each micro-batch has an op, whose
    calls run on vLLM's communication stream. The thread hands over before each call, so that another micro-batch
    computes meanwhile. Steps that vLLM does not split use the first op, on the current stream.

    Args:
        manager: of the expert-parallel group.
        moe: vLLM's FusedMoEConfig of the layer.
        max_num_tokens: the most tokens of this rank in any step.
    """

    def __init__(self, manager: VllmAll2AllManager, moe: Any, max_num_tokens: int) -> None:
        super().__init__()
        self._manager = manager
        self._moe = moe
        self._max_num_tokens = max_num_tokens
        self._combines_in_halves = manager.combines_in_halves
        self._format: TokenFormat = RAW
        self._layer_number = 0
        self._ops: list[EpDispatchCombineOp] = []
        self._exchanges: list[EpDispatchCombineOp | InstrumentedOp] = []

    @property
    def activation_format(self) -> Any:
        """vLLM's standard format: one row per received token."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        """The dtype of the ids that `prepare` takes."""
        import torch

        return torch.int32

    def max_num_tokens_per_rank(self) -> int:
        """The most tokens that a rank brings to a step."""
        return self._max_num_tokens

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
        """Whether vLLM calls `prepare_async` and `finalize_async`; it asks in each step.

        It then runs shared experts while combine is under way, instead of on its second stream.
        """
        return self._combines_in_halves or dbo_enabled()

    def post_init_setup(self, fused_experts: Any) -> None:
        """Builds the op of each micro-batch for these experts. Collective."""
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        moe = self._moe
        self._format = token_format_of(
            fused_experts.quant_config,
            moe.hidden_dim,
            expects_unquantized=fused_experts.expects_unquantized_inputs,
            powers_of_two=is_deep_gemm_e8m0_used(),
        )
        self._ops = self._manager.micro_batch_ops(self._kwargs)
        if self._combines_in_halves:
            self._ops[0].warmup_split()
        self._exchanges = [self._manager.exchange_of(op, moe) for op in self._ops]
        self._layer_number = self._manager.layer_number(moe)
        self._raise_row_limit(fused_experts)
        self._close_op_when_experts_fail(fused_experts)

    def _kwargs(self, num_micro_batches: int) -> dict[str, Any]:
        """Returns the handle kwargs of an op for steps, or for one of so many micro-batches of a step."""
        moe = self._moe
        return handle_kwargs(
            self._format,
            rank=self._manager.rank,
            world_size=self._manager.world_size,
            dtype=moe.in_dtype,
            hidden_dim=moe.hidden_dim,
            topk=moe.experts_per_token,
            num_experts=moe.num_experts,
            num_local_experts=moe.num_local_experts,
            max_num_tokens=micro_batch_tokens(self._max_num_tokens, num_micro_batches),
        )

    @property
    def _op(self) -> EpDispatchCombineOp:
        """The op of the micro-batch that this thread runs; the first one outside of micro-batches."""
        return self._ops[int(dbo_current_ubatch_id())]

    def _raise_row_limit(self, fused_experts: Any) -> None:
        """Raises the row limit by which CUTLASS's and Humming's experts size their scratch memory (vLLM below 0.32).

        Humming's experts of 0.30 and 0.31 multiply the limit by the data-parallel ranks, so theirs is divided by that.
        Other experts keep their config: FlashInfer's multiply the limit themselves.
        """
        # experts that choose between two kinds in each step hold both, each with a reference to the config
        of_two_kinds = (getattr(fused_experts, name, None) for name in ("experts", "fallback_experts"))
        for experts in (fused_experts, *of_two_kinds):
            if hasattr(experts, "_get_permute_scratch"):
                experts.moe_config = moe = copy.copy(experts.moe_config)
                multiplies = "dp_size" in experts._get_permute_scratch.__code__.co_names
                num_rows = self._manager.world_size * self._max_num_tokens
                moe.max_num_tokens = -(-num_rows // (self._manager.dp_group.world_size if multiplies else 1))

    def _close_op_when_experts_fail(self, fused_experts: Any) -> None:
        apply = fused_experts.apply

        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self._closing_op_on_error():
                return apply(*args, **kwargs)

        fused_experts.apply = guarded

    @contextlib.contextmanager
    def _closing_op_on_error(self) -> Iterator[None]:
        """Closes the op on an error between dispatch and combine: its step stays open, and later calls must raise."""
        try:
            yield
        except BaseException:
            if self._ops:
                self._op.close()
            raise

    def _ready(self) -> EpDispatchCombineOp | InstrumentedOp:
        if not self._exchanges:
            raise StateError("post_init_setup before a step", "none", "Build a FusedMoEKernel of this object.")
        return self._exchanges[int(dbo_current_ubatch_id())]

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
            defer_input_quant: vLLM's; without effect: the token format says it already.

        Returns:
            A function that returns
            (rows [W * t, H], their scales or None, None, ids [W * t, K] int32 global, weights [W * t, K]).
        """
        exchange = self._ready()
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise UnsupportedError(
                    "one expert per token where its weight applies to the input", str(topk_ids.shape[1])
                )
            a1 = a1 * topk_weights.to(a1.dtype)
        tokens = _padded(a1, self._moe.hidden_dim).contiguous()
        weights, ids = topk_weights.float().contiguous(), topk_ids.int().contiguous()
        dbo_yield_and_switch_from_compute_to_comm()
        received, received_weights, scales, received_ids, _ = exchange.dispatch(
            tokens,
            weights,
            None,
            ids,
            max_num_tokens=agreed_max_tokens(
                self._op.config.max_num_inp_token_per_rank, self._moe.moe_parallel_config.sp_size
            ),
            pad_id=num_experts - 1 if self._manager.rank == 0 else 0,
            # layers of one shape share the op: a rank that leaves one out must not get another one's rows
            tag=self._layer_number,
        )
        dbo_switch_to_compute_sync()
        return lambda: self._rows_for_experts(
            received, scales, received_ids, cast("torch.Tensor", received_weights), expert_map, quant_config
        )

    def _rows_for_experts(
        self,
        tokens: torch.Tensor,
        scales: torch.Tensor | None,
        ids: torch.Tensor,
        weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        quant_config: Any,
    ) -> Any:
        """Returns what `prepare` does, of the rows that dispatch has received [W, t, ...]."""
        rows = tokens.flatten(0, 1)
        row_scales = None if scales is None else scales.flatten(0, 1)
        if self._format.quantize_after:
            with self._closing_op_on_error():
                rows, row_scales = self._quantized(tokens, quant_config)
        row_ids, row_weights = ids.flatten(0, 1), weights.flatten(0, 1)
        if rows.device.type == "cpu":
            row_ids, row_weights = local_ids(row_ids, row_weights, expert_map)
        return rows, row_scales, None, row_ids, row_weights

    def _quantized(self, tokens: torch.Tensor, quant_config: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantises received rows [W, t, H] by vLLM's helper; returns rows [W * t, ...] and their scales."""
        import torch

        if self._format.by_whole_tensor:
            counts = self._op.recv_counts
            is_token = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
            tokens = torch.where(is_token[:, :, None], tokens, 0)
        options = {
            name: getattr(quant_config, name)
            for name in ("is_scale_swizzled", "is_scale_transposed", "mx_alignment")
            if name in QUANTIZE_OPTIONS and hasattr(quant_config, name)
        }
        rows, scales = moe_kernel_quantize_input(
            tokens.flatten(0, 1),
            quant_config.a1_gscale if quant_config.quant_dtype == "nvfp4" else quant_config.a1_scale,
            quant_dtype=quant_config.quant_dtype,
            per_act_token_quant=quant_config.per_act_token_quant,
            block_shape=quant_config.block_shape,
            **options,
        )
        return rows, scales

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Combines the experts' rows into output [T, H].

        Args:
            output: overwritten with the sums for the tokens that this rank dispatched; [T, less than H] where the
                experts drop the columns that pad H (vLLM's output_hidden_dim, from 0.33).
            fused_expert_output: the experts' rows, one per received row or one per slot.
            topk_weights, topk_ids: [W * t, K], of the received rows.
            apply_router_weight_on_input: the weights have been applied already.
            weight_and_reduce_impl: vLLM's; how slots are weighed and added to one row per received row.
        """
        with self._closing_op_on_error():
            rows = self._reduced(
                fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
            )
            combined = self._combined_rows(output)
            self._ready().combine(rows, None, None, out=combined)
            _fill(output, combined)

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        """Sends the experts' rows back. Returns a function that receives this rank's and adds them into `output`.

        In a micro-batch, the whole of combine runs on vLLM's communication stream, and the function makes the compute
        stream wait for it. Arguments are those of `finalize`.
        """
        exchange = self._ready()
        with self._closing_op_on_error():
            rows = self._reduced(
                fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
            )
            combined = self._combined_rows(output)
            if dbo_enabled():
                dbo_yield_and_switch_from_compute_to_comm()
                exchange.combine(rows, None, None, out=combined)
                dbo_switch_to_compute()
                return functools.partial(self._wait_for_combine, output, combined, rows)
            exchange.combine_send(rows, None, None, out=combined)

        def receive() -> None:
            with self._closing_op_on_error():
                exchange.combine_recv()
                _fill(output, combined)

        return receive

    def _wait_for_combine(self, output: torch.Tensor, combined: torch.Tensor, rows: torch.Tensor) -> None:
        """Makes the compute stream wait for a micro-batch's combine, behind which the other micro-batches compute.

        Args:
            output, combined: those of `finalize_async`.
            rows: held so that no other tensor gets their memory while combine reads them.
        """
        dbo_switch_to_comm()
        dbo_yield_and_switch_from_comm_to_compute()
        _fill(output, combined)

    def _reduced(
        self,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> torch.Tensor:
        """Returns a row [H] per received token: the sum over its experts here, unless the experts have added them.

        Experts may leave out the last columns, which only pad H (TensorRT-LLM's of MXFP4). They become zeros.
        """
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        rows: torch.Tensor = weight_and_reduce_impl.apply(
            output=None,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        return _padded(rows, self._moe.hidden_dim)

    def _combined_rows(self, output: torch.Tensor) -> torch.Tensor:
        """Returns memory [T, H] for combine: output, or new memory where output is without the columns that pad H."""
        hidden_dim = self._moe.hidden_dim
        return output if output.shape[-1] >= hidden_dim else output.new_empty(output.shape[0], hidden_dim)


def _padded(rows: torch.Tensor, hidden_dim: int) -> torch.Tensor:
    """Returns rows [T, hidden_dim], with zeros in the columns that narrower rows lack."""
    from torch.nn import functional

    missing = hidden_dim - rows.shape[-1]
    return functional.pad(rows, (0, missing)) if missing > 0 else rows


def _fill(output: torch.Tensor, combined: torch.Tensor) -> None:
    """Copies as many columns of the combined rows as output has, unless combine has written to output."""
    if combined is not output:
        output.copy_(combined[:, : output.shape[-1]])


def agreed_max_tokens(most: int, sequence_parallel_size: int) -> int:
    """Returns the most tokens that any rank brings to this step: equal on all ranks, constant inside a CUDA graph.

    vLLM exchanges the token counts of data-parallel ranks on the host before a forward pass. With sequence parallelism
    each rank of a replica takes an equal share, rounded up.

    Args:
        most: the limit of every step; also the result where no forward pass is running.
        sequence_parallel_size: ranks that share a replica's tokens.

    Raises:
        TooManyTokensError: a rank brings more than `most`. All ranks raise it, so none waits for another.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
    if metadata is None:
        return most
    tokens = tokens_per_rank(int(metadata.num_tokens_across_dp_cpu.max()), sequence_parallel_size)
    if tokens > most:
        raise TooManyTokensError(f"at most {most} tokens of each rank", str(tokens), "Raise --max-num-batched-tokens.")
    return max(1, tokens)
