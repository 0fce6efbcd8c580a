"""The cases and bodies of tests/multiprocess, fitted to the GPUs of this machine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.cases.covering import STORES, covering_few_kernels
from tests.cases.covering import case_of as covering_case
from tests.cases.op_cases import Case
from tests.cases.op_matrix import CASES, UNEVEN, by_world_size
from tests.cases.op_special import BODIES, BY_THE_SIMULATED_CLOCK
from tests.cases.ring_cases import (
    OF_FOUR_RANKS,
    REPLAYED,
    RING_KERNELS,
    SHAPES_AND_FLAT,
    SMALL_RINGS,
    on_two_nodes,
    rings,
)
from tests.markers import ranks_on_gpus
from tests.programs.soak import SOAKED


def fitted(case: Case) -> Case:
    """The case on at most as many ranks as there are GPUs, or on its own number where all share one."""
    return replace(case, world_size=ranks_on_gpus(case.world_size))


def op_cases() -> list[tuple[str, Case]]:
    return [(name, fitted(case)) for name, case in by_world_size()]


def on_two_gpus(cases: dict[str, Case]) -> dict[str, Case]:
    """Those of two nodes, with one GPU in each."""
    return {
        name: replace(case, world_size=2)
        for name, case in cases.items()
        if case.num_nodes == 2 and case.world_size <= 4
    }


def ring_cases() -> list[Case]:
    """All cases of rings for which this machine has GPUs."""
    replayed = [replace(REPLAYED, kernel=kernel) for kernel in RING_KERNELS]
    cases = [
        *on_two_gpus(SHAPES_AND_FLAT).values(),
        *SHAPES_AND_FLAT.values(),
        *(on_two_nodes(CASES[name]) for name in OF_FOUR_RANKS),
        *replayed,
    ]
    return [case for case in cases if case.world_size == ranks_on_gpus(case.world_size)]


SHARED_WORLDS = tuple(range(2, 9))
"""Numbers of ranks that share one GPU."""
ON_SHARED_GPUS = ("shared-memory", STORES)
"""Transports that need neither NCCL nor NVSHMEM."""


def shared_choices(world_size: int) -> list[tuple[str, Case]]:
    """Cases of so many ranks in which every allowed pair of all other choices occurs."""
    # the number of ranks is the same in all of them, so that they are the same for every number
    any_size = covering_few_kernels(world_size=SHARED_WORLDS[:1], transport=ON_SHARED_GPUS)
    choices = [(number, choice._replace(world_size=world_size)) for number, choice in any_size]
    # what is not paired changes with the number of ranks, too
    return [("-".join(map(str, choice)), covering_case(choice, number + world_size)) for number, choice in choices]


def soaked_sizes() -> dict[int, Case]:
    """Steps of self-checking round trips of eight ranks, by tokens per rank: with and without dependent launches."""
    plain = replace(SOAKED["flagged"], world_size=8)
    sizes = {size: replace(plain, max_tokens=size) for size in (1, 4, 16, 32, 63, 64, 128, 256, 512)}
    return {size: replace(case, tokens=((size,),), num_steps=1) for size, case in sizes.items()}


def of_eight_ranks() -> list[tuple[str, Case]]:
    """All cases of the op, with eight ranks."""
    return [(name, replace(case, world_size=8)) for name, case in by_world_size()]


GRIDS = ((2, 2), (4, 2), (2, 4))
"""(nodes, ranks of each) of virtual nodes."""
ON_NODES: dict[str, dict[str, Any]] = {
    "rings": {"layout": "rank_major", "routing": "out_of_range", "options": SMALL_RINGS},
    "whole-steps": {"kernel": "InterNodeV1LL", "layout": "compact", "options": rings(64, 1, 3)},
    "halves-expert_major-cast": {
        "kernel": "AsyncLL",
        "layout": "expert_major",
        "split": "mixed",
        "hidden_dim": 256,
        "options": SMALL_RINGS,
        "quant_type": "fp8_blockwise",
    },
    "biases": {"layout": "rank_major", "num_biases": 2, "options": SMALL_RINGS},
    "flat": {"kernel": "InterNode", "layout": "compact"},
}


def on_virtual_nodes() -> list[tuple[str, Case]]:
    """Cases of rings, and of the flat form, on every grid of virtual nodes."""
    return [
        (
            f"{num_nodes}x{per_node}-{name}",
            Case(
                world_size=num_nodes * per_node,
                num_nodes=num_nodes,
                num_experts=2 * num_nodes * per_node + 1,
                topk=3,
                tokens=UNEVEN,
                **form,
            ),
        )
        for num_nodes, per_node in GRIDS
        for name, form in ON_NODES.items()
    ]


def shared_cases() -> dict[str, Case]:
    """What ranks that share a GPU run: all pairs for every number of ranks, nodes, and all cases with eight."""
    pairs = [each for world_size in SHARED_WORLDS for each in shared_choices(world_size)]
    nodes = {f"nodes-{name}": case for name, case in on_virtual_nodes()}
    return dict(pairs) | nodes | {f"eight-{name}": case for name, case in of_eight_ranks()}


def special_cases() -> dict[str, tuple[Callable[..., None], Case]]:
    return {name: (body, fitted(case)) for name, (body, case) in BODIES.items() if body not in BY_THE_SIMULATED_CLOCK}
