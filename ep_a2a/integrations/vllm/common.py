"""The backend's name in vLLM, its logger, the variables that workers read, and the mark of replaced functions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from ep_a2a import env
from ep_a2a.errors import EnvironmentVariableError
from ep_a2a.log_once import log_once

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., Any])

BACKEND_NAME = "ep_a2a"

logger = logging.getLogger("vllm.ep_a2a")
"""vLLM configures loggers below its own name only."""

WORKER_VARIABLES = (env.TIMEOUT_SECS, env.FIRST_TIMEOUT_SECS, env.COUNTERS, env.SHARED_EXPERTS)


def warn_once(message: str) -> None:
    """Logs a warning once per process."""
    log_once(logger, logging.WARNING, message)


def unreadable_variable() -> EnvironmentVariableError | None:
    """The error of the first of WORKER_VARIABLES that cannot be parsed in this process; None if all can."""
    for variable in WORKER_VARIABLES:
        try:
            variable.get()
        except EnvironmentVariableError as error:
            return error
    return None


def replacement(function: F) -> F:
    """Marks a function that replaces one of vLLM's, so that patches are applied once."""
    function.is_replacement = True  # type: ignore[attr-defined]
    return function


def is_replacement(function: Callable[..., Any]) -> bool:
    """Whether `replacement` has marked this function."""
    return getattr(function, "is_replacement", False)
