"""Ranks of the tests of this folder are on GPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases.op_cases import Case
from tests.markers import ranks_on_gpus

OWN_GPUS = {"torch.distributed": "NCCL", "nvshmem": "NVSHMEM"}
"""Transports between nodes that need a GPU for each rank, and why."""


def what_needs_own_gpus(args: tuple[Any, ...]) -> str | None:
    """What needs a GPU for each rank, as cases or names of transports among a body's arguments say."""
    named = (each.options.get("internode_transport") if isinstance(each, Case) else each for each in args)
    return next((OWN_GPUS[each] for each in named if isinstance(each, str) and each in OWN_GPUS), None)


@pytest.fixture
def ranks(_pools: Any) -> Callable[..., list[Any]]:
    """As of tests/conftest.py, on GPUs. Skips a test of more ranks than GPUs, unless all may share a single one."""

    def run(
        function: Callable[..., Any], world_size: int, *args: Any, device: str = "cuda", **kwargs: Any
    ) -> list[Any]:
        found, what = torch.cuda.device_count(), what_needs_own_gpus(args)
        if what and found < world_size:
            pytest.skip(f"{what} needs {world_size} GPUs, a rank on each, found {found}")
        if ranks_on_gpus(world_size) < world_size:
            pytest.skip(f"needs {world_size} GPUs, or one for all ranks, found {found}")
        return _pools.run(function, world_size, *args, device="cuda", **kwargs)

    return run
