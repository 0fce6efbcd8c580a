"""Sets up logging of the command line and of its processes: to stderr, at the level of EP_A2A_LOG_LEVEL."""

from __future__ import annotations

import logging

from ep_a2a import env
from ep_a2a.errors import EnvironmentVariableError


def set_up_logging() -> None:
    """Sends the `ep_a2a` logger to stderr.

    Raises:
        EnvironmentVariableError: EP_A2A_LOG_LEVEL names no level.
    """
    level, known = env.LOG_LEVEL.get(), logging.getLevelNamesMapping()
    if level not in known:
        raise EnvironmentVariableError(f"{env.LOG_LEVEL.name} to be one of {', '.join(known)}", repr(level))
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s [%(process)d] %(levelname)s: %(message)s"))
    logger = logging.getLogger("ep_a2a")
    logger.setLevel(level)
    logger.handlers[:] = [handler]
    logger.propagate = False
