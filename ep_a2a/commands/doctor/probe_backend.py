"""Prints what a backend declares, or what its library says, as JSON. Runs as a program, since both may be broken.

    probe_backend.py FOLDER NAME declared    what its manager declares: fields of system_info.Backend
    probe_backend.py FOLDER NAME library     the library's version, and `problem` where it cannot be used

FOLDER is the folder of the package ep_a2a. Only the second form imports the library, so that the declaration is known
even where the import crashes or hangs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ep_a2a.managers.base import All2AllManagerBase
    from ep_a2a.managers.external.libraries import Library


def facts(name: str, what: str) -> dict[str, Any]:
    """Returns the requested facts; with `problem` where they cannot be found out."""
    try:
        from ep_a2a.managers.registry import manager_type

        manager = manager_type(name)
        if manager is None or manager.library is None:
            return {"problem": "it declares no library"}
        return _library(manager.library) if what == "library" else _declared(manager, manager.library)
    except BaseException as error:  # noqa: BLE001 - whatever a broken library raises is the answer
        return {"problem": f"{type(error).__name__}: {error}"}


def _declared(manager: type[All2AllManagerBase], library: Library) -> dict[str, Any]:
    return {
        "library": library.distribution,
        "install": library.install,
        "kernel": manager.kernel_for(1)[0],
        "kernel_between_nodes": manager.kernel_for(2)[0],
        "capabilities": dataclasses.asdict(manager.capabilities),
    }


def _library(library: Library) -> dict[str, Any]:
    return {"version": library.version, "problem": library.problem() or ""}


def _import_package(folder: str) -> None:
    """Makes `import ep_a2a` give the package in `folder`, as in the process that asks, whatever the import path has."""
    spec = importlib.util.spec_from_file_location(
        "ep_a2a", f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {folder}")
    module = sys.modules["ep_a2a"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _import_package(sys.argv[1])
    sys.stdout.write(f"\nep_a2a_facts:{json.dumps(facts(*sys.argv[2:]))}\n")
