"""AITER's layer on CPU processes, with smaller sizes: the bodies of tests/multigpu."""

from typing import Any

import pytest

from tests.cases.ep_layer_cases import by_the_direct_api, layer, through_the_manager

CASES: dict[str, dict[str, Any]] = {
    "none": {"quantisation": "none"},
    "per_Token": {"quantisation": "per_Token"},
    "per_128x128": {"quantisation": "per_128x128"},
    "per_Token-fused": {"quantisation": "per_Token", "fused": True},
    "per_128x128-fused": {"quantisation": "per_128x128", "fused": True},
    "per_128x128-fused-rank_major": {"quantisation": "per_128x128", "fused": True, "layout": "rank_major"},
}
SMALL: dict[str, Any] = {"hidden_dim": 256, "max_tokens": 24}


@pytest.mark.parametrize("name", CASES)
def test_all2all_manager(ranks: Any, name: str) -> None:
    ranks(through_the_manager, 4, layer(4, **SMALL, **CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_dispatch_combine(ranks: Any, name: str) -> None:
    ranks(by_the_direct_api, 4, layer(4, **SMALL, **CASES[name]))


@pytest.mark.parametrize("body", [through_the_manager, by_the_direct_api], ids=lambda body: body.__name__)
def test_uneven_experts(ranks: Any, body: Any) -> None:
    """16 experts on 3 ranks: 6, 5 and 5."""
    ranks(body, 3, layer(3, **SMALL, quantisation="per_128x128"))
