"""The backend's name in vLLM, and how the integration speaks to its users."""

from __future__ import annotations

import logging

BACKEND_NAME = "ep_a2a"

logger = logging.getLogger("vllm.ep_a2a")
"""vLLM configures loggers below its own name only."""

_said: set[str] = set()


def warn_once(message: str) -> None:
    """Says a fallback once in a process."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)
