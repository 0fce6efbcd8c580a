"""The op itself on GPUs: world 8 or what there is, E = 16, top-2, against the dense layer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.ep_layer_cases import Layer, by_the_direct_api
from tests.markers import ranks_on_gpus

WORLD_SIZE = ranks_on_gpus(8)


@pytest.mark.parametrize("layout", ["compact", "rank_major"])
@pytest.mark.parametrize("fused", [False, True], ids=["before-dispatch", "fused"])
@pytest.mark.parametrize("quantisation", ["per_Token", "per_128x128"])
def test_dispatch_combine(ranks: Any, quantisation: str, fused: bool, layout: str) -> None:
    layer = Layer(WORLD_SIZE, quantisation=quantisation, fused=fused, layout=layout)
    ranks(by_the_direct_api, WORLD_SIZE, layer, device="cuda")


@pytest.mark.parametrize("quantisation", ["none", "per_Token", "per_128x128"])
def test_small_rows(ranks: Any, quantisation: str) -> None:
    ranks(
        by_the_direct_api,
        WORLD_SIZE,
        Layer(WORLD_SIZE, hidden_dim=1024, quantisation=quantisation),
        device="cuda",
    )
