"""Rings on virtual nodes of GPUs, by stores and by puts of NVSHMEM: the bodies of tests/simulator/test_rings.py."""

from dataclasses import replace
from typing import Any

import pytest

from tests.cases.op_cases import BY_PUTS, Case, run_case, with_options
from tests.cases.op_matrix import CASES
from tests.cases.op_special import BODIES
from tests.cases.ring_cases import (
    OF_FOUR_RANKS,
    REPLAYED,
    RING_KERNELS,
    SHAPES,
    SHAPES_AND_FLAT,
    lines_that_cross,
    on_two_nodes,
    other_numbers_of_programs,
    rings,
)
from tests.multigpu.cases import on_two_gpus


def each_transport(by_stores: dict[str, Case], by_puts: dict[str, Case]) -> list[Any]:
    """Parameters for cases of both transports."""
    puts = {f"puts-{name}": with_options(case, **BY_PUTS) for name, case in by_puts.items()}
    cases = {f"stores-{name}": case for name, case in by_stores.items()} | puts
    return [pytest.param(case, id=name) for name, case in cases.items()]


OF_FOUR = {name: on_two_nodes(CASES[name]) for name in OF_FOUR_RANKS}
REPLAYS = {kernel: replace(REPLAYED, kernel=kernel) for kernel in RING_KERNELS}


@pytest.mark.parametrize(
    "case",
    [
        *each_transport(on_two_gpus(SHAPES_AND_FLAT), on_two_gpus(SHAPES)),
        *each_transport(OF_FOUR, OF_FOUR),
        *each_transport(SHAPES_AND_FLAT, SHAPES),
    ],
)
def test_steps(ranks: Any, case: Case) -> None:
    ranks(run_case, case.world_size, case)


@pytest.mark.usefixtures("compiled_whole")
@pytest.mark.parametrize("case", each_transport(REPLAYS, REPLAYS))
def test_replayed_steps(ranks: Any, case: Case) -> None:
    ranks(BODIES["graph-rank-major"][0], case.world_size, case)


def test_ranks_may_ask_for_different_numbers_of_programs(ranks: Any) -> None:
    case = replace(REPLAYED, tokens=((8, 8),), options=rings(1, 1, 4) | {"block_num": 2})
    ranks(other_numbers_of_programs, 2, case)


def test_a_token_crosses_once_to_each_other_node(ranks: Any) -> None:
    case = Case(num_nodes=2, tokens=((200, 31, 0, 128),), max_tokens=256, topk=6, num_experts=16, layout="rank_major")
    crossed, once, flat = map(sum, zip(*ranks(lines_that_cross, 4, case)))
    assert crossed == once < flat
