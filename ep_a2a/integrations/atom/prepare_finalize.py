"""Our prepare/finalize for ATOM's MoE layers, on ops with MORI's interface."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.dispatcher import Dispatcher
from ep_a2a.interface import DispatchResult


class AtomPrepareAndFinalize:
    """ATOM's prepare/finalize in its standard activation format.

    Experts see the received rows, dense from the front; their number is a tensor on the device. Rows travel
    unquantised: ATOM's expert kernel quantises them.

    Args:
        whole: for whole steps.
        halves: one for each half of an overlapped batch (TBO); empty without overlap.
        kernels: ATOM's module atom.model_ops.fused_moe.modular_kernel.
        ubatching: ATOM's module atom.utils.tbo.ubatching, which knows the half that the calling thread runs.
    """

    def __init__(self, whole: Dispatcher, halves: Sequence[Dispatcher], kernels: Any, ubatching: Any) -> None:
        self._whole, self._halves, self._kernels, self._ubatching = whole, halves, kernels, ubatching

    @property
    def activation_format(self) -> Any:
        """ATOM's standard format: one row per received token."""
        return self._kernels.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        """The dtype of the ids that dispatch takes."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int:
        """The most tokens that a rank brings to a step."""
        return int(self._whole.op.config.max_num_inp_token_per_rank)

    def num_dispatchers(self) -> int:
        """The number of ranks that send tokens here."""
        return int(self._whole.op.config.world_size)

    def output_is_reduced(self) -> bool:
        """True: `finalize` returns sums over all ranks."""
        return True

    def supports_async(self) -> bool:
        """Whether the calling thread runs a half of an overlapped batch."""
        return bool(self._halves) and self._ubatching.tbo_active()

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any = None,
        quant_type: Any = None,
    ) -> Any:
        """Dispatches a1 [T, H] with its ids and weights [T, K].

        Args:
            a1, topk_weights, topk_ids: of this rank's tokens.
            apply_router_weight_on_input: must be False; ATOM's expert kernel applies the weights.
            num_experts, expert_map, quant_config, quant_type: without effect; they are for ATOM's expert kernel.

        Returns:
            (rows [W * M, H], None, ExpertTokensMetadata, ids [W * M, K] int32 global, weights [W * M, K]). Of the
            metadata, expert_num_tokens is int32 [1], the rows received.
        """
        fitted = self._fitted(a1, topk_weights, topk_ids, apply_router_weight_on_input)
        return self._for_experts(self._whole.dispatch(*fitted))

    def finalize(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        """Returns the sums [T, H] for this rank's tokens, in the op's memory: valid until the op's next step.

        Args:
            output: without effect; ATOM uses the returned tensor.
            fused_expert_output: the experts' weighted rows, in the order of the received ones; rows past the received
                ones may be missing.
            topk_weights, topk_ids: without effect; those given to `prepare` count.
        """
        return self._whole.combine(fused_expert_output)

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> tuple[Callable[[], None], Callable[[], Any]]:
        """Sends the tokens of this half. Returns two functions: one receives rows, one returns `prepare`'s result."""
        half = self._half()
        received = half.dispatch_send(*self._fitted(a1, topk_weights, topk_ids, apply_router_weight_on_input))
        return half.op.dispatch_recv, lambda: self._for_experts(received)

    def finalize_async(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
        """Sends the rows of this half back. Returns two functions: one receives the sums, one returns them."""
        receive, sums = self._half().combine_send(fused_expert_output), list[torch.Tensor]()
        return lambda: sums.append(receive()), sums.pop

    def _half(self) -> Dispatcher:
        return self._halves[int(self._ubatching.tbo_current_ubatch_id())]

    def _for_experts(self, received: DispatchResult) -> Any:
        metadata = self._kernels.ExpertTokensMetadata(expert_num_tokens=received.total_recv, expert_num_tokens_cpu=None)
        return received.tokens, received.scales, metadata, received.indices, received.weights

    def _fitted(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, weights_on_input: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if weights_on_input:
            raise UnsupportedError(
                "router weights that are applied by the experts",
                "apply_router_weight_on_input=True",
                "ATOM's own MORI path refuses it too; use a model without it.",
            )
        return self._whole.fitted(a1, topk_weights, topk_ids)
