"""The cases of the op against the oracle, in the forms that GPUs launch.

Real processes run every pair of choices: tests/multiprocess/test_covering.py.
"""

from dataclasses import replace
from typing import Any

import pytest

from ep_a2a.ops import expert_major
from tests.cases.op_cases import Case, run_case
from tests.cases.op_matrix import CASES, DIRECT_PAYLOADS
from tests.simulator.runs import run_on_ranks, with_few_tokens

MANY_STEPS = 12
"""Enough for all buffers to be used again."""
MANY_ROWS = "expert_major-many-rows"


def small(name: str) -> Case:
    """The case with few tokens, and two steps where their number and bounds are not what it is about."""
    case = CASES[name] if name.endswith("many-tokens") else with_few_tokens(CASES[name])
    is_about_steps = name == "fifty-steps" or case.first_epoch or any(case.step_tokens) or case.split == "mixed"
    return replace(case, num_steps=min(case.num_steps, MANY_STEPS if is_about_steps else 2))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if name not in {*DIRECT_PAYLOADS, MANY_ROWS}])
def test_op(name: str) -> None:
    case = small(name)
    run_on_ranks(run_case, case.world_size, case)


def test_more_rows_than_a_program_numbers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the case MANY_ROWS, whose 270 rows GPUs number in two blocks of 256. Here three blocks of two rows do."""
    monkeypatch.setattr(expert_major, "NUMBERED_IDS", 8)
    case = replace(CASES[MANY_ROWS], world_size=2, max_tokens=6, tokens=((3, 2),), topk=3, num_experts=6)
    run_on_ranks(run_case, case.world_size, case)


@pytest.mark.parametrize("flagged_max_tokens", [0, 2])
def test_as_many_rows_as_there_is_room_for(flagged_max_tokens: int) -> None:
    full = Case(world_size=2, hidden_dim=8, num_experts=4, max_tokens=2, tokens=((2,),), num_steps=1)
    options = {"flagged_max_tokens": flagged_max_tokens}
    run_on_ranks(run_case, 2, replace(full, routing="all_to_one", options=options))


CASTS: dict[str, dict[str, Any]] = {
    "bf16": {"hidden_dim": 8},
    "cast": {"hidden_dim": 128, "quant_type": "fp8_blockwise"},
}
"""Rows as they are, and rows that are cast inside dispatch and on the way back."""
DISPATCHES: dict[str, dict[str, Any]] = {
    "low_latency": {},
    "bulk": {"flagged_max_tokens": 0},
    "tiles": {"flagged_max_tokens": 0, "max_sms": 1},
}
QUICK = (9, "rank_major", "bulk", "cast")
MANY_RANKS = (
    QUICK,
    (16, "compact", "low_latency", "cast"),
    (9, "compact", "bulk", "bf16"),
    (9, "compact", "tiles", "cast"),
    (16, "rank_major", "low_latency", "bf16"),
    (9, "rank_major", "tiles", "bf16"),
    (9, "expert_major", "low_latency", "bf16"),
    (16, "expert_major", "bulk", "cast"),
    (9, "expert_major", "tiles", "bf16"),
    (34, "rank_major", "bulk", "bf16"),
)
"""More ranks than a host has, with every pair of layout, dispatch and cast. Tiles are for bounded multiprocessors.

The most ranks are more than experts.
"""


@pytest.mark.parametrize(
    ("world_size", "layout", "dispatch", "cast"),
    [pytest.param(*each, marks=[] if each == QUICK else pytest.mark.full) for each in MANY_RANKS],
)
def test_many_ranks(world_size: int, layout: str, dispatch: str, cast: str) -> None:
    options = DISPATCHES[dispatch] | (
        {"dispatch_quant_type": "fp8_per_1x128"} if cast == "cast" else {"local_ids": True}
    )
    case = Case(
        world_size=world_size,
        num_experts=min(2 * world_size + 1, 33),
        topk=3,
        max_tokens=3,
        tokens=((2, 0, 1), (1, 2, 0)),
        num_steps=2,
        routing="out_of_range",
        layout=layout,
        options=options,
        **CASTS[cast],
    )
    run_on_ranks(run_case, world_size, case)
