"""Communicators of vLLM's groups, made by our factory: the expert-parallel one carries our manager."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ep_a2a.integrations.vllm.common import BACKEND_NAME, logger
from ep_a2a.integrations.vllm.cpu import patch_runner
from ep_a2a.integrations.vllm.patches import original_communicator_class, patch_prepare_finalize
from ep_a2a.integrations.vllm.worker import patch_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.integrations.vllm.manager import VllmAll2AllManager

VLLM_BACKEND = "allgather_reducescatter"
"""vLLM's default, whose manager every platform can make."""


class CarriesManager:
    """Mixed into the platform's communicator class for the expert-parallel group."""

    _vllm_manager: Any = None
    """vLLM's own, for hidden states."""
    _manager: VllmAll2AllManager | None = None
    _destroyed = False

    @property
    def all2all_manager(self) -> VllmAll2AllManager | None:
        """Made on first access; allocates no device memory."""
        if self._manager is None and not self._destroyed:
            from ep_a2a.integrations.vllm.manager import VllmAll2AllManager

            self._manager = VllmAll2AllManager(self, self._vllm_manager)
        return self._manager

    @all2all_manager.setter
    def all2all_manager(self, manager: VllmAll2AllManager | None) -> None:
        self._manager = manager

    def destroy(self) -> None:
        """Gives back what the manager holds, then what the platform's communicator does. Idempotent."""
        manager, self._manager, self._destroyed = self._manager, None, True
        for one in (manager, self._vllm_manager):
            if one is not None:
                one.destroy()
        super().destroy()  # type: ignore[misc]


def make_communicator(*args: Any, **kwargs: Any) -> Any:
    """The platform's communicator for one of vLLM's groups; arguments are its class's."""
    from vllm.config import get_current_vllm_config_or_none

    original = original_communicator_class()
    config = get_current_vllm_config_or_none()
    is_ep = str(kwargs.get("unique_name", "")).split(":")[0] == "ep"
    if config is None or not is_ep or config.parallel_config.all2all_backend != BACKEND_NAME:
        return original(*args, **kwargs)
    parallel = config.parallel_config
    with _named(parallel, VLLM_BACKEND):
        communicator = original(*args, **kwargs)
    communicator.all2all_backend = BACKEND_NAME
    if not (communicator.use_all2all and parallel.enable_expert_parallel):
        return communicator
    patch_prepare_finalize()
    patch_worker()
    if communicator.device.type == "cpu":
        patch_runner()
    manager = communicator.__dict__.pop("all2all_manager", None)
    communicator.__class__ = type(f"EpA2A{original.__name__}", (CarriesManager, original), {})
    communicator._vllm_manager = manager
    logger.debug("the communicator of %s carries the ep_a2a manager", communicator.unique_name)
    return communicator


@contextlib.contextmanager
def _named(parallel: Any, name: str) -> Iterator[None]:
    """While the platform's class is built it must know the backend's name: it makes that backend's manager at once."""
    chosen, parallel.all2all_backend = parallel.all2all_backend, name
    try:
        yield
    finally:
        parallel.all2all_backend = chosen
