"""Handles by the kwargs they were asked for with: one per key for as long as somebody holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from ep_a2a.errors import ConfigError

Key = tuple[int, tuple[tuple[str, Hashable], ...]]


class Cache:
    """Weak values under a lock: a handle lives as long as a layer keeps it, and the same kwargs find it again.

    The lock is held while a handle is made, because making one is usually collective: two threads then never make
    two handles at a time, and two that ask for the same key get the same one. Threads that ask for *different* new
    handles must do so in the same order on every rank; a lock cannot arrange that between processes.
    """

    def __init__(self) -> None:
        self._handles: WeakValueDictionary[Key, Any] = WeakValueDictionary()
        self._lock = threading.RLock()

    def get_or_create(self, kwargs: Mapping[str, Any], func: Callable[..., Any], index: int = 0) -> Any:
        """The handle made for these kwargs and index, or `func(**kwargs)` where there is none.

        Args:
            kwargs: handle kwargs with hashable values; their order does not matter.
            func: makes a handle (anything that can be referred to weakly); must not return None.
            index: tells apart handles of equal kwargs, one per micro-batch whose steps overlap.

        Raises:
            ConfigError: a value cannot be hashed; the error names the kwarg and its type.
        """
        key = _key(kwargs, index)
        with self._lock:
            handle = self._handles.get(key)
            if handle is None:
                handle = func(**kwargs)
                self._handles[key] = handle
            return handle

    def handles(self) -> list[Any]:
        """Every handle that is alive, oldest first."""
        with self._lock:
            return list(self._handles.values())

    def clear(self) -> None:
        """Forgets all handles; those still held elsewhere stay usable but are not found again."""
        with self._lock:
            self._handles.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._handles)


def _key(kwargs: Mapping[str, Any], index: int) -> Key:
    for name, value in kwargs.items():
        try:
            hash(value)
        except TypeError as error:
            raise ConfigError(
                "handle kwargs with hashable values", f"{name} of type {type(value).__name__}",
                f"Pass {name} as a plain value, for example a number, a string, a dtype or a tuple of such.",
            ) from error  # fmt: skip
    return index, tuple(sorted(kwargs.items(), key=lambda item: item[0]))
