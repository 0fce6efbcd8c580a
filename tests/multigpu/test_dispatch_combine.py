"""The op at the sizes of AITER's own layer test: world 8 or what there is, E = 16, top-2, against the oracle."""

from dataclasses import replace
from typing import Any

import pytest

from ep_a2a.config import FP8_DTYPE
from tests.cases.op_cases import Case, run_case
from tests.markers import ranks_on_gpus

WORLD_SIZE = ranks_on_gpus(8)
MAX_TOKENS = 128
CASTS = {"per_Token": "fp8_per_token", "per_128x128": "fp8_per_1x128"}
"""quant_type of a fused cast, by AITER's name; per_128x128 means 1x128 for activations."""


def layer(quantisation: str, *, fused: bool = False, hidden_dim: int = 6144, layout: str = "compact") -> Case:
    """All ranks bring the most they may; then fewer, and the last one nothing."""
    fewer = (*(max(1, MAX_TOKENS - 3 * rank - 1) for rank in range(WORLD_SIZE - 1)), 0)
    case = Case(
        world_size=WORLD_SIZE,
        hidden_dim=hidden_dim,
        num_experts=16,
        max_tokens=MAX_TOKENS,
        tokens=((MAX_TOKENS,), fewer),
        layout=layout,
    )
    if quantisation == "none":
        return case
    if fused:
        return replace(case, quant_type=CASTS[quantisation])
    return replace(case, dtype=FP8_DTYPE, scale_dim=1 if quantisation == "per_Token" else hidden_dim // 128)


@pytest.mark.parametrize("layout", ["compact", "rank_major"])
@pytest.mark.parametrize("fused", [False, True], ids=["before-dispatch", "fused"])
@pytest.mark.parametrize("quantisation", ["per_Token", "per_128x128"])
def test_dispatch_combine(ranks: Any, quantisation: str, fused: bool, layout: str) -> None:
    ranks(run_case, WORLD_SIZE, layer(quantisation, fused=fused, layout=layout), device="cuda")


@pytest.mark.parametrize("quantisation", ["none", "per_Token", "per_128x128"])
def test_small_rows(ranks: Any, quantisation: str) -> None:
    ranks(run_case, WORLD_SIZE, layer(quantisation, hidden_dim=1024), device="cuda")
