"""Sets up logging of the command line and of its processes: to stderr, at the level of EP_A2A_LOG_LEVEL."""

from __future__ import annotations

import logging

from ep_a2a import env
from ep_a2a.commands.messages import is_verbose
from ep_a2a.errors import EnvironmentVariableError


def log_level() -> str:
    """Returns the level's name: EP_A2A_LOG_LEVEL's, else INFO with --verbose.

    Raises:
        EnvironmentVariableError: EP_A2A_LOG_LEVEL names no level.
    """
    level, known = env.LOG_LEVEL.get(), logging.getLevelNamesMapping()
    if level not in known:
        raise EnvironmentVariableError(f"{env.LOG_LEVEL.name} to be one of {', '.join(known)}", repr(level))
    return "INFO" if is_verbose() and not env.other_variable(env.LOG_LEVEL.name) else level


def set_up_logging(level: str | None = None) -> None:
    """Sends the `ep_a2a` logger to stderr.

    Args:
        level: its name; None takes log_level().

    Raises:
        EnvironmentVariableError: as `log_level`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s [%(process)d] %(levelname)s: %(message)s"))
    logger = logging.getLogger("ep_a2a")
    logger.setLevel(level or log_level())
    logger.handlers[:] = [handler]
    logger.propagate = False


def check_environment() -> None:
    """Reads every variable of this package, so that one that cannot be used ends a command before it starts.

    Raises:
        EnvironmentVariableError: one cannot be used.
    """
    for variable in env.VARIABLES:
        variable.get()
    log_level()
