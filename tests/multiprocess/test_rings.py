"""InterNodeV1 and its kin with all memory addressable, on virtual nodes of CPU processes, against the oracle.

The bodies are those of the op inside a node; only the kernels differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cases.op_cases import Case, run_case
from tests.cases.op_matrix import CASES, UNEVEN
from tests.cases.op_special import BODIES, missing_rank
from tests.cases.op_steps import cast_before
from tests.cases.ring_cases import (
    CAST_BEFORE,
    OF_FOUR_RANKS,
    ONE_MISSING,
    REPLAYED,
    RING_KERNELS,
    SHAPES_AND_FLAT,
    SMALL_RINGS,
    SPECIAL,
    lines_that_cross,
    of_two_ranks,
    on_two_nodes,
    other_numbers_of_programs,
    rings,
)


@pytest.mark.parametrize("name", OF_FOUR_RANKS)
def test_two_nodes_of_two(ranks: Any, name: str) -> None:
    ranks(run_case, 4, on_two_nodes(CASES[name]))


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in SHAPES_AND_FLAT.items()])
def test_shapes(ranks: Any, case: Case) -> None:
    ranks(run_case, case.world_size, case)


@pytest.mark.parametrize("name", SPECIAL)
def test_special(ranks: Any, name: str) -> None:
    body, case = BODIES[name]
    few = of_two_ranks(case)
    ranks(body, few.world_size, few)


@pytest.mark.parametrize("kernel", ["InterNodeV1", "AsyncLL"])
def test_replayed_steps(ranks: Any, kernel: str) -> None:
    body, _ = BODIES["graph-rank-major"]
    ranks(body, REPLAYED.world_size, replace(REPLAYED, kernel=kernel))


@pytest.mark.parametrize("kernel", RING_KERNELS)
def test_scales_of_tokens_that_come_cast(ranks: Any, kernel: str) -> None:
    ranks(cast_before, CAST_BEFORE.world_size, replace(CAST_BEFORE, kernel=kernel))


def test_ranks_may_ask_for_different_numbers_of_programs(ranks: Any) -> None:
    case = replace(
        REPLAYED,
        tokens=((8, 8),),
        options=rings(1, 1, 4) | {"block_num": 2},
    )
    ranks(other_numbers_of_programs, 2, case)


def test_a_token_crosses_once_to_each_other_node(ranks: Any) -> None:
    """Where the flat form sends it to each rank there."""
    case = Case(num_nodes=2, tokens=UNEVEN, topk=6, num_experts=16, layout="rank_major", options=SMALL_RINGS)
    crossed, once, flat = map(sum, zip(*ranks(lines_that_cross, 4, case)))
    assert crossed == once < flat


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_missing_rank(ranks: Any, phase: str) -> None:
    ranks(missing_rank, ONE_MISSING.world_size, ONE_MISSING, phase)
