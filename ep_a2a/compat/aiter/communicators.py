"""AITER's communicators by their names (`base_device_communicator` and `communicator_cuda`)."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ep_a2a.compat.aiter.managers import make_manager
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.log_once import log_once
from ep_a2a.managers import base
from ep_a2a.managers.base import All2AllManagerBase
from ep_a2a.parallel.communicator import DeviceCommunicator as DeviceCommunicatorBase

__all__ = ["All2AllManagerBase", "Cache", "CudaCommunicator", "DeviceCommunicatorBase"]

logger = logging.getLogger(__name__)


class Cache(base.Cache):
    """AITER's and vLLM's cache of handles, by kwargs."""

    def get_or_create(  # type: ignore[override]
        self, kwargs: Mapping[str, Any], func: Callable[..., Any], index: int = 0
    ) -> Any:
        """Returns the open handle made for these kwargs and this index, or `func(**kwargs)` where there is none.

        Args:
            kwargs: of `func`, by hashable values.
            func: makes a handle, which must allow weak references and not be None.
            index: handles whose steps overlap have different ones.
        """
        return super().get_or_create((frozenset(kwargs.items()), index), lambda: func(**kwargs))


class CudaCommunicator(DeviceCommunicatorBase):
    """AITER's communicator: handles of its manager have MORI's interface. Its backend "mori" is this package's own."""

    default_backend = "mori"

    def _make_manager(self) -> All2AllManagerBase:
        if self.all2all_backend != self.default_backend:
            return make_manager(self.all2all_backend, self.cpu_group)
        log_once(
            logger,
            logging.INFO,
            "all2all_backend 'mori' of AITER is ep_a2a's own op here; 'mori_high_throughput' would be AMD's MORI",
        )
        return make_manager(DEFAULT_BACKEND, self.cpu_group)
