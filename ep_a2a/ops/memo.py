"""What follows from a call's arguments, kept for the next call like it: a step then costs little host time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

MAX_REMEMBERED = 4096
T = TypeVar("T")
_NOTHING: Any = object()


class Remembered(Generic[T]):
    """Results by key; all are forgotten when there are too many."""

    def __init__(self) -> None:
        self._found: dict[Hashable, T] = {}

    def of(self, key: Hashable, find: Callable[[], T]) -> T:
        """What `find` returned for this key when it was first asked for; what it raises is not remembered."""
        found: T = self._found.get(key, _NOTHING)
        if found is _NOTHING:
            found = find()
            if len(self._found) >= MAX_REMEMBERED:
                self._found.clear()
            self._found[key] = found
        return found

    def forget(self) -> None:
        """Everything is found anew."""
        self._found.clear()
