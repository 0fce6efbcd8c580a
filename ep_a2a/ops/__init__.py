"""MORI's `mori.ops`, by the same names; the modules below are the host side of the ops.

The op itself needs Triton and is loaded on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig as EpDispatchCombineConfig
    from ep_a2a.config import EpDispatchCombineKernelType as EpDispatchCombineKernelType
    from ep_a2a.ops.op import EpDispatchCombineOp as EpDispatchCombineOp

_MODULE_OF = {
    "EpDispatchCombineConfig": "ep_a2a.config",
    "EpDispatchCombineKernelType": "ep_a2a.config",
    "EpDispatchCombineOp": "ep_a2a.ops.op",
}

__all__ = ["EpDispatchCombineConfig", "EpDispatchCombineKernelType", "EpDispatchCombineOp"]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
