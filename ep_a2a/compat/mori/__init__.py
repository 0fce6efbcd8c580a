"""MORI's Python package on our kernels: `import ep_a2a.compat.mori as mori`, or `install()` and then `import mori`.

It has `ops` and `shmem`, with the names, parameters and defaults of amd-mori 1.2.4. docs/mori.md lists what is
equal, different and refused. Functions without a counterpart take any arguments, and raise UnsupportedError. MORI's
other submodules (io, ccl, ir, ...) cannot be imported.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING, Any

from ep_a2a import __version__ as _own_version
from ep_a2a.errors import StateError

if TYPE_CHECKING:
    from types import ModuleType

MORI_VERSION = "1.2.4"
"""The release of amd-mori whose interface this is."""

__version__ = f"{MORI_VERSION}+ep_a2a.{_own_version}"

_LAZY = ("ops", "shmem")
_NAME = "mori"
_replaced: dict[str, ModuleType] = {}


def install(*, replace: bool = False) -> None:
    """Makes `import mori` in this process import this package. Local; a second call does nothing.

    Must be called on every rank before anything imports `mori`: a module that has imported another one keeps it.

    Args:
        replace: also take the name from a MORI that is imported already. Modules that hold that one keep it.

    Raises:
        StateError: another `mori` is imported already.
    """
    present = sys.modules.get(_NAME)
    if present is sys.modules[__name__]:
        return
    if present is not None and not replace:
        raise StateError(
            "no module named mori in this process yet",
            f"one from {getattr(present, '__file__', None)}",
            "Call install() before anything imports mori, or install(replace=True).",
        )
    others = {name: module for name, module in sys.modules.items() if _is_mori(name)}
    # every module, or `import mori.ops` would load the same files a second time under that name
    below = [info.name for info in pkgutil.walk_packages(__path__, f"{__name__}.")]
    modules = {_NAME + name.removeprefix(__name__): importlib.import_module(name) for name in (__name__, *below)}
    for name in others:
        del sys.modules[name]
    _replaced.update(others)
    sys.modules.update(modules)


def uninstall() -> None:
    """Undoes `install`: `import mori` imports the MORI of before, if there was one. Local."""
    if sys.modules.get(_NAME) is not sys.modules[__name__]:
        return
    for name in [name for name in sys.modules if _is_mori(name)]:
        del sys.modules[name]
    sys.modules.update(_replaced)
    _replaced.clear()


def _is_mori(name: str) -> bool:
    return name == _NAME or name.startswith(f"{_NAME}.")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; of MORI it has ops and shmem (docs/mori.md)")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
