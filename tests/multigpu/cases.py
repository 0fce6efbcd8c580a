"""The cases and bodies of tests/multiprocess, fitted to the GPUs of this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tests.op_matrix import by_world_size
from tests.op_special import BODIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.op_cases import Case


def fitted(case: Case) -> Case:
    """The case on at most as many ranks as there are GPUs (on its own number where there are none: it is skipped)."""
    return replace(case, world_size=min(case.world_size, torch.cuda.device_count() or case.world_size))


def op_cases() -> list[tuple[str, Case]]:
    return [(name, fitted(case)) for name, case in by_world_size()]


def special_cases() -> dict[str, tuple[Callable[..., None], Case]]:
    return {name: (body, fitted(case)) for name, (body, case) in BODIES.items()}
