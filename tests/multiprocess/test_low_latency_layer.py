"""Triton-distributed's layer on CPU processes, against the oracle."""

from typing import Any

import pytest

from tests.cases.low_latency_cases import BASE, BODIES, CASES, in_turn


@pytest.mark.parametrize("name", CASES)
def test_steps_in_turn(ranks: Any, name: str) -> None:
    ranks(in_turn, CASES[name].world_size, CASES[name])


@pytest.mark.parametrize("name", BODIES)
def test_special(ranks: Any, name: str) -> None:
    ranks(BODIES[name], BASE.world_size, BASE)
