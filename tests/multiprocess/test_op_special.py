"""Time, graphs, memory and failures of the op, on CPU processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.op_cases import Case
from tests.cases.op_special import BODIES, missing_rank


@pytest.mark.parametrize("name", BODIES)
def test_special(ranks: Any, name: str) -> None:
    body, case = BODIES[name]
    ranks(body, case.world_size, case)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("layout", ["compact", "rank_major"])
@pytest.mark.parametrize("flagged_max_tokens", [0, 128])
def test_missing_rank(ranks: Any, phase: str, layout: str, flagged_max_tokens: int) -> None:
    options = {"flagged_max_tokens": flagged_max_tokens}
    case = Case(world_size=3, num_experts=6, layout=layout, with_weights=False, combine_weights=False, options=options)
    ranks(missing_rank, case.world_size, case, phase)
