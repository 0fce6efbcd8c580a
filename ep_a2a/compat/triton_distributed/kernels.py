"""Names of `triton_dist.kernels.nvidia`, and of its module low_latency_all_to_all_v2, that the layer stands on."""

from ep_a2a.compat.parameters import refusals
from ep_a2a.compat.triton_distributed.contexts import (
    DispatchMetaInfo,
    LowlatencyCombineContext,
    LowlatencyDispatchContext,
    create_ep_ll_a2a_ctx,
)

__all__ = ["DispatchMetaInfo", "LowlatencyCombineContext", "LowlatencyDispatchContext", "create_ep_ll_a2a_ctx"]

globals().update(refusals("triton_distributed", "kernels"))
