"""Accepts former names of config fields and handle kwargs, with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from ep_a2a.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T", bound=type)

RENAMED = {"rail": "internode_transport"}
"""Former name of a config field, also a handle kwarg, and its name; the value of both is "auto" by default."""


def with_new_names(values: Mapping[str, Any], stacklevel: int) -> dict[str, Any]:
    """Returns keyword arguments under today's names; warns of each former name.

    `dataclasses.replace` gives the standing value beside the former name, so "auto" beside it is no contradiction.

    Raises:
        ConfigError: a field is given under both names with different values.
    """
    result = {name: value for name, value in values.items() if name not in RENAMED}
    for old in RENAMED.keys() & values.keys():
        new, value = RENAMED[old], values[old]
        if result.get(new, "auto") not in ("auto", value):
            raise ConfigError(f"{new} alone", f"{old}={value!r} beside {new}={result[new]!r}", f"Remove {old}.")
        warnings.warn(f"{old} is now {new}; use that name.", DeprecationWarning, stacklevel=stacklevel)
        result[new] = value
    return result


def accepts_former_names(cls: T) -> T:
    """Lets a dataclass take its former field names as keywords and as attributes."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def take_both(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **(kwargs if kwargs.keys().isdisjoint(RENAMED) else with_new_names(kwargs, stacklevel=3)))

    cls.__init__ = take_both  # type: ignore[misc]
    for old, new in RENAMED.items():
        setattr(cls, old, property(functools.partial(_read, old=old, new=new), doc=f"Former name of {new}."))
    return cls


def _read(config: Any, old: str, new: str) -> Any:
    warnings.warn(f"{old} is now {new}; use that name.", DeprecationWarning, stacklevel=2)
    return getattr(config, new)
