"""The cases and bodies of tests/multiprocess, fitted to the GPUs of this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tests.cases.op_matrix import CASES, by_world_size
from tests.cases.op_special import BODIES
from tests.cases.ring_cases import OF_FOUR_RANKS, REPLAYED, RING_KERNELS, SHAPES_AND_FLAT, on_two_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cases.op_cases import Case


def fitted(case: Case) -> Case:
    """The case on at most as many ranks as there are GPUs (on its own number where there are none: it is skipped)."""
    return replace(case, world_size=min(case.world_size, torch.cuda.device_count() or case.world_size))


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
    return [case for case in cases if case.world_size <= torch.cuda.device_count()]


def special_cases() -> dict[str, tuple[Callable[..., None], Case]]:
    return {name: (body, fitted(case)) for name, (body, case) in BODIES.items()}
