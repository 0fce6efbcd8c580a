"""The cases of the op against the oracle, in the forms that GPUs launch.

Real processes run each layout over each transport: tests/multiprocess/test_covering.py.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from ep_a2a.ops import expert_major
from tests.cases.op_cases import Case, run_case
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


def many_ranks() -> list[Any]:
    """More ranks than a host has, in every layout, by each dispatch: tiles are for bounded multiprocessors."""
    layouts = ("compact", "rank_major", "expert_major")
    names = [
        *itertools.product((9, 16), layouts, ("low_latency", "bulk"), CASTS),
        *itertools.product((9,), layouts, ("tiles",), CASTS),
    ]
    return [
        pytest.param(*name, id="-".join(map(str, name)), marks=[] if name == QUICK else pytest.mark.full)
        for name in names
    ]


@pytest.mark.parametrize(("world_size", "layout", "dispatch", "cast"), many_ranks())
def test_many_ranks(world_size: int, layout: str, dispatch: str, cast: str) -> None:
    options = DISPATCHES[dispatch] | ({"dispatch_quant_type": "fp8_per_1x128"} if cast == "cast" else {})
    case = Case(
        world_size=world_size,
        num_experts=2 * world_size + 1,
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
