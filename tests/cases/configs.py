"""Configs of the shape that most tests are about."""

from typing import Any

import torch

from ep_a2a.config import EpDispatchCombineConfig


def deepseek_v3(**changes: Any) -> EpDispatchCombineConfig:
    """DeepSeek-V3 on 8 GPUs: bf16 rows of 7168, top 8 of 256 experts, up to 4096 tokens of a rank."""
    values: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "rank": 0,
        "world_size": 8,
        "hidden_dim": 7168,
        "scale_dim": 0,
        "scale_type_size": 0,
        "max_token_type_size": 4,
        "max_num_inp_token_per_rank": 4096,
        "num_experts_per_rank": 32,
        "num_experts_per_token": 8,
    }
    return EpDispatchCombineConfig(**{**values, **changes})
