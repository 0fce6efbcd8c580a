"""The shape of atom.config; see shape/README.md."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ParallelConfig:
    data_parallel_size: int = 1


@dataclass
class Config:
    enable_expert_parallel: bool = False
    dp_logical_size: int = 0
    enable_dp_attention: bool = False
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    enable_tbo: bool = False
    enable_tbo_decode: bool = False
    enable_low_latency: bool = False
    moe_all2all_backend: str = "auto"
    moe_backend: str = "standard"


current: Config | None = None


def get_current_atom_config():
    return current
