"""Expert-parallel all-to-all for MoE inference.

Importing this costs nothing: every name is loaded on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig as EpDispatchCombineConfig
    from ep_a2a.managers.make_op import make_op as make_op
    from ep_a2a.managers.registry import available_backends as available_backends
    from ep_a2a.managers.registry import create_manager as create_manager
    from ep_a2a.parallel.state import destroy_dist_env as destroy_dist_env
    from ep_a2a.parallel.state import get_ep_group as get_ep_group
    from ep_a2a.parallel.state import init_dist_env as init_dist_env
    from ep_a2a.parallel.survivors import Survivors as Survivors
    from ep_a2a.parallel.survivors import survivors as survivors

__version__ = "0.2.0"

_MODULE_OF = {
    "EpDispatchCombineConfig": "ep_a2a.config",
    "available_backends": "ep_a2a.managers.registry",
    "create_manager": "ep_a2a.managers.registry",
    "destroy_dist_env": "ep_a2a.parallel.state",
    "get_ep_group": "ep_a2a.parallel.state",
    "make_op": "ep_a2a.managers.make_op",
    "init_dist_env": "ep_a2a.parallel.state",
    "Survivors": "ep_a2a.parallel.survivors",
    "survivors": "ep_a2a.parallel.survivors",
}
_SUBMODULES = ("ops", "shmem", "errors", "config", "quantization", "routing", "reference", "testing")

__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"ep_a2a.{name}")
    raise AttributeError(f"module 'ep_a2a' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF, *_SUBMODULES])
