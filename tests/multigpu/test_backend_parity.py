"""All backends on GPUs: the bodies of tests/multiprocess, in sizes that every library has kernels for."""

from typing import Any

import pytest
import torch

from ep_a2a.config.file import DEFAULT_BACKEND
from tests.cases import parity_cases
from tests.cases.parity_cases import pairs, reason_against

HIDDEN_DIM = 2048
WORLD_SIZES = (2, 4)
"""Numbers of ranks that every library takes."""


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("name", "layout"), pairs())
def test_parity(ranks: Any, name: str, layout: str, world_size: int) -> None:
    reason = reason_against(name, layout, "cuda")
    num_gpus = torch.cuda.device_count()
    if reason is None and num_gpus < world_size and (num_gpus > 1 or name != DEFAULT_BACKEND):
        reason = f"{name} needs {world_size} GPUs, a rank on each, found {num_gpus}"
    if reason is not None:
        pytest.skip(reason)
    ranks(parity_cases.run_backend, world_size, name, layout, HIDDEN_DIM)
