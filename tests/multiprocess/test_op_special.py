"""Time, graphs, memory and failures of the op, on CPU processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.op_cases import Case
from tests.op_special import BODIES, missing_rank


@pytest.mark.parametrize("name", BODIES)
def test_special(ranks: Any, name: str) -> None:
    body, case = BODIES[name]
    ranks(body, case.world_size, case)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("layout", ["compact", "rank_major"])
def test_missing_rank(ranks: Any, phase: str, layout: str) -> None:
    case = Case(world_size=3, num_experts=6, layout=layout, with_weights=False, combine_weights=False)
    ranks(missing_rank, case.world_size, case, phase)
