"""Special cases of the op that need real processes: their groups, clocks and memory, and failures.

The simulator runs the others: tests/simulator/test_op_special.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.op_cases import Case
from tests.cases.op_special import BODIES, missing_rank
from tests.simulator.test_op_special import REAL_PROCESSES, once_quick

IN_BOTH = (
    "construction-mismatches",
    "device-failures-direct",
    "graph-cast",
    "late-rank-direct",
    "memory-of-closed-ops-is-used-again",
    "nothing-waits-for-garbage-collection",
)
"""One of each kind that the simulator runs, too."""


@pytest.mark.parametrize("name", [*once_quick(REAL_PROCESSES), *IN_BOTH])
def test_special(ranks: Any, name: str) -> None:
    body, case = BODIES[name]
    ranks(body, case.world_size, case)


@pytest.mark.parametrize(
    ("layout", "flagged_max_tokens"),
    [
        ("compact", 128),
        pytest.param("compact", 0, marks=pytest.mark.full),
        pytest.param("rank_major", 0, marks=pytest.mark.full),
        pytest.param("rank_major", 128, marks=pytest.mark.full),
    ],
)
def test_rank_that_misses_dispatch(ranks: Any, layout: str, flagged_max_tokens: int) -> None:
    options = {"flagged_max_tokens": flagged_max_tokens}
    case = Case(world_size=3, num_experts=6, layout=layout, with_weights=False, combine_weights=False, options=options)
    ranks(missing_rank, case.world_size, case, "dispatch")
