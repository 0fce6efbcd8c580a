"""The cases of the op against the oracle, in the forms that GPUs launch.

Real processes run each layout over each transport: tests/multiprocess/test_covering.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ep_a2a.ops import expert_major
from tests.cases.op_cases import run_case
from tests.cases.op_matrix import CASES, DIRECT_PAYLOADS
from tests.simulator.runs import run_on_ranks

MANY_ROWS = "expert_major-many-rows"


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if name not in DIRECT_PAYLOADS and name != MANY_ROWS])
def test_op(name: str) -> None:
    run_on_ranks(run_case, CASES[name].world_size, CASES[name])


def test_more_rows_than_a_program_numbers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the case MANY_ROWS, whose 270 rows GPUs number in two blocks of 256. Here three blocks of two rows do."""
    monkeypatch.setattr(expert_major, "NUMBERED_IDS", 8)
    case = replace(CASES[MANY_ROWS], world_size=2, max_tokens=6, tokens=((3, 2),), topk=3, num_experts=6)
    run_on_ranks(run_case, case.world_size, case)
