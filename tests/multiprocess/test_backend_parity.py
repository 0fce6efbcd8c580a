"""All backends on CPU processes: those that can run here, by their capabilities; the others say why not."""

from __future__ import annotations

from typing import Any

import pytest

from tests import parity_cases
from tests.parity_cases import pairs, reason_against

HIDDEN_DIM = 32
WORLD_SIZE = 2


@pytest.mark.parametrize(("name", "layout"), pairs())
def test_parity(ranks: Any, name: str, layout: str) -> None:
    reason = reason_against(name, layout, "cpu")
    if reason is not None:
        pytest.skip(reason)
    ranks(parity_cases.run_backend, WORLD_SIZE, name, layout, HIDDEN_DIM)
