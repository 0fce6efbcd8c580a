"""Special cases of the op that need real processes: their groups, clocks and memory, and failures.

The simulator runs the others: tests/simulator/test_op_special.py.
"""

from typing import Any

import pytest

from tests.cases.op_special import BODIES
from tests.simulator.test_op_special import QUICK_IN_PROCESSES, REAL_PROCESSES, once_quick

QUICK_IN_SIMULATOR = (
    "construction-mismatches",
    "device-failures-direct",
    "late-rank-direct",
    "nothing-waits-for-garbage-collection",
)
IN_BOTH = [*QUICK_IN_PROCESSES, *(pytest.param(name, marks=pytest.mark.full) for name in QUICK_IN_SIMULATOR)]
"""One of each kind that the simulator runs, too."""


@pytest.mark.parametrize("name", [*once_quick(REAL_PROCESSES), *IN_BOTH])
def test_special(ranks: Any, name: str) -> None:
    body, case = BODIES[name]
    ranks(body, case.world_size, case)
