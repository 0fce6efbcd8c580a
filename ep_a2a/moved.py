"""Import paths of version 0.1 that lead to today's modules, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType

MOVED = {
    "ep_a2a.bench": "ep_a2a.commands.bench",
    "ep_a2a.communicator": "ep_a2a.parallel.communicator",
    "ep_a2a.compat.ep_low_latency": "ep_a2a.compat.triton_distributed",
    "ep_a2a.config_file": "ep_a2a.config.file",
    "ep_a2a.doctor": "ep_a2a.commands.doctor",
    "ep_a2a.group_coordinator": "ep_a2a.parallel.group_coordinator",
    "ep_a2a.kernels.base_op": "ep_a2a.ops.base",
    "ep_a2a.kernels.counted": "ep_a2a.telemetry.counters",
    "ep_a2a.kernels.op": "ep_a2a.ops.op",
    "ep_a2a.managers.cache": "ep_a2a.managers.base",
    "ep_a2a.managers.handle_kwargs": "ep_a2a.config.handle_kwargs",
    "ep_a2a.memory.allocate": "ep_a2a.memory.arena",
    "ep_a2a.parallel_state": "ep_a2a.parallel.state",
    "ep_a2a.profiling": "ep_a2a.telemetry",
    "ep_a2a.simulation": "ep_a2a.commands.simulation",
}
"""Old path to new; modules below an old package are found below the new one."""


def new_path(name: str) -> str | None:
    """Today's path of a module that has moved, or None."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        if target := MOVED.get(".".join(parts[:length])):
            return ".".join((target, *parts[length:]))
    return None


class MovedFinder(MetaPathFinder):
    """Finds modules by their old paths; comes first, since a moved package would find its old submodules twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec whose loader answers with the module at the new path; None for any other name."""
        moved_to = new_path(fullname) if fullname.startswith("ep_a2a.") else None
        found = None if moved_to is None else importlib.util.find_spec(moved_to)
        if moved_to is None or found is None:
            return None
        spec = ModuleSpec(fullname, _MovedLoader(moved_to), origin=found.origin)
        spec.submodule_search_locations = None if found.submodule_search_locations is None else []
        return spec


class _MovedLoader(Loader):
    def __init__(self, moved_to: str) -> None:
        self._moved_to = moved_to

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module at the new path in the old one's place, which import then returns."""
        import sys

        warnings.warn(
            f"{module.__name__} has moved to {self._moved_to}; import it from there.", DeprecationWarning, stacklevel=2
        )
        sys.modules[module.__name__] = importlib.import_module(self._moved_to)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the new module, for `python -m` with an old path."""
        spec = importlib.util.find_spec(self._moved_to)
        return None if spec is None or spec.loader is None else spec.loader.get_code(self._moved_to)  # type: ignore[attr-defined]
