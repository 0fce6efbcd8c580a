"""Finds out whether a backend can be used on this machine, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ep_a2a.managers.base import All2AllManagerBase
    from ep_a2a.managers.capabilities import Capabilities


def device_problem(capabilities: Capabilities, device_type: str) -> str | None:
    """Returns why a backend cannot work on tensors of this device here, or None."""
    if device_type == "cpu":
        return None if capabilities.runs_on_cpu else f"does not run on CPU: needs {_gpus(capabilities)}"
    if not torch.cuda.is_available():
        return f"no GPU found: needs {_gpus(capabilities)}"
    found = "AMD" if torch.version.hip else "NVIDIA"
    return None if found in capabilities.gpus else f"found {found} GPUs: needs {_gpus(capabilities)}"


def problems(manager: type[All2AllManagerBase], device_type: str) -> tuple[str, ...]:
    """Returns every obstacle to a backend's use here, its library first; () without one. Imports the library.

    Args:
        manager: the backend's class.
        device_type: "cuda" or "cpu".
    """
    library = manager.library
    missing = None if library is None else library.problem()
    if missing is not None and library is not None:
        missing = f"{missing} ({library.install})"
    return tuple(filter(None, (missing, device_problem(manager.capabilities, device_type))))


def _gpus(capabilities: Capabilities) -> str:
    return f"{' or '.join(capabilities.gpus)} GPUs"
