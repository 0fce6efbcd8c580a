"""Activates the integration if EP_A2A_BACKEND is set: `register` as vLLM's plugin, `activate` from anywhere."""

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ep_a2a import env
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.managers.registry import check_backend_name

logger = logging.getLogger(__name__)

PATCHED_MODULE = "atom.model_ops.moe"


def register() -> None:
    """Activates the backend where ATOM runs as vLLM's plugin; the entry point in the group vllm.general_plugins.

    Does nothing where ATOM is not installed or EP_A2A_BACKEND is not set.

    Raises:
        UnknownNameError: EP_A2A_BACKEND names no backend.
        UnsupportedError: it names "ep_a2a", and the GPUs are AMD's.
    """
    if env.BACKEND.get() and importlib.util.find_spec("atom") is not None:
        activate()


def activate() -> bool:
    """Makes ATOM's MoE layers of this process use the backend that EP_A2A_BACKEND names. Idempotent; imports no ATOM.

    Must be called in every process of ATOM; `ep_a2a.integrations.atom.serve` and `register` do it.

    Returns:
        Whether EP_A2A_BACKEND is set. Without it ATOM is not changed.

    Raises:
        UnknownNameError: EP_A2A_BACKEND names no backend.
        UnsupportedError: it names "ep_a2a", and the GPUs are AMD's.
    """
    backend = env.BACKEND.get()
    if not backend:
        return False
    check_backend_name(backend)
    if backend == DEFAULT_BACKEND:
        # imports torch, which only this backend must ask for the GPUs' maker
        from ep_a2a.memory.gpus import refuse_other_gpus

        refuse_other_gpus("cuda")
    on_import(PATCHED_MODULE, before=_before_layers, after=_after_layers)
    logger.info("ATOM's MoE layers will use %s, as EP_A2A_BACKEND says", backend)
    return True


def _before_layers() -> None:
    from ep_a2a.integrations.atom.patches import provide_mori

    provide_mori()


def _after_layers(module: object) -> None:
    from ep_a2a.integrations.atom.patches import patch_layers

    patch_layers(module)


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
