"""The backend's names in vLLM, its logger, and the mark of replaced functions."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from ep_a2a.log_once import log_once

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., Any])

BACKEND_NAME = "ep_a2a"
BATCHED_NAME = "ep_a2a_low_latency"
"""The same backend with rows in vLLM's batched format."""
NAMES = (BACKEND_NAME, BATCHED_NAME)
VLLM_BACKEND = "allgather_reducescatter"
"""vLLM's default, whose manager every platform can make."""

logger = logging.getLogger("vllm.ep_a2a")
"""vLLM configures loggers below its own name only."""

warn_once = functools.partial(log_once, logger, logging.WARNING)
"""Logs a warning, its one argument, once per process."""


def replacement(function: F) -> F:
    """Marks a function that replaces one of vLLM's, so that patches are applied once."""
    function.is_replacement = True  # type: ignore[attr-defined]
    return function


def is_replacement(function: Callable[..., Any]) -> bool:
    """Whether `replacement` has marked this function."""
    return getattr(function, "is_replacement", False)
