"""The kernels on weak memory: every step meets the oracle, however late stores land and however old loads are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulator.cases import CASES, bodies_of
from tests.simulator.runs import CONDITIONS, run

NUM_SEEDS = 10
RUNS = [(case, body) for case in CASES for body in bodies_of(case)]


@pytest.mark.parametrize("name", ["late", "random"])
@pytest.mark.parametrize(("case", "body"), RUNS)
def test_steps_meet_the_oracle(case, body, name):
    run(case, body, CONDITIONS[name])


@pytest.mark.parametrize(
    ("case", "body", "name"),
    [
        ("rings", "steps", "pausing"),
        ("low_latency", "until_late", "stopping"),
        ("bulk_compact", "until_late", "stopping"),
    ],
)
def test_a_rank_stands_still(case, body, name):
    run(case, body, CONDITIONS[name])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, NUM_SEEDS + 1))
@pytest.mark.parametrize(("case", "body"), RUNS)
def test_steps_meet_the_oracle_by_chance(case, body, seed):
    run(case, body, replace(CONDITIONS["random"], seed=seed))
