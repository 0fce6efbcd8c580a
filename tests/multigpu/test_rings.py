"""InterNodeV1 and its kin on virtual nodes of GPUs: the bodies of tests/simulator/test_rings.py over NVLink."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cases.op_cases import Case, run_case
from tests.cases.op_matrix import CASES
from tests.cases.op_special import BODIES
from tests.cases.ring_cases import (
    OF_FOUR_RANKS,
    REPLAYED,
    RING_KERNELS,
    SHAPES_AND_FLAT,
    lines_that_cross,
    on_two_nodes,
    other_numbers_of_programs,
    rings,
)
from tests.markers import needs_gpus
from tests.multigpu.cases import on_two_gpus


@needs_gpus(2)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in on_two_gpus(SHAPES_AND_FLAT).items()])
def test_two_nodes_of_one(ranks: Any, case: Case) -> None:
    ranks(run_case, 2, case, device="cuda")


@needs_gpus(4)
@pytest.mark.parametrize("name", OF_FOUR_RANKS)
def test_two_nodes_of_two(ranks: Any, name: str) -> None:
    ranks(run_case, 4, on_two_nodes(CASES[name]), device="cuda")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=needs_gpus(case.world_size)) for name, case in SHAPES_AND_FLAT.items()]
)
def test_shapes(ranks: Any, case: Case) -> None:
    ranks(run_case, case.world_size, case, device="cuda")


@needs_gpus(2)
@pytest.mark.usefixtures("compiled_whole")
@pytest.mark.parametrize("kernel", RING_KERNELS)
def test_replayed_steps(ranks: Any, kernel: str) -> None:
    body, _ = BODIES["graph-rank-major"]
    ranks(body, REPLAYED.world_size, replace(REPLAYED, kernel=kernel), device="cuda")


@needs_gpus(2)
def test_ranks_may_ask_for_different_numbers_of_programs(ranks: Any) -> None:
    case = replace(
        REPLAYED,
        tokens=((8, 8),),
        options=rings(1, 1, 4) | {"block_num": 2},
    )
    ranks(other_numbers_of_programs, 2, case, device="cuda")


@needs_gpus(4)
def test_a_token_crosses_once_to_each_other_node(ranks: Any) -> None:
    case = Case(num_nodes=2, tokens=((200, 31, 0, 128),), max_tokens=256, topk=6, num_experts=16, layout="rank_major")
    crossed, once, flat = map(sum, zip(*ranks(lines_that_cross, 4, case, device="cuda")))
    assert crossed == once < flat
