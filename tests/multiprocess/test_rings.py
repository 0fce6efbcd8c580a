"""InterNodeV1 and its kin with all memory addressable, on virtual nodes of CPU processes: failures, and memory.

The simulator compares their steps with the oracle: tests/simulator/test_rings.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cases.op_special import BODIES, missing_rank
from tests.cases.ring_cases import (
    ONE_MISSING,
    REPLAYED,
    SPECIAL,
    of_two_ranks,
    other_numbers_of_programs,
    rings,
)


@pytest.mark.parametrize("name", SPECIAL)
def test_special(ranks: Any, name: str) -> None:
    body, case = BODIES[name]
    few = of_two_ranks(case)
    ranks(body, few.world_size, few)


def test_ranks_may_ask_for_different_numbers_of_programs(ranks: Any) -> None:
    case = replace(
        REPLAYED,
        tokens=((8, 8),),
        options=rings(1, 1, 4) | {"block_num": 2},
    )
    ranks(other_numbers_of_programs, 2, case)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_missing_rank(ranks: Any, phase: str) -> None:
    ranks(missing_rank, ONE_MISSING.world_size, ONE_MISSING, phase)
