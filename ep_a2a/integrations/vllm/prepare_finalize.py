"""vLLM's prepare/finalize of a MoE layer on an EpDispatchCombineOp."""

from __future__ import annotations

import contextlib
import copy
import inspect
from typing import TYPE_CHECKING, Any, cast

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

from ep_a2a.errors import StateError, UnsupportedError
from ep_a2a.integrations.vllm.cpu import local_ids
from ep_a2a.integrations.vllm.token_bound import agreed_max_tokens
from ep_a2a.integrations.vllm.wire import RAW, WireFormat, handle_kwargs, wire_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from ep_a2a.integrations.vllm.manager import VllmAll2AllManager
    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.telemetry.counters import CountedExchange

QUANTIZE_OPTIONS = frozenset(inspect.signature(moe_kernel_quantize_input).parameters)


class EpA2APrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """Standard activation format: experts see W * t rows, t being the most tokens that any rank brings to the step.

    Rows without a token carry the id of another rank's expert, which expert_map filters out. The op is built when
    vLLM pairs this object with its experts, after the weights are loaded and before memory is profiled; all layers of
    one shape share it. Combine sends the experts' rows from where they lie, so vLLM's allocate_fused_expert_output
    (from 0.32) is left as it is: no memory that experts could write to would save a copy.

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
        self._wire: WireFormat = RAW
        self._op: EpDispatchCombineOp | None = None
        self._exchange: EpDispatchCombineOp | CountedExchange | None = None

    @property
    def activation_format(self) -> Any:
        """One row per received token."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        """The ids that dispatch takes."""
        import torch

        return torch.int32

    def max_num_tokens_per_rank(self) -> int:
        """The most tokens that a rank brings."""
        return self._max_num_tokens

    def num_dispatchers(self) -> int:
        """Ranks that send tokens here."""
        return self._manager.world_size

    def output_is_reduced(self) -> bool:
        """Combine adds over all ranks."""
        return True

    def supports_dbo(self) -> bool:
        """vLLM runs two micro-batches with the backends on its own list only."""
        return False

    def supports_async(self) -> bool:
        """Whether vLLM runs shared experts between the halves of combine, in place of its second stream."""
        return self._combines_in_halves

    def post_init_setup(self, fused_experts: Any) -> None:
        """Builds the op for these experts. Collective."""
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        moe = self._moe
        self._wire = wire_format(
            fused_experts.quant_config, moe.hidden_dim, expects_unquantized=fused_experts.expects_unquantized_inputs,
            powers_of_two=is_deep_gemm_e8m0_used(),
        )  # fmt: skip
        self._op = self._manager.get_handle(
            handle_kwargs(
                self._wire, rank=self._manager.rank, world_size=self._manager.world_size, dtype=moe.in_dtype,
                hidden_dim=moe.hidden_dim, topk=moe.experts_per_token, num_experts=moe.num_experts,
                num_local_experts=moe.num_local_experts, max_num_tokens=self._max_num_tokens,
            )
        )  # fmt: skip
        if self._combines_in_halves:
            self._op.compile_halves()
        self._exchange = self._manager.exchange_of(self._op, moe)
        self._tell_experts_how_many_rows(fused_experts)
        self._close_op_when_experts_fail(fused_experts)

    def _tell_experts_how_many_rows(self, fused_experts: Any) -> None:
        """Raises the limit of rows by which some experts size their scratch memory (CUTLASS, Humming; vLLM below 0.32).

        Other experts keep their config: FlashInfer's multiply its limit by the data-parallel ranks themselves. So do
        Humming's of 0.30 and 0.31, which have to be told what comes to that many rows then.
        """
        # experts that choose between two kinds in each step hold both, with a reference to the config each
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
        """An error between dispatch and combine leaves a step that nobody will finish; later calls must say so."""
        try:
            yield
        except BaseException:
            if self._op is not None:
                self._op.close()
            raise

    def _ready(self) -> EpDispatchCombineOp | CountedExchange:
        if self._exchange is None:
            raise StateError("post_init_setup before a step", "none", "Build a FusedMoEKernel of this object.")
        return self._exchange

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any:
        """Dispatches a1 [T, H] with its ids and weights [T, K]; see vLLM's base class.

        Returns:
            (rows [W * t, H], their scales or None, None, ids [W * t, K] int32 global, weights [W * t, K]).
        """
        exchange = self._ready()
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise UnsupportedError(
                    "one expert per token where its weight applies to the input", str(topk_ids.shape[1])
                )
            a1 = a1 * topk_weights.to(a1.dtype)
        tokens, weights, scales, ids, _ = exchange.dispatch(
            a1.contiguous(), topk_weights.float().contiguous(), None, topk_ids.int().contiguous(),
            max_num_tokens=agreed_max_tokens(self._max_num_tokens, self._moe.moe_parallel_config.sp_size),
            pad_id=num_experts - 1 if self._manager.rank == 0 else 0,
        )  # fmt: skip
        rows = tokens.flatten(0, 1)
        row_scales = None if scales is None else scales.flatten(0, 1)
        if self._wire.quantize_after:
            with self._closing_op_on_error():
                rows, row_scales = self._quantized(tokens, quant_config)
        row_ids, row_weights = ids.flatten(0, 1), cast("torch.Tensor", weights).flatten(0, 1)
        if rows.device.type == "cpu":
            row_ids, row_weights = local_ids(row_ids, row_weights, expert_map)
        return rows, row_scales, None, row_ids, row_weights

    def prepare_async(self, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """`prepare`, whose result the returned function gives out: vLLM has no work to do in between."""
        result = self.prepare(*args, **kwargs)
        return lambda: result

    def _quantized(self, tokens: torch.Tensor, quant_config: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Received rows [W, t, H] as vLLM's helper quantises them, [W * t, ...]."""
        import torch

        if self._wire.by_whole_tensor:
            counts = cast("EpDispatchCombineOp", self._op).recv_counts
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
            quant_dtype=quant_config.quant_dtype, per_act_token_quant=quant_config.per_act_token_quant,
            block_shape=quant_config.block_shape, **options,
        )  # fmt: skip
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
        """Combines the experts' rows into output [T, H]; see vLLM's base class.

        topk_weights and topk_ids are those of the received rows. What this rank had dispatched, the op remembers.
        """
        with self._closing_op_on_error():
            rows = self._reduced(
                fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
            )
            self._ready().combine(rows, None, None, out=output)

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        """Sends the experts' rows back; the returned function waits for this rank's and adds them. See `finalize`."""
        exchange = self._ready()
        with self._closing_op_on_error():
            rows = self._reduced(
                fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
            )
            exchange.combine_send(rows, None, None, out=output)

        def receive() -> None:
            with self._closing_op_on_error():
                exchange.combine_recv()

        return receive

    @staticmethod
    def _reduced(
        fused_expert_output: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> torch.Tensor:  # fmt: skip
        """One row per received token: the sum over its experts here, unless the experts have added them."""
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        rows: torch.Tensor = weight_and_reduce_impl.apply(
            output=None, fused_expert_output=fused_expert_output, topk_weights=topk_weights, topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )  # fmt: skip
        return rows
