"""Rings by puts, as over NVSHMEM: stores reach ranks of the own node only. Copies of bytes stand for puts here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.op_cases import Case, run_case
from tests.op_matrix import CASES
from tests.op_special import BODIES, missing_rank
from tests.ring_cases import OF_FOUR_RANKS, REPLAYED, SHAPES, SMALL_RINGS, SPECIAL, by_puts, on_two_nodes


@pytest.mark.parametrize("name", OF_FOUR_RANKS)
def test_two_nodes_of_two(ranks: Any, name: str) -> None:
    ranks(by_puts, 4, run_case, on_two_nodes(CASES[name]))


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "flat"])
def test_shapes(ranks: Any, name: str) -> None:
    ranks(by_puts, SHAPES[name].world_size, run_case, SHAPES[name])


@pytest.mark.parametrize("name", SPECIAL)
def test_special(ranks: Any, name: str) -> None:
    body, case = BODIES[name]
    few = replace(case, world_size=2, num_nodes=2, tokens=((5, 3), (2, 9)), num_experts=5, options=SMALL_RINGS)
    ranks(by_puts, few.world_size, body, few)


@pytest.mark.parametrize("kernel", ["InterNodeV1", "AsyncLL"])
def test_replayed_steps(ranks: Any, kernel: str) -> None:
    ranks(by_puts, REPLAYED.world_size, BODIES["graph-rank-major"][0], replace(REPLAYED, kernel=kernel))


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_missing_rank(ranks: Any, phase: str) -> None:
    case = Case(
        world_size=4, num_nodes=2, num_experts=8, layout="rank_major", with_weights=False, combine_weights=False,
        options=SMALL_RINGS,
    )  # fmt: skip
    ranks(by_puts, case.world_size, missing_rank, case, phase)
