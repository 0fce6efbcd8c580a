"""The variables that workers read: refused early where they cannot be read, and on all ranks together."""

from __future__ import annotations

from ep_a2a import env
from ep_a2a.errors import EnvironmentVariableError

VARIABLES = (env.TIMEOUT_SECS, env.FIRST_TIMEOUT_SECS, env.COUNTERS, env.SHARED_EXPERTS)


def unreadable_setting() -> EnvironmentVariableError | None:
    """Why one of them cannot be read in this process, if so."""
    for variable in VARIABLES:
        try:
            variable.get()
        except EnvironmentVariableError as error:
            return error
    return None
