"""Ops across virtual nodes, whatever carries their blocks: stores, puts as over NVSHMEM, or exchanges of the hosts.

The bodies are those of the op inside a node; only the kernels differ. Real processes run each layout over each
transport: tests/multiprocess/test_covering.py.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ep_a2a.errors import UnsupportedError
from ep_a2a.memory.arena import Arena
from tests.cases import ring_cases
from tests.cases.op_cases import BY_HOSTS, BY_PUTS, Case, make_op, run_case, with_options
from tests.cases.op_matrix import CASES, UNEVEN
from tests.cases.op_special import BODIES, missing_rank
from tests.cases.op_steps import cast_before
from tests.cases.staged_cases import begun_by_some
from tests.simulator.ranks import Context
from tests.simulator.runs import run_on_ranks, with_few_tokens

pytestmark = pytest.mark.full


def by_stores(body: Callable[..., Any], case: Case, *args: Any) -> None:
    run_on_ranks(body, case.world_size, case, *args)


def by_puts(body: Callable[..., Any], case: Case, *args: Any) -> None:
    by_stores(body, with_options(case, **BY_PUTS), *args)


def by_hosts(body: Callable[..., Any], case: Case, *args: Any) -> None:
    # the host exchanges whole blocks
    options = {key: case.options[key] for key in case.options.keys() - ring_cases.SMALL_RINGS} | BY_HOSTS
    by_stores(body, replace(case, options=options), *args)


COVERED = ("expert_major-", "fp32", "fp16", "fp8_", "cast-")
"""How cases begin whose layout, dtype, cast and routing test_covering.py pairs with each transport."""
OF_HOSTS = ring_cases.GRIDS | {
    "halves": Case(num_nodes=2, tokens=UNEVEN, topk=3, num_experts=9, split="mixed", num_steps=4),
    # chunks of two tokens, of which a step of fewer tokens has fewer
    "chunks-of-two": Case(
        world_size=2,
        num_nodes=2,
        num_experts=5,
        max_tokens=260,
        tokens=((9, 3),),
        step_tokens=(None, 11),
        hidden_dim=8,
        num_steps=2,
        routing="some_dropped",
        layout="rank_major",
    ),
}
STEPS = {
    # stores and puts carry the same rings, and test_covering.py pairs both with all else: each case has one of them
    **{
        (by_puts, name): with_few_tokens(case) if name in ring_cases.GRIDS else case
        for name, case in ring_cases.SHAPES.items()
    },
    (by_stores, "flat"): ring_cases.SHAPES_AND_FLAT["flat"],
    **{
        (by_hosts, name): with_few_tokens(case) if name in ring_cases.GRIDS else case for name, case in OF_HOSTS.items()
    },
    **{
        (transport, name): ring_cases.on_two_nodes(with_few_tokens(CASES[name]))
        for transport in (by_stores, by_hosts)
        for name in ring_cases.OF_FOUR_RANKS
        if not name.startswith(COVERED)
    },
}


@pytest.mark.parametrize(
    ("transport", "case"),
    [pytest.param(transport, case, id=f"{transport.__name__}-{name}") for (transport, name), case in STEPS.items()],
)
def test_steps(transport: Callable[..., None], case: Case) -> None:
    transport(run_case, case)


@pytest.mark.parametrize("name", ring_cases.SPECIAL)
@pytest.mark.parametrize("transport", [by_stores, by_puts, by_hosts])
def test_special(transport: Callable[..., None], name: str) -> None:
    body, case = BODIES[name]
    transport(body, ring_cases.of_two_ranks(case))


@pytest.mark.parametrize("name", ["host-checks", "late-in-the-first-step"])
def test_special_where_hosts_exchange(name: str) -> None:
    body, case = BODIES[name]
    by_hosts(body, replace(ring_cases.of_two_ranks(case), tokens=((9,),)))


@pytest.mark.parametrize(
    ("transport", "kernel"),
    [*itertools.product((by_stores, by_puts), ("InterNodeV1", "AsyncLL")), (by_hosts, ring_cases.REPLAYED.kernel)],
)
def test_replayed_steps(transport: Callable[..., None], kernel: str) -> None:
    body, _ = BODIES["graph-rank-major"]
    transport(body, replace(ring_cases.REPLAYED, kernel=kernel))


@pytest.mark.parametrize(
    ("transport", "kernel"),
    [*((by_stores, kernel) for kernel in ring_cases.RING_KERNELS), (by_hosts, ring_cases.CAST_BEFORE.kernel)],
)
def test_scales_of_tokens_that_come_cast(transport: Callable[..., None], kernel: str) -> None:
    transport(cast_before, replace(ring_cases.CAST_BEFORE, kernel=kernel))


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("transport", [by_stores, by_puts])
def test_missing_rank(transport: Callable[..., None], phase: str) -> None:
    transport(missing_rank, replace(ring_cases.ONE_MISSING, tokens=((3, 2, 0, 1),), max_tokens=4), phase)


def test_reset_of_a_step_that_some_have_begun() -> None:
    by_hosts(begun_by_some, Case(world_size=2, num_nodes=2, layout="rank_major", tokens=((3,),)))


def refused(context: Context, case: Case, remedy: str) -> None:
    with Arena(context.group, context.device) as memory, pytest.raises(UnsupportedError, match=remedy):
        make_op(context, case, memory)


@pytest.mark.parametrize(
    ("kernel", "transport", "remedy"),
    [("InterNodeV1", "torch.distributed", "from a manager"), ("InterNode", "nvshmem", "InterNodeV1, which puts")],
)
def test_transports_that_an_op_cannot_use_by_itself(kernel: str, transport: str, remedy: str) -> None:
    options = ring_cases.REPLAYED.options | {"internode_transport": transport}
    by_stores(refused, replace(ring_cases.REPLAYED, kernel=kernel, options=options), remedy)


def test_a_token_crosses_once_to_each_other_node() -> None:
    """Where the flat form sends it to each rank there."""
    case = Case(num_nodes=2, tokens=UNEVEN, topk=6, num_experts=16, layout="rank_major", options=ring_cases.SMALL_RINGS)
    crossed, once, flat = map(sum, zip(*run_on_ranks(ring_cases.lines_that_cross, 4, case).results))
    assert crossed == once < flat
