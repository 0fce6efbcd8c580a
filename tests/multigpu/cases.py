"""The cases and bodies of tests/multiprocess, fitted to the GPUs of this machine."""

from collections.abc import Callable
from dataclasses import replace

from tests.cases.covering import STORES, covering_few_kernels
from tests.cases.covering import case_of as covering_case
from tests.cases.op_cases import Case
from tests.cases.op_matrix import CASES, by_world_size
from tests.cases.op_special import BODIES, BY_THE_SIMULATED_CLOCK
from tests.cases.ring_cases import OF_FOUR_RANKS, REPLAYED, RING_KERNELS, SHAPES_AND_FLAT, on_two_nodes
from tests.markers import ranks_on_gpus
from tests.programs.soak import SOAKED


def fitted(case: Case) -> Case:
    """The case on at most as many ranks as there are GPUs, or on its own number where all share one."""
    return replace(case, world_size=ranks_on_gpus(case.world_size))


def op_cases() -> list[tuple[str, Case]]:
    return [(name, fitted(case)) for name, case in by_world_size()]


REPLAYED_RINGS = {kernel: replace(REPLAYED, kernel=kernel) for kernel in RING_KERNELS}


def ring_cases() -> dict[str, Case]:
    """Steps of rings and of the flat form: on two nodes of one GPU, of two, and on other virtual nodes."""
    two = {name: case for name, case in SHAPES_AND_FLAT.items() if case.num_nodes == 2 and case.world_size <= 4}
    return (
        {f"two-{name}": replace(case, world_size=2) for name, case in two.items()}
        | {f"four-{name}": on_two_nodes(CASES[name]) for name in OF_FOUR_RANKS}
        | SHAPES_AND_FLAT
    )


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


def shared_cases() -> dict[str, Case]:
    """What ranks that share a GPU run: all pairs for every number of ranks, nodes, and all cases with eight."""
    pairs = [each for world_size in SHARED_WORLDS for each in shared_choices(world_size)]
    nodes = {f"nodes-{name}": case for name, case in SHAPES_AND_FLAT.items()}
    return dict(pairs) | nodes | {f"eight-{name}": case for name, case in of_eight_ranks()}


def special_cases() -> dict[str, tuple[Callable[..., None], Case]]:
    return {name: (body, fitted(case)) for name, (body, case) in BODIES.items() if body not in BY_THE_SIMULATED_CLOCK}
