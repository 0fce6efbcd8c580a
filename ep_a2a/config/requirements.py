"""The check that a config makes of its values."""

from __future__ import annotations

from ep_a2a.errors import ConfigError

HANDLE_KWARG_REMEDY = "Correct the handle kwarg."
"""The remedy of a config's error for those who gave handle kwargs."""


def require(condition: bool, field: str | None, expected: str, got: str) -> None:
    """Raises ConfigError about this field unless the condition holds."""
    if not condition:
        raise ConfigError(expected, got, field=field)
