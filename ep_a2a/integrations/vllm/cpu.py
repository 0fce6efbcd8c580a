"""Lets vLLM's CPU backend run expert-parallel models."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ep_a2a.integrations.vllm.common import BACKEND_NAME, is_replacement, replacement


def patch_runner() -> None:
    """Patch `cpu-runner`: calls MoE layers as opaque operators, as on GPUs. Idempotent.

    On CPU vLLM calls them as Python, for torch.compile to trace. An exchange between processes cannot be traced.
    """
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    original = MoERunner._select_forward
    if is_replacement(original):
        return

    @replacement
    @functools.wraps(original)
    def _select_forward(self: Any) -> Any:
        moe_parallel = self.moe_config.moe_parallel_config
        if moe_parallel.all2all_backend != BACKEND_NAME or not moe_parallel.use_all2all_kernels:
            return original(self)
        return torch.ops.vllm.moe_forward if self._shared_experts is None else torch.ops.vllm.moe_forward_shared

    MoERunner._select_forward = _select_forward


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
