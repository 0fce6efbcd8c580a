"""A token dispatcher for torchtitan, in the place of its MinimalAsyncEP, whose configuration it takes.

.. code-block:: bash

    --override.imports ep_a2a.compat.torchtitan.dispatcher

MinimalAsyncEP's rules hold: experts divide by ranks, all ranks have as many tokens, activations are recomputed in full.
Layers of equal sizes share one op. The contract is that of torchtitan 0.3.0, and of its repository at b5bcd76c
(2026-08-21).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.token_dispatcher import EPDispatchMetadata, MinimalAsyncEPTokenDispatcher

from ep_a2a import autograd
from ep_a2a.errors import ConfigError
from ep_a2a.managers.make_op import make_op
from ep_a2a.ops.op import EpDispatchCombineOp

OPS: dict[tuple[Any, ...], EpDispatchCombineOp] = {}
"""By group and sizes, for the life of the process. To free their memory, close them on all ranks and clear this."""
_tags = itertools.count()


class TokenDispatcher(MinimalAsyncEPTokenDispatcher):  # type: ignore[misc]
    """Moves tokens to the experts of all ranks of the EP mesh, and back, with gradients in tokens and scores.

    The host waits for nothing. Errors are those of `ep_a2a.make_op` and `ep_a2a.autograd`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MinimalAsyncEPTokenDispatcher.Config):  # type: ignore[misc]
        """MinimalAsyncEP's, and `reduction` of `ep_a2a.autograd.dispatch`."""

        reduction: str = "ranks"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reduction = config.reduction
        self.tag = next(_tags)

    def init_buffer(self) -> None:
        """Take the op of these sizes, or make it, on all ranks of the EP mesh; `wire_meshes` calls it."""
        for name in ("hidden_dim", "num_max_tokens_per_rank", "dtype"):
            if getattr(self, name) is None:
                raise ConfigError("to be set", "None", "Call the model's update_from_config.", field=name)
        group = self.ep_mesh.get_group()
        num_slots = self.top_k if self.reduction == "slots" else 1
        sizes = {
            "hidden_size": self.hidden_dim,
            "num_experts": self.num_experts,
            "topk": self.top_k // num_slots,
            "max_tokens": self.num_max_tokens_per_rank * num_slots,
            "dtype": self.dtype,
            "device": self.buffer_device,
        }
        key = (group, *sizes.values())
        if key not in OPS:
            OPS[key] = make_op(group, **sizes)
        self.op = OPS[key]

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Returns rows by expert [R, D], of each expert of this rank the number [e] int64, and what combine needs.

        Args:
            x_TD: [T, D], T equal on all ranks.
            topk_scores_TK: [T, K].
            topk_expert_ids_TK: [T, K], of all experts.
            num_local_tokens_per_expert_E: without effect.
        """
        del num_local_tokens_per_expert_E
        received = autograd.dispatch(
            self.op,
            x_TD,
            topk_scores_TK.float(),
            topk_expert_ids_TK.int(),
            step_tokens=max(1, x_TD.shape[0]),
            tag=self.tag,
            reduction=self.reduction,
        )
        groups = autograd.group(self.op, received)
        counts = groups.ends.diff(prepend=groups.ends.new_zeros(1))
        return groups.rows, counts.long(), EPDispatchMetadata(state=(groups, received))

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """Returns [T, D]: of each token the sum of its experts' results times their scores."""
        del x_TD
        groups, received = metadata.state
        return autograd.combine(self.op, autograd.ungroup(routed_output_RD, groups, received), received)


@override(target=MinimalAsyncEPTokenDispatcher.Config, description="Expert-parallel exchange of ep_a2a")  # type: ignore[untyped-decorator]
def dispatcher(config: Any, *, reduction: str = "ranks") -> Any:
    """Returns the dispatcher's configuration for MinimalAsyncEP's."""
    return derive(config, TokenDispatcher.Config, reduction=reduction)
