"""Rings whose chunks NVSHMEM puts, on virtual nodes of GPUs: the bodies of tests/simulator/test_rings.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cases.op_cases import Case, run_case
from tests.cases.op_matrix import CASES
from tests.cases.op_special import BODIES
from tests.cases.ring_cases import OF_FOUR_RANKS, REPLAYED, RING_KERNELS, SHAPES, by_puts, on_two_nodes
from tests.markers import needs_own_gpus
from tests.multigpu.cases import on_two_gpus

pytestmark = needs_own_gpus(2, "NVSHMEM")


@needs_own_gpus(2)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in on_two_gpus(SHAPES).items()])
def test_two_nodes_of_one(ranks: Any, case: Case) -> None:
    ranks(by_puts, 2, run_case, case, device="cuda")


@needs_own_gpus(4)
@pytest.mark.parametrize("name", OF_FOUR_RANKS)
def test_two_nodes_of_two(ranks: Any, name: str) -> None:
    ranks(by_puts, 4, run_case, on_two_nodes(CASES[name]), device="cuda")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=needs_own_gpus(case.world_size)) for name, case in SHAPES.items()],
)
def test_shapes(ranks: Any, case: Case) -> None:
    ranks(by_puts, case.world_size, run_case, case, device="cuda")


@needs_own_gpus(2)
@pytest.mark.usefixtures("compiled_whole")
@pytest.mark.parametrize("kernel", RING_KERNELS)
def test_replayed_steps(ranks: Any, kernel: str) -> None:
    body, _ = BODIES["graph-rank-major"]
    ranks(by_puts, REPLAYED.world_size, body, replace(REPLAYED, kernel=kernel), device="cuda")
