"""Time, graphs, memory and failures of the op, and orders of calls."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.cases.op_cases import Case
from tests.cases.op_special import BODIES, missing_rank
from tests.simulator.runs import run_on_ranks, with_few_tokens

REAL_PROCESSES = (
    # a dispatch behind a failed step replaces counts beside loads of them that it does not use: the simulator refuses
    "weights-on-some-ranks",
)
"""Bodies that the simulator does not run: tests/multiprocess/test_op_special.py."""
QUICK_IN_PROCESSES = ("graph-cast",)
ON_TWO_RANKS = ("order-interleaved", "sequential-ops-share-memory")
"""Bodies that `make test` runs on fewer ranks than their cases have."""


def once_quick(names: Iterable[str], elsewhere: Iterable[str] = ()) -> list[Any]:
    """Names of special cases; `make test` runs each body in its case of fewest ranks, unless it does so elsewhere."""
    by_size = sorted(names, key=lambda name: (BODIES[name][1].world_size, BODIES[name][1].unusual))
    first = {body: name for name in reversed(by_size) for body in [BODIES[name][0]]}
    quick = set(first.values()) - set(elsewhere)
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.full]) for name in by_size]


@pytest.mark.parametrize(
    "name", once_quick([name for name in BODIES if name not in REAL_PROCESSES], {*QUICK_IN_PROCESSES, *ON_TWO_RANKS})
)
def test_special(name: str) -> None:
    body, case = BODIES[name]
    run_on_ranks(body, case.world_size, with_few_tokens(case))


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_on_two_ranks(name: str) -> None:
    body, case = BODIES[name]
    few = replace(case, world_size=2, num_experts=5, tokens=((5, 3), (2, 6)))
    run_on_ranks(body, few.world_size, few)


@pytest.mark.parametrize(
    ("phase", "layout", "flagged_max_tokens"),
    [
        pytest.param(*each, marks=[] if each == ("combine", "compact", 128) else [pytest.mark.full])
        for each in itertools.product(("dispatch", "combine"), ("compact", "rank_major"), (0, 128))
    ],
)
def test_rank_that_misses_a_call(phase: str, layout: str, flagged_max_tokens: int) -> None:
    options = {"flagged_max_tokens": flagged_max_tokens}
    case = Case(world_size=3, num_experts=6, layout=layout, with_weights=False, combine_weights=False, options=options)
    run_on_ranks(missing_rank, case.world_size, with_few_tokens(case), phase)
