"""Skips that say why."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch


def ranks_on_gpus(wanted: int) -> int:
    """The ranks of a test: a GPU for each of several GPUs' ranks at most; all ranks share a single GPU."""
    found = torch.cuda.device_count()
    return min(wanted, found) if found > 1 else wanted


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skips a test of `count` ranks where there are fewer GPUs, unless there is one, which all share."""
    found = torch.cuda.device_count()
    reason = f"needs {count} GPUs, or one for all ranks, found {found}"
    return pytest.mark.skipif(found == 0 or ranks_on_gpus(count) < count, reason=reason)


def needs_own_gpus(count: int, what: str = "NCCL") -> pytest.MarkDecorator:
    """Skips a test where ranks would share a GPU, which `what` does not allow."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"{what} needs {count} GPUs, a rank on each, found {found}")


def first_is_quick(cases: Iterable[tuple[str, Any]]) -> list[Any]:
    """Parameters by id, for cases that differ little: `make test` runs the first, `make test-all` all of them."""
    return [pytest.param(each, id=name, marks=[pytest.mark.full][:number]) for number, (name, each) in enumerate(cases)]
