"""MORI's Python package on our kernels: `import ep_a2a.compat.mori as mori`, or `install()` and then `import mori`.

It has `ops` and `shmem`, with the names, parameters and defaults of amd-mori 1.2.4. docs/mori.md lists what is
equal, different and refused. Functions without a counterpart take any arguments, and raise UnsupportedError. MORI's
other submodules (io, ccl, ir, ...) cannot be imported.
"""

import importlib
from typing import Any

from ep_a2a import __version__ as _own_version
from ep_a2a.compat import installation

MORI_VERSION = "1.2.4"
"""The release of amd-mori whose interface this is."""

__version__ = f"{MORI_VERSION}+ep_a2a.{_own_version}"

_LAZY = ("ops", "shmem")
_NAME = "mori"


def install(*, replace: bool = False) -> None:
    """Calls `ep_a2a.compat.install("mori", replace=replace)`."""
    installation.install(_NAME, replace=replace)


def uninstall() -> None:
    """Calls `ep_a2a.compat.uninstall("mori")`."""
    installation.uninstall(_NAME)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        installation.refuse_name(_NAME, name)
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
