"""The shape of atom.model_ops.fused_moe.config; see shape/README.md."""

from dataclasses import dataclass
from typing import Any


@dataclass
class FusedMoEConfig:
    num_experts: int
    experts_per_token: int
    hidden_dim: int
    num_local_experts: int
    moe_parallel_config: Any
    in_dtype: Any = None
    max_num_tokens: int = 256
