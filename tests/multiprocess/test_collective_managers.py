"""The backends on torch.distributed, on CPU processes over gloo."""

import json
from pathlib import Path
from typing import Any

import pytest

from ep_a2a.config import QuantType
from ep_a2a.testing import RankFailure, RankPool, run_ranks
from tests.cases import manager_cases
from tests.cases.covering import Choice, case_of, covering_params
from tests.cases.manager_cases import COLLECTIVE
from tests.cases.op_cases import Case
from tests.cases.op_matrix import CASES

both = pytest.mark.parametrize("name", COLLECTIVE)
WORLD_SIZES = (1, 3, 4)
# What only kernels can get wrong is left out: epochs, widths of vectors, the number of steps, ways of dispatch.
KERNELS_ONLY = ("epoch", "K", "H", "long", "unusual", "both", "look_back", "three_dispatches", "alone")
OP_CASES = {
    name: case
    for name, case in CASES.items()
    if case.world_size in WORLD_SIZES
    and case.layout != "expert_major"
    and not name.startswith(KERNELS_ONLY)
    and not name.endswith("-direct")
    and case.config(0).combine_quant is QuantType.NONE
}
OFFERED = {
    "layout": ("compact", "rank_major"),
    "cast": ("none", "fp8_per_token", "fp8_per_1x128"),
    "transport": ("shared-memory",),
}


@both
@pytest.mark.parametrize("world_size", [1, 4])
def test_other_forms(ranks: Any, world_size: int, name: str) -> None:
    ranks(manager_cases.other_forms, world_size, name)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in OP_CASES.items()])
def test_op(ranks: Any, case: Case) -> None:
    ranks(manager_cases.run_case_on, case.world_size, COLLECTIVE[0], case)


@pytest.mark.parametrize(("choice", "number"), covering_params(**OFFERED))
def test_pair(ranks: Any, choice: Choice, number: int) -> None:
    """Of the backend that adds in the order of ranks; how naive's all-reduce adds, the library decides."""
    ranks(manager_cases.run_case_on, choice.world_size, COLLECTIVE[1], case_of(choice, number))


@both
def test_ranks_that_disagree(ranks: Any, name: str) -> None:
    ranks(manager_cases.ranks_that_disagree, 3, name)


@both
@pytest.mark.parametrize("world_size", [1, 3])
def test_wrong_use(ranks: Any, world_size: int, name: str) -> None:
    ranks(manager_cases.wrong_use, world_size, name)


@both
def test_absent_rank(name: str) -> None:
    run_ranks(manager_cases.absent_rank, 2, name)


@both
def test_a_killed_rank_is_named(name: str, tmp_path: Path) -> None:
    with RankPool(3, grace_secs=30) as pool, pytest.raises(RankFailure) as caught:
        pool.run(manager_cases.killed_rank, name, str(tmp_path))
    assert sorted(caught.value.tracebacks) == [2], str(caught.value)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [[[2], []]] * 2
