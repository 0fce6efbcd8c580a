"""Ranks of different versions of this package cannot work together; every first meeting of theirs says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a import config
from ep_a2a.errors import ConfigMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION_KEY = "wire_format_version"
UNKNOWN = "an older one, which does not say"


def with_version(values: dict[str, Any]) -> dict[str, Any]:
    """A rank's message with the version of its wire format."""
    return {VERSION_KEY: config.WIRE_FORMAT_VERSION, **values}


def require_one_version(messages: Sequence[Any], ranks: Sequence[int] | None = None) -> None:
    """Returns where all ranks have the same wire format; to be called before anything else of a message is looked at.

    Args:
        messages: of `with_version`, by rank; anything else is of a version that did not have it.
        ranks: whose they are; None counts from 0.

    Raises:
        ConfigMismatchError: they have not; the error names versions and ranks.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, message in zip(range(len(messages)) if ranks is None else ranks, messages):
        version = str(message.get(VERSION_KEY, UNKNOWN)) if isinstance(message, dict) else UNKNOWN
        ranks_of.setdefault(version, []).append(rank)
    if len(ranks_of) > 1:
        found = "; ".join(f"{version} on ranks {of}" for version, of in ranks_of.items())
        raise ConfigMismatchError(
            "one wire format version on all ranks", found, "Install the same version of ep-a2a on all hosts."
        )
