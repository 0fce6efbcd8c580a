"""The checks of values that callers give: integers, seconds, and what a config wants of its fields. Needs no torch."""

import contextlib
import numbers
import operator
from typing import Any

from ep_a2a import env
from ep_a2a.errors import ConfigError, EpA2AError, shown

HANDLE_KWARG_REMEDY = "Correct the handle kwarg."
"""The remedy of a config's error for those who gave handle kwargs."""


MAX_INTEGER = (1 << 31) - 1
"""The largest number that kernels take."""
MAX_BYTES = (1 << 63) - 1


def checked_integer(
    name: str, value: Any, minimum: int, maximum: int = MAX_INTEGER, kind: type[EpA2AError] = ConfigError
) -> int:
    """Returns an integer of any type (numpy's, say) as an int.

    Raises:
        kind: it is less than `minimum` or more than `maximum`, or no integer; a bool is none, nor one of numpy's.
    """
    number = value if type(value) is int else None
    if number is None and not _is_bool(value):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if number is None or number < minimum:
        raise kind(f"to be an integer >= {minimum}", shown(value), field=name)
    if number > maximum:
        raise kind(f"<= {maximum}", shown(value), field=name)
    return number


def checked_seconds(name: str, value: Any) -> float:
    """Returns a bound of waits; raises ConfigError unless it is a number above 0 that fits the kernels' clock."""
    is_number = isinstance(value, numbers.Real) and not _is_bool(value)
    if is_number and 0 < value <= env.MAX_TIMEOUT_SECS:
        return float(value)
    expected = f"to be a number of seconds above 0, at most {env.MAX_TIMEOUT_SECS:g}"
    raise ConfigError(expected, shown(value), field=name)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def require(condition: bool, field: str | None, expected: str, got: str) -> None:
    """Raises ConfigError about this field unless the condition holds."""
    if not condition:
        raise ConfigError(expected, got, field=field)
