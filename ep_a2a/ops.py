"""MORI's `mori.ops`, by the same names."""

from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from ep_a2a.kernels.op import EpDispatchCombineOp

__all__ = ["EpDispatchCombineConfig", "EpDispatchCombineKernelType", "EpDispatchCombineOp"]
