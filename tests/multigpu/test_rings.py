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
from tests.markers import needs_gpus, needs_own_gpus
from tests.multigpu.cases import on_two_gpus


def each_transport(cases_by_stores: dict[str, Case], cases_by_puts: dict[str, Case]) -> list[Any]:
    """Parameters for cases of both transports; NVSHMEM needs a GPU for each rank."""
    return [
        pytest.param(case, id=f"stores-{name}", marks=needs_gpus(case.world_size))
        for name, case in cases_by_stores.items()
    ] + [
        pytest.param(with_options(case, **BY_PUTS), id=f"puts-{name}", marks=needs_own_gpus(case.world_size, "NVSHMEM"))
        for name, case in cases_by_puts.items()
    ]


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
    ranks(run_case, case.world_size, case, device="cuda")


@pytest.mark.usefixtures("compiled_whole")
@pytest.mark.parametrize("case", each_transport(REPLAYS, REPLAYS))
def test_replayed_steps(ranks: Any, case: Case) -> None:
    ranks(BODIES["graph-rank-major"][0], case.world_size, case, device="cuda")


@needs_gpus(2)
def test_ranks_may_ask_for_different_numbers_of_programs(ranks: Any) -> None:
    case = replace(REPLAYED, tokens=((8, 8),), options=rings(1, 1, 4) | {"block_num": 2})
    ranks(other_numbers_of_programs, 2, case, device="cuda")


@needs_gpus(4)
def test_a_token_crosses_once_to_each_other_node(ranks: Any) -> None:
    case = Case(num_nodes=2, tokens=((200, 31, 0, 128),), max_tokens=256, topk=6, num_experts=16, layout="rank_major")
    crossed, once, flat = map(sum, zip(*ranks(lines_that_cross, 4, case, device="cuda")))
    assert crossed == once < flat
