"""The op on CPU processes: the real kernels in Triton's interpreter, over shared memory, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest

from tests.op_cases import Case, run_case
from tests.op_matrix import by_world_size


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in by_world_size()])
def test_op(ranks: Any, case: Case) -> None:
    ranks(run_case, case.world_size, case)
