"""Time, graphs, memory and failures of the op, on CPU processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.op_cases import Case
from tests.cases.op_special import BODIES, missing_rank


def once_quick() -> list[Any]:
    """Names of all special cases; `make test` runs each body with the first of its cases."""
    seen: set[Any] = set()
    cases = []
    for name, (body, _) in BODIES.items():
        cases.append(pytest.param(name, marks=[pytest.mark.full] if body in seen else []))
        seen.add(body)
    return cases


@pytest.mark.parametrize("name", once_quick())
def test_special(ranks: Any, name: str) -> None:
    body, case = BODIES[name]
    ranks(body, case.world_size, case)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize(
    ("layout", "flagged_max_tokens"),
    [
        ("compact", 128),
        pytest.param("compact", 0, marks=pytest.mark.full),
        pytest.param("rank_major", 0, marks=pytest.mark.full),
        pytest.param("rank_major", 128, marks=pytest.mark.full),
    ],
)
def test_missing_rank(ranks: Any, phase: str, layout: str, flagged_max_tokens: int) -> None:
    options = {"flagged_max_tokens": flagged_max_tokens}
    case = Case(world_size=3, num_experts=6, layout=layout, with_weights=False, combine_weights=False, options=options)
    ranks(missing_rank, case.world_size, case, phase)
