"""The cases of the op against the oracle, in the forms that GPUs launch.

Real processes run each layout over each transport: tests/multiprocess/test_covering.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cases.op_cases import run_case
from tests.cases.op_matrix import CASES, DIRECT_PAYLOADS
from tests.simulator.runs import run_on_ranks

if TYPE_CHECKING:
    from tests.cases.op_cases import Case


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name) for name in CASES if name not in DIRECT_PAYLOADS])
def test_op(case: Case) -> None:
    run_on_ranks(run_case, case.world_size, case)
