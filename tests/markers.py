"""Skips that say why."""

from __future__ import annotations

import pytest
import torch


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skips a test where fewer than `count` GPUs are visible."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"needs {count} GPUs, found {found}")
