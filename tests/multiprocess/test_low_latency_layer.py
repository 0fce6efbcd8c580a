"""Triton-distributed's layer on CPU processes, against the oracle."""

from dataclasses import replace
from typing import Any

import pytest

from tests.cases.low_latency_cases import BASE, BODIES, CASES, ON_TWO_NODES, in_turn
from tests.cases.staged_cases import over


@pytest.mark.parametrize("name", CASES)
def test_steps_in_turn(ranks: Any, name: str) -> None:
    ranks(in_turn, CASES[name].world_size, CASES[name])


@pytest.mark.parametrize("name", BODIES)
def test_special(ranks: Any, name: str) -> None:
    ranks(BODIES[name], BASE.world_size, BASE)


@pytest.mark.parametrize("transport", ["peer_memory", "torch.distributed"])
def test_between_nodes(ranks: Any, transport: str) -> None:
    ranks(over, 4, transport, in_turn, ON_TWO_NODES)
    ranks(over, 2, transport, in_turn, replace(CASES["float32-dropped"], num_nodes=2))


@pytest.mark.parametrize("transport", ["peer_memory", "torch.distributed"])
@pytest.mark.parametrize("name", ["two_open_steps", "refusals"])
def test_special_between_nodes(ranks: Any, name: str, transport: str) -> None:
    ranks(over, 2, transport, BODIES[name], replace(BASE, num_nodes=2))


def test_a_rank_of_another_node_without_combine(ranks: Any) -> None:
    four = replace(BASE, world_size=4, num_experts=12, num_nodes=2)
    ranks(over, 4, "torch.distributed", BODIES["a_rank_without_combine"], four)
