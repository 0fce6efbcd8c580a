"""Time, graphs, memory and failures of the op, on CPU processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.op_cases import Case
from tests.cases.op_special import BODIES, missing_rank

SLOW = frozenset(
    {
        "cast-by-some-ranks",
        "closed-in-the-middle",
        "graph-of-halves",
        "late-in-the-first-step-direct",
        "memory-of-closed-ops-is-used-again",
        "order-interleaved",
        "order-of-calls",
        "overlapping-halves-unusual",
        "sequential-ops-share-memory",
    }
)
"""What `make test` leaves to `make test-rest`: they take 14 s and more, and other bodies are near."""


def once_quick() -> list[Any]:
    """Names of all special cases; `make test` runs each body but the slow ones, in its case of fewest ranks."""
    by_size = sorted(BODIES, key=lambda name: BODIES[name][1].world_size)
    first = {body: name for name in reversed(by_size) for body in [BODIES[name][0]]}
    quick = set(first.values()) - SLOW
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.full]) for name in BODIES]


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
