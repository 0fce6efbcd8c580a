"""Every allowed pair of layout, dtype, cast, routing, world size and transport, on CPU processes against the oracle."""

import itertools
from typing import Any

import pytest

from ep_a2a.errors import ConfigError
from tests.cases import covering
from tests.cases.op_cases import run_case


def test_every_allowed_pair_is_covered() -> None:
    names = list(itertools.combinations(covering.VALUES.items(), 2))
    every = {((a, x), (b, y)) for (a, left), (b, right) in names for x in left for y in right}
    assert every > covering.IMPOSSIBLE
    assert every - covering.IMPOSSIBLE == set().union(*map(covering.pairs_of, covering.covering_choices()))
    assert every - covering.IMPOSSIBLE == set().union(
        *(covering.pairs_of(choice) for _, choice in covering.covering_few_kernels())
    )


def test_few_kernels_are_fewer() -> None:
    numbers = [number for number, _ in covering.covering_few_kernels()]
    assert len(set(numbers)) == max(numbers) + 1 < 0.6 * len(numbers)


def test_an_impossible_cast_is_refused() -> None:
    for cast in ("fp8_per_token", "fp8_per_1x128"):
        choice = covering.Choice("compact", "fp8", cast, "uniform", 2, "shared-memory")
        with pytest.raises(ConfigError):
            covering.case_of(choice, 0).config(0)


@pytest.mark.parametrize(("choice", "number"), covering.covering_params())
def test_pair(ranks: Any, choice: covering.Choice, number: int) -> None:
    ranks(run_case, choice.world_size, covering.case_of(choice, number))
