"""Runs callbacks around the import of another package's module, without importing that module."""

from __future__ import annotations

import importlib.abc
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def on_import(name: str, *, before: Callable[[], None], after: Callable[[ModuleType], None]) -> None:
    """Calls `before()` and `after(module)` around the first execution of module `name` that ends well.

    `before` is called again where an execution has raised. If the module is imported already, both are called now. Each
    name is watched once: later callbacks are dropped.
    """
    present = sys.modules.get(name)
    if present is not None:
        before()
        after(present)
    elif not any(isinstance(finder, _Watcher) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(name, before, after))


class _Watcher(importlib.abc.MetaPathFinder):
    """Meta-path finder that puts callbacks around a module's execution."""

    def __init__(self, name: str, before: Callable[[], None], after: Callable[[ModuleType], None]) -> None:
        self.name, self.before, self.after = name, before, after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the other finders' spec of the watched module, its loader changed; None for any other module."""
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        execute = loader.exec_module

        def execute_watched(module: ModuleType) -> None:
            self.before()
            execute(module)
            self.after(module)
            # only now: a program may catch an error, and import again
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = execute_watched
