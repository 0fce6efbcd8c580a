"""Warnings about options that an op accepts because the interface has them, and ignores."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING

from ep_a2a.log_once import log_once

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig

logger = logging.getLogger(__name__)

KERNEL_FIELDS = (
    "launch",
    "max_sms",
    "timeout_secs",
    "first_timeout_secs",
    "flagged_max_tokens",
    "expert_alignment",
    "compiled_calls",
    "chunk_tokens",
    "ring_chunks",
    "internode_transport",
)
"""Fields of the config that only this package's kernels read."""


def warn_of_fields(op_name: str, config: EpDispatchCombineConfig, taken: frozenset[str]) -> None:
    """Warn of fields in KERNEL_FIELDS that differ from their default and are not in `taken`."""
    fields = (each for each in dataclasses.fields(config) if each.name in KERNEL_FIELDS and each.name not in taken)
    changed = tuple(each.name for each in fields if getattr(config, each.name) != each.default)
    if changed:
        warn_once(op_name, changed)


def warn_of_warps(given: str) -> None:
    """Warn of a number of warps for kernels between nodes, whose number is fixed."""
    log_once(logger, logging.WARNING, f"without effect between nodes: {given}; those kernels have a fixed number")


@functools.cache
def warn_once(op_name: str, names: tuple[str, ...]) -> None:
    """Warn once per process: every layer and every step passes the same arguments."""
    text = "without effect on %s: %s; the backend 'ep_a2a' goes by them"
    logger.warning(text, op_name, ", ".join(names), stacklevel=2)
