"""The kernels around the hop between nodes compile for GPUs, and move rows in vectors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from ep_a2a.ops.staged_kernels import RailKernels, RailTokens
from ep_a2a.ops.staged_layout import RailLayout
from ep_a2a.testing.offline_compile import compile_offline
from tests.markers import first_is_quick

NUM_NODES = 4
FORMS = {
    "bf16": {},
    "cast": {"quant_type": "fp8_per_1x128"},
    "cast-ue8m0": {"quant_type": "fp8_per_1x128", "scale_format": "ue8m0"},
    "per-token": {"quant_type": "fp8_per_token"},
    "scales": {"data_type": torch.float8_e4m3fn, "scale_dim": 56, "scale_type_size": 4},
    "fp32": {"data_type": torch.float32},
}


def config_of(**changes: Any) -> EpDispatchCombineConfig:
    """DeepSeek-V3 on 4 nodes of 8."""
    values: dict[str, Any] = {
        "data_type": torch.bfloat16, "rank": 0, "world_size": 32, "hidden_dim": 7168, "scale_dim": 0,
        "scale_type_size": 0, "max_token_type_size": 4, "max_num_inp_token_per_rank": 8, "num_experts_per_rank": 8,
        "num_experts_per_token": 8, "kernel_type": EpDispatchCombineKernelType.InterNodeV1, "gpu_per_node": 8,
    }  # fmt: skip
    return EpDispatchCombineConfig(**{**values, **changes})


@pytest.mark.parametrize("changes", first_is_quick(FORMS.items()))
def test_it_compiles(changes: dict[str, Any]) -> None:
    config, device = config_of(**changes), torch.device("cpu")
    kernels = RailKernels(config, NUM_NODES, device)
    lines = RailTokens.allocate(RailLayout.of(config, NUM_NODES).sent, device)
    x = torch.zeros(8, config.hidden_dim, dtype=config.data_type)
    scales = torch.zeros(8, 56) if config.scale_dim and not config.casts_in_dispatch else None
    ids, weights, visits = torch.zeros(8, 8, dtype=torch.int32), torch.zeros(8, 8), torch.zeros(8, 4, dtype=torch.int32)
    rows = torch.zeros(8, config.hidden_dim, dtype=config.combined_dtype)
    for variant, values in (
        kernels._pack(x, scales, weights, ids, lines, visits, 8),
        kernels._add(rows, weights, visits, (None, rows), rows, weights, 8, 8),
    ):
        ptx = compile_offline(variant.kernel, values, variant.constants, variant.num_warps)["ptx"]
        assert re.search(r"ld\.global\S*\.v4", ptx), variant.kernel.__name__
        assert re.search(r"st\.global\S*\.v[24]", ptx), variant.kernel.__name__
