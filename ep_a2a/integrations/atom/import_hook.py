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
    """Meta-path finder that wraps a module's loader with callbacks."""

    def __init__(self, name: str, before: Callable[[], None], after: Callable[[ModuleType], None]) -> None:
        self.name, self.before, self.after = name, before, after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the other finders' spec of the watched module, its loader wrapped; None for any other module."""
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Watcher) and finder.name == self.name:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Wraps a module's loader: calls back before and after the module is executed."""

    def __init__(self, loader: Any, watcher: _Watcher) -> None:
        self._loader, self._watcher = loader, watcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Creates the module by the wrapped loader."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module by the wrapped loader, between the two callbacks."""
        self._watcher.before()
        self._loader.exec_module(module)
        self._watcher.after(module)
        # only now: a program may catch an error, and import again
        if self._watcher in sys.meta_path:
            sys.meta_path.remove(self._watcher)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
