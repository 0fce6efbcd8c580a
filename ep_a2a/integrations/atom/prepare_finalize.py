"""Our prepare/finalize for ATOM's MoE layers, on ops with MORI's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ep_a2a.compat.mori.ops import EpDispatchCombineOp
    from ep_a2a.interface import DispatchResult


class AtomPrepareAndFinalize:
    """ATOM's prepare/finalize in its standard activation format.

    Experts see the received rows, dense from the front; their number is a tensor on the device. Rows travel
    unquantised: ATOM's expert kernel quantises them.

    Args:
        op: for whole steps.
        ubatch_ops: one for each half of an overlapped batch (TBO); empty without overlap.
        kernels: ATOM's module atom.model_ops.fused_moe.modular_kernel.
        ubatching: ATOM's module atom.utils.tbo.ubatching, which knows the half that the calling thread runs.
    """

    def __init__(
        self, op: EpDispatchCombineOp, ubatch_ops: Sequence[EpDispatchCombineOp], kernels: Any, ubatching: Any
    ) -> None:
        self._op, self._ubatch_ops, self._kernels, self._ubatching = op, list(ubatch_ops), kernels, ubatching

    @property
    def activation_format(self) -> Any:
        """ATOM's standard format: one row per received token."""
        return self._kernels.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        """The dtype of the ids that dispatch takes."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int:
        """The most tokens that a rank brings to a step."""
        return self._op.config.max_num_inp_token_per_rank

    def num_dispatchers(self) -> int:
        """The number of ranks that send tokens here."""
        return self._op.config.world_size

    def output_is_reduced(self) -> bool:
        """True: `finalize` returns sums over all ranks."""
        return True

    def supports_async(self) -> bool:
        """Whether the calling thread runs a half of an overlapped batch."""
        return bool(self._ubatch_ops) and self._ubatching.tbo_active()

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
        self._check(apply_router_weight_on_input)
        return self._received(self._op.dispatch(*_tensors(a1, topk_weights, topk_ids)))

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
            topk_ids: this rank's own, as given to `prepare`. topk_weights: without effect.
        """
        result, _ = self._op.combine(fused_expert_output, None, _ids(topk_ids))
        return result[: topk_ids.shape[0]]

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
        self._check(apply_router_weight_on_input)
        op = self._ubatch_op()
        result = op.dispatch_send(*_tensors(a1, topk_weights, topk_ids))
        return op.dispatch_recv, lambda: self._received(result)

    def finalize_async(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
        """Sends the rows of this half back. Returns two functions: one receives the sums, one returns them."""
        op = self._ubatch_op()
        result, _ = op.combine_send(fused_expert_output, None, _ids(topk_ids))
        return op.combine_recv, lambda: result[: topk_ids.shape[0]]

    def _ubatch_op(self) -> EpDispatchCombineOp:
        number: int = self._ubatching.tbo_current_ubatch_id()
        return self._ubatch_ops[number]

    def _received(self, result: DispatchResult) -> Any:
        rows, weights, scales, ids, total_recv = result
        metadata = self._kernels.ExpertTokensMetadata(expert_num_tokens=total_recv, expert_num_tokens_cpu=None)
        return rows, scales, metadata, ids, weights

    @staticmethod
    def _check(apply_router_weight_on_input: bool) -> None:
        if apply_router_weight_on_input:
            raise UnsupportedError(
                "router weights that are applied by the experts",
                "apply_router_weight_on_input=True",
                "ATOM's own MORI path refuses it too; use a model without it.",
            )


def _tensors(
    a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]:
    """Returns the first four arguments of dispatch."""
    return a1.contiguous(), topk_weights.float().contiguous(), None, _ids(topk_ids)


def _ids(topk_ids: torch.Tensor) -> torch.Tensor:
    return topk_ids.int().contiguous()
