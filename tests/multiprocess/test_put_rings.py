"""Rings by puts, as over NVSHMEM: stores reach ranks of the own node only. Copies of bytes stand for puts here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ep_a2a.errors import UnsupportedError
from ep_a2a.memory.arena import Arena
from tests.cases.op_cases import Case, make_op, run_case
from tests.cases.op_matrix import CASES
from tests.cases.op_special import BODIES, missing_rank
from tests.cases.ring_cases import (
    OF_FOUR_RANKS,
    ONE_MISSING,
    REPLAYED,
    SHAPES,
    SPECIAL,
    by_puts,
    of_two_ranks,
    on_two_nodes,
)

if TYPE_CHECKING:
    from ep_a2a.testing import RankContext


def refused(context: RankContext, case: Case, remedy: str) -> None:
    with Arena(context.group, context.device) as memory, pytest.raises(UnsupportedError, match=remedy):
        make_op(context, case, memory)


@pytest.mark.parametrize("name", OF_FOUR_RANKS)
def test_two_nodes_of_two(ranks: Any, name: str) -> None:
    ranks(by_puts, 4, run_case, on_two_nodes(CASES[name]))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(ranks: Any, name: str) -> None:
    ranks(by_puts, SHAPES[name].world_size, run_case, SHAPES[name])


@pytest.mark.parametrize("name", SPECIAL)
def test_special(ranks: Any, name: str) -> None:
    body, case = BODIES[name]
    few = of_two_ranks(case)
    ranks(by_puts, few.world_size, body, few)


@pytest.mark.parametrize("kernel", ["InterNodeV1", "AsyncLL"])
def test_replayed_steps(ranks: Any, kernel: str) -> None:
    ranks(by_puts, REPLAYED.world_size, BODIES["graph-rank-major"][0], replace(REPLAYED, kernel=kernel))


@pytest.mark.parametrize(
    ("kernel", "transport", "remedy"),
    [("InterNodeV1", "torch.distributed", "from a manager"), ("InterNode", "nvshmem", "InterNodeV1, which puts")],
)
def test_transports_that_an_op_cannot_use_by_itself(ranks: Any, kernel: str, transport: str, remedy: str) -> None:
    ranks(
        refused,
        2,
        replace(REPLAYED, kernel=kernel, options=REPLAYED.options | {"internode_transport": transport}),
        remedy,
    )


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_missing_rank(ranks: Any, phase: str) -> None:
    ranks(by_puts, ONE_MISSING.world_size, missing_rank, ONE_MISSING, phase)
