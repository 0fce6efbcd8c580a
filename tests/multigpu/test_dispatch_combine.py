"""The op itself on GPUs: world 8 or what there is, E = 16, top-2, against the oracle."""

from typing import Any

import pytest

from tests.cases.ep_layer_cases import by_the_direct_api, layer
from tests.markers import ranks_on_gpus

WORLD_SIZE = ranks_on_gpus(8)


@pytest.mark.parametrize("layout", ["compact", "rank_major"])
@pytest.mark.parametrize("fused", [False, True], ids=["before-dispatch", "fused"])
@pytest.mark.parametrize("quantisation", ["per_Token", "per_128x128"])
def test_dispatch_combine(ranks: Any, quantisation: str, fused: bool, layout: str) -> None:
    case = layer(WORLD_SIZE, quantisation, fused=fused, layout=layout)
    ranks(by_the_direct_api, WORLD_SIZE, case, device="cuda")


@pytest.mark.parametrize("quantisation", ["none", "per_Token", "per_128x128"])
def test_small_rows(ranks: Any, quantisation: str) -> None:
    ranks(
        by_the_direct_api,
        WORLD_SIZE,
        layer(WORLD_SIZE, quantisation, hidden_dim=1024),
        device="cuda",
    )
