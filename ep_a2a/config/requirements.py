"""The check that a config makes of its values."""

from __future__ import annotations

from ep_a2a.errors import ConfigError


def require(condition: bool, expected: str, got: str) -> None:
    """Raises ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(expected, got)
