"""`mori.ops`."""

from ep_a2a.compat.mori.ops.dispatch_combine import EpDispatchCombineOp
from ep_a2a.compat.mori.ops.local_expert_count import launch_local_expert_count
from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType

__all__ = [
    "EpDispatchCombineConfig",
    "EpDispatchCombineKernelType",
    "EpDispatchCombineOp",
    "launch_local_expert_count",
]
