"""The environment variables that an engine's workers read when their layers are built."""

from __future__ import annotations

from ep_a2a import env
from ep_a2a.errors import EnvironmentVariableError

WORKER_VARIABLES = (env.TIMEOUT_SECS, env.FIRST_TIMEOUT_SECS, env.COUNTERS, env.SHARED_EXPERTS)


def unreadable_variable() -> EnvironmentVariableError | None:
    """The error of the first of WORKER_VARIABLES that cannot be parsed in this process; None if all can."""
    for variable in WORKER_VARIABLES:
        try:
            variable.get()
        except EnvironmentVariableError as error:
            return error
    return None
