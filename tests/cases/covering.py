"""A small set of cases in which every allowed pair of choices occurs: what `make test` runs of the op.

Two choices together find most of what all of them together find, at a fiftieth of the cost.
"""

import functools
import heapq
import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from ep_a2a.config import FP8_DTYPE
from ep_a2a.routing import ROUTINGS
from tests.cases.op_cases import BY_HOSTS, BY_PUTS, Case
from tests.cases.ring_cases import SMALL_RINGS

Pair = tuple[tuple[str, Any], tuple[str, Any]]
STORES, PUTS, STAGED = "rings-by-stores", "rings-by-puts", "staged"
TRANSPORTS: dict[str, dict[str, Any]] = {STORES: {}, PUTS: BY_PUTS, STAGED: BY_HOSTS}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": FP8_DTYPE}
HIDDEN_DIMS = {"fp8_per_1x128": 256, "fp8_blockwise": 256}
BY_GROUPS = ("fp8_per_1x128", "mxfp8", "fp8_static")
"""Casts that differ in how they find a group's scale only, so that they stand for each other in turn."""
NUM_NODES = {2: 2, 3: 3, 4: 2, 5: 5, 6: 2, 7: 7, 8: 2}
RING_KERNELS = ("InterNodeV1", "InterNodeV1LL", "AsyncLL")


class Choice(NamedTuple):
    """One value of everything that is paired."""

    layout: str
    dtype: str
    cast: str
    routing: str
    world_size: int
    transport: str


VALUES: dict[str, tuple[Any, ...]] = {
    "layout": ("compact", "rank_major", "expert_major"),
    "dtype": tuple(DTYPES),
    "cast": ("none", "fp8_per_token", "fp8_per_1x128", "fp8_blockwise", "fp8_direct_cast"),
    "routing": tuple(ROUTINGS),
    "world_size": (1, 2, 3, 4),
    "transport": ("shared-memory", STORES, PUTS, STAGED),
}
IMPOSSIBLE: set[Pair] = {
    # one rank is one node
    *((("world_size", 1), ("transport", transport)) for transport in (STORES, PUTS, STAGED)),
    # tokens that come as fp8 are not cast again
    *((("dtype", "fp8"), ("cast", cast)) for cast in ("fp8_per_token", "fp8_per_1x128")),
}


def pairs_of(choice: Choice) -> set[Pair]:
    """Every two of its values, in the order of the fields."""
    return set(itertools.combinations(choice._asdict().items(), 2))


def allowed_choices(**fewer: tuple[Any, ...]) -> list[Choice]:
    """All that could be run; fewer: values by field, where not all of VALUES are asked for."""
    values = (VALUES | fewer).values()
    return [choice for each in itertools.product(*values) if not pairs_of(choice := Choice(*each)) & IMPOSSIBLE]


@functools.cache
def covering_choices(**fewer: tuple[Any, ...]) -> tuple[Choice, ...]:
    """Choices that together have every allowed pair."""
    return tuple(sorted(_covering(allowed_choices(**fewer)), key=lambda choice: choice.world_size))


@functools.cache
def covering_few_kernels(**fewer: tuple[Any, ...]) -> tuple[tuple[int, Choice], ...]:
    """(number of its kernels, choice): choices that have every allowed pair, of about as few kernels as can be.

    The kernels of a choice depend on all but its routing. So the choices of one routing come first, which cover the
    pairs of all else, and these are repeated with other routings until those are paired with everything, too.
    """
    routings = VALUES["routing"]
    of_one_routing = covering_choices(**fewer, routing=routings[:1])
    repeated = [choice._replace(routing=routing) for choice in of_one_routing for routing in routings]
    return tuple((of_one_routing.index(each._replace(routing=routings[0])), each) for each in _covering(repeated))


def _covering(choices: list[Choice]) -> list[Choice]:
    """Those of the choices that have every pair of all of them: greedily the one with the most new pairs."""
    pairs = [(choice, pairs_of(choice)) for choice in choices]
    covered: set[Pair] = set()
    chosen = []
    # a choice has never more new pairs than it had before, so the first whose number still holds is the best
    heap = [(-len(each), place) for place, (_, each) in enumerate(pairs)]
    heapq.heapify(heap)
    while heap:
        promised, place = heapq.heappop(heap)
        choice, each = pairs[place]
        num_new = len(each - covered)
        if num_new == -promised and num_new:
            chosen.append(choice)
            covered |= each
        elif num_new:
            heapq.heappush(heap, (-num_new, place))
    return chosen


def covering_params(**fewer: tuple[Any, ...]) -> list[Any]:
    """Parameters (choice, number) for pytest."""
    return [
        pytest.param(choice, number, id="-".join(map(str, choice)))
        for number, choice in enumerate(covering_choices(**fewer))
    ]


def case_of(choice: Choice, number: int) -> Case:
    """Two steps of the smallest shape that takes the same path, one of them with a bound for each rank.

    What is not paired changes with the number.
    """
    case = Case(
        world_size=choice.world_size,
        hidden_dim=HIDDEN_DIMS.get(choice.cast, 48),
        topk=3,
        num_experts=2 * choice.world_size + 1,
        max_tokens=8,
        tokens=((5, 3, 0, 2), (0, 6, 1, 2)),
        dtype=DTYPES[choice.dtype],
        layout=choice.layout,
        routing=choice.routing,
        quant_type=BY_GROUPS[number % 3] if choice.cast == BY_GROUPS[0] else choice.cast,
        seed=number,
        split="mixed" if number % 3 == 0 else "",
        step_tokens=("own", None) if number % 2 else (None, "own"),
    )
    if choice.dtype == "fp8":
        case = replace(case, scale_dim=3, scale_dtype=(torch.float32, torch.uint8)[number % 2])
    options: dict[str, Any] = {"local_ids": number // 2 % 2 == 0}
    if choice.transport in TRANSPORTS:
        options |= SMALL_RINGS | TRANSPORTS[choice.transport]
        case = replace(case, num_nodes=NUM_NODES[choice.world_size], kernel=RING_KERNELS[number % len(RING_KERNELS)])
    elif choice.transport == "shared-memory" and number % 2:
        options["flagged_max_tokens"] = 0
    return replace(case, options=options)
