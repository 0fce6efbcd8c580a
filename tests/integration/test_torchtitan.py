"""The names of torchtitan that `ep_a2a.compat.torchtitan` uses, against the sources of its release."""

import pytest

from ep_a2a.integrations.contract import differences
from tests.wheels import DOWNLOAD_TIMEOUT_SECS, Release, Unavailable

pytestmark = pytest.mark.timeout(DOWNLOAD_TIMEOUT_SECS)

DISPATCHERS = "models/common/token_dispatcher.py"
BASE = f"{DISPATCHERS}:MinimalAsyncEPTokenDispatcher"
FIELDS = ("buffer_device", "dtype", "ep_mesh", "hidden_dim", "num_max_tokens_per_rank")
CONTRACT = {
    "used": {
        "config/__init__.py": ["derive", "override"],
        DISPATCHERS: ["EPDispatchMetadata.state", *(f"MinimalAsyncEPTokenDispatcher.{name}" for name in FIELDS)],
    },
    "called": {
        "config/override.py:derive": "config, TokenDispatcher.Config, reduction=",
        "config/override.py:override": "target=, description=",
    },
    "overridden": {
        f"{BASE}.__init__": "self, config",
        f"{BASE}.init_buffer": "self",
        f"{BASE}.dispatch": "self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E",
        f"{BASE}.combine": "self, routed_output_RD, metadata, x_TD",
    },
}


def test_the_names_are_there() -> None:
    try:
        folder = Release("torchtitan", "0.3.0").folder()
    except Unavailable as problem:
        pytest.skip(str(problem))
    assert differences(folder / "torchtitan", CONTRACT) == []
