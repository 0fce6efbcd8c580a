"""Skips that say why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skips a test where fewer than `count` GPUs are visible."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"needs {count} GPUs, found {found}")


def first_is_quick(cases: Iterable[tuple[str, Any]]) -> list[Any]:
    """Parameters by id, for cases that differ little: `make test` runs the first, `make test-all` all of them."""
    return [pytest.param(each, id=name, marks=[pytest.mark.full][:number]) for number, (name, each) in enumerate(cases)]
