"""Triton-distributed's low-latency EP layer on this package's kernels, with its names, arguments and shapes."""

from ep_a2a.compat.triton_distributed.contexts import (
    DispatchMetaInfo,
    LowlatencyCombineContext,
    LowlatencyDispatchContext,
    create_ep_ll_a2a_ctx,
)
from ep_a2a.compat.triton_distributed.layer import EPLowLatencyAllToAllLayer

__all__ = [
    "DispatchMetaInfo",
    "EPLowLatencyAllToAllLayer",
    "LowlatencyCombineContext",
    "LowlatencyDispatchContext",
    "create_ep_ll_a2a_ctx",
]
