"""InterNodeV1 and its kin with all memory addressable, on virtual nodes, against the oracle.

The bodies are those of the op inside a node; only the kernels differ. Real processes run each layout over each
transport: tests/multiprocess/test_covering.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cases.op_cases import Case, run_case
from tests.cases.op_matrix import CASES, UNEVEN
from tests.cases.op_special import BODIES
from tests.cases.op_steps import cast_before
from tests.cases.ring_cases import (
    CAST_BEFORE,
    OF_FOUR_RANKS,
    REPLAYED,
    RING_KERNELS,
    SHAPES_AND_FLAT,
    SMALL_RINGS,
    lines_that_cross,
    on_two_nodes,
)
from tests.simulator.runs import run_on_ranks

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", OF_FOUR_RANKS)
def test_two_nodes_of_two(name: str) -> None:
    run_on_ranks(run_case, 4, on_two_nodes(CASES[name]))


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in SHAPES_AND_FLAT.items()])
def test_shapes(case: Case) -> None:
    run_on_ranks(run_case, case.world_size, case)


@pytest.mark.parametrize("kernel", ["InterNodeV1", "AsyncLL"])
def test_replayed_steps(kernel: str) -> None:
    body, _ = BODIES["graph-rank-major"]
    run_on_ranks(body, REPLAYED.world_size, replace(REPLAYED, kernel=kernel))


@pytest.mark.parametrize("kernel", RING_KERNELS)
def test_scales_of_tokens_that_come_cast(kernel: str) -> None:
    run_on_ranks(cast_before, CAST_BEFORE.world_size, replace(CAST_BEFORE, kernel=kernel))


def test_a_token_crosses_once_to_each_other_node() -> None:
    """Where the flat form sends it to each rank there."""
    case = Case(num_nodes=2, tokens=UNEVEN, topk=6, num_experts=16, layout="rank_major", options=SMALL_RINGS)
    crossed, once, flat = map(sum, zip(*run_on_ranks(lines_that_cross, 4, case).results))
    assert crossed == once < flat
