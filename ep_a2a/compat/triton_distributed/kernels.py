"""Names of `triton_dist.kernels.nvidia`, and of its module low_latency_all_to_all_v2, that the layer stands on."""

from __future__ import annotations

from typing import Any, NoReturn

from ep_a2a.compat.parameters import remedy_of
from ep_a2a.compat.triton_distributed.contexts import (
    LowlatencyCombineContext,
    LowlatencyDispatchContext,
    create_ep_ll_a2a_ctx,
)
from ep_a2a.compat.triton_distributed.meta import DispatchMetaInfo
from ep_a2a.errors import UnsupportedError

__all__ = [
    "DispatchMetaInfo",
    "LowlatencyCombineContext",
    "LowlatencyDispatchContext",
    "combine_kernel_v2",
    "create_ep_ll_a2a_ctx",
    "dispatch_kernel_v2",
]


class _Kernel:
    """Triton-distributed's kernel of this name. Not supported: launching it raises UnsupportedError."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            "calls of the layer", self.__name__, remedy_of("triton_distributed", f"kernels.{self.__name__}")
        )

    def __getitem__(self, grid: object) -> NoReturn:
        self()


dispatch_kernel_v2 = _Kernel("dispatch_kernel_v2")
combine_kernel_v2 = _Kernel("combine_kernel_v2")
