"""AITER's layer on GPUs: world 8 or what there is, E = 16, top-2, against the oracle."""

from typing import Any

import pytest

from tests.cases.ep_layer_cases import by_the_direct_api, layer, through_the_manager
from tests.markers import ranks_on_gpus

WORLD_SIZE = ranks_on_gpus(8)


@pytest.mark.parametrize("layout", ["compact", "rank_major"])
@pytest.mark.parametrize("fused", [False, True], ids=["before-dispatch", "fused"])
@pytest.mark.parametrize("quantisation", ["per_Token", "per_128x128"])
def test_layer(ranks: Any, quantisation: str, fused: bool, layout: str) -> None:
    """Each layout by one of the interfaces, whose ops are the same."""
    body = through_the_manager if layout == "compact" else by_the_direct_api
    ranks(body, WORLD_SIZE, layer(WORLD_SIZE, quantisation, fused=fused, layout=layout), device="cuda")


@pytest.mark.parametrize("body", [through_the_manager, by_the_direct_api], ids=lambda body: body.__name__)
def test_unquantised_tokens(ranks: Any, body: Any) -> None:
    ranks(body, WORLD_SIZE, layer(WORLD_SIZE, "none"), device="cuda")
