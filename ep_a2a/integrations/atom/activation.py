"""Activates the integration if EP_A2A_BACKEND is set: `register` as vLLM's plugin, `activate` from anywhere."""

from __future__ import annotations

import importlib.util
import logging

from ep_a2a import env
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.integrations.atom.import_hook import on_import
from ep_a2a.managers.registry import check_backend_name

logger = logging.getLogger(__name__)

PATCHED_MODULE = "atom.model_ops.moe"


def register() -> None:
    """Activates the backend where ATOM runs as vLLM's plugin; the entry point in the group vllm.general_plugins.

    Does nothing where ATOM is not installed or EP_A2A_BACKEND is not set.

    Raises:
        UnknownNameError: EP_A2A_BACKEND names no backend.
        UnsupportedError: it names "ep_a2a", and the GPUs are AMD's.
    """
    if env.BACKEND.get() and importlib.util.find_spec("atom") is not None:
        activate()


def activate() -> bool:
    """Makes ATOM's MoE layers of this process use the backend that EP_A2A_BACKEND names. Idempotent; imports no ATOM.

    Must be called in every process of ATOM; `ep_a2a.integrations.atom.serve` and `register` do it.

    Returns:
        Whether EP_A2A_BACKEND is set. Without it ATOM is not changed.

    Raises:
        UnknownNameError: EP_A2A_BACKEND names no backend.
        UnsupportedError: it names "ep_a2a", and the GPUs are AMD's.
    """
    backend = env.BACKEND.get()
    if not backend:
        return False
    check_backend_name(backend)
    if backend == DEFAULT_BACKEND:
        # imports torch, which only this backend must ask for the GPUs' maker
        from ep_a2a.memory.gpu_maker import refuse_other_gpus

        refuse_other_gpus("cuda")
    on_import(PATCHED_MODULE, before=_before_layers, after=_after_layers)
    logger.info("ATOM's MoE layers will use %s, as EP_A2A_BACKEND says", backend)
    return True


def _before_layers() -> None:
    from ep_a2a.integrations.atom.patches import provide_mori

    provide_mori()


def _after_layers(module: object) -> None:
    from ep_a2a.integrations.atom.patches import patch_layers

    patch_layers(module)
