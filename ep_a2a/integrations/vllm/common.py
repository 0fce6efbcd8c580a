"""The backend's names in vLLM, and its logger."""

import functools
import logging

from ep_a2a.log_once import log_once

BACKEND_NAME = "ep_a2a"
BATCHED_NAME = "ep_a2a_low_latency"
"""The same backend with rows in vLLM's batched format."""
NAMES = (BACKEND_NAME, BATCHED_NAME)
VLLM_BACKEND = "allgather_reducescatter"
"""vLLM's default, whose manager every platform can make."""

logger = logging.getLogger("vllm.ep_a2a")
"""vLLM configures loggers below its own name only."""

warn_once = functools.partial(log_once, logger, logging.WARNING)
"""Logs a warning, its one argument, once per process."""
