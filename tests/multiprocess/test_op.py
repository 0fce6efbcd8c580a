"""The op on CPU processes: the real kernels in Triton's interpreter, over shared memory, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.op_cases import Case, run_case
from tests.cases.op_matrix import DIRECT_PAYLOADS, by_world_size

CASES = by_world_size(left_out=DIRECT_PAYLOADS)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES])
def test_op(ranks: Any, case: Case) -> None:
    ranks(run_case, case.world_size, case)
