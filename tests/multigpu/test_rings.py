"""Rings on virtual nodes of GPUs, by stores and by puts of NVSHMEM: the bodies of tests/simulator/test_rings.py."""

from dataclasses import replace
from typing import Any

import pytest

from tests.cases.op_cases import BY_PUTS, Case, run_case, with_options
from tests.cases.op_special import BODIES
from tests.cases.ring_cases import REPLAYED, lines_that_cross, other_numbers_of_programs, rings
from tests.multigpu.cases import REPLAYED_RINGS, ring_cases


def by_each_transport(cases: dict[str, Case]) -> list[Any]:
    """Parameters; the flat form sends to any rank's memory, which puts do not reach."""
    puts = {f"puts-{name}": with_options(case, **BY_PUTS) for name, case in cases.items() if case.kernel != "InterNode"}
    return [pytest.param(case, id=name) for name, case in (cases | puts).items()]


@pytest.mark.parametrize("case", by_each_transport(ring_cases()))
def test_steps(ranks: Any, case: Case) -> None:
    ranks(run_case, case.world_size, case)


@pytest.mark.usefixtures("compiled_whole")
@pytest.mark.parametrize("case", by_each_transport(REPLAYED_RINGS))
def test_replayed_steps(ranks: Any, case: Case) -> None:
    ranks(BODIES["graph-rank-major"][0], case.world_size, case)


def test_ranks_may_ask_for_different_numbers_of_programs(ranks: Any) -> None:
    case = replace(REPLAYED, tokens=((8, 8),), options=rings(1, 1, 4) | {"block_num": 2})
    ranks(other_numbers_of_programs, 2, case)


def test_a_token_crosses_once_to_each_other_node(ranks: Any) -> None:
    case = Case(num_nodes=2, tokens=((200, 31, 0, 128),), max_tokens=256, topk=6, num_experts=16, layout="rank_major")
    crossed, once, flat = map(sum, zip(*ranks(lines_that_cross, 4, case)))
    assert crossed == once < flat
