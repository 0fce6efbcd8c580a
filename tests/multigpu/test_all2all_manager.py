"""The manager on GPUs: world 8 or what there is, E = 16, top-2, against the oracle."""

from typing import Any

import pytest

from tests.cases.ep_layer_cases import layer, through_the_manager
from tests.markers import ranks_on_gpus

WORLD_SIZE = ranks_on_gpus(8)


@pytest.mark.parametrize("fused", [False, True], ids=["before-dispatch", "fused"])
@pytest.mark.parametrize("quantisation", ["per_Token", "per_128x128"])
@pytest.mark.parametrize("hidden_dim", [6144, 1024])
def test_all2all_manager(ranks: Any, hidden_dim: int, quantisation: str, fused: bool) -> None:
    case = layer(WORLD_SIZE, quantisation, hidden_dim=hidden_dim, fused=fused)
    ranks(through_the_manager, WORLD_SIZE, case, device="cuda")


def test_unquantised_tokens(ranks: Any) -> None:
    ranks(through_the_manager, WORLD_SIZE, layer(WORLD_SIZE, "none"), device="cuda")
