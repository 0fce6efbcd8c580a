"""Configuration: the op's fields and enumerations, the handle kwargs of engines, TOML files.

`EpDispatchCombineConfig` and all that stands beside it need torch and are loaded on first use (PEP 562), so that
`ep-a2a doctor` can read the enums where torch is absent or broken. Those that this package takes from here are listed
for the type checker.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ep_a2a.config.enums import COMBINE_QUANT_TYPES as COMBINE_QUANT_TYPES
from ep_a2a.config.enums import DISPATCH_QUANT_TYPES as DISPATCH_QUANT_TYPES
from ep_a2a.config.enums import MX_GROUP_SIZE as MX_GROUP_SIZE
from ep_a2a.config.enums import RING_KERNEL_TYPES as RING_KERNEL_TYPES
from ep_a2a.config.enums import WHOLE_RING_KERNEL_TYPES as WHOLE_RING_KERNEL_TYPES
from ep_a2a.config.enums import CompiledCalls as CompiledCalls
from ep_a2a.config.enums import EpDispatchCombineKernelType as EpDispatchCombineKernelType
from ep_a2a.config.enums import Layout as Layout
from ep_a2a.config.enums import OnRankLoss as OnRankLoss
from ep_a2a.config.enums import QuantType as QuantType
from ep_a2a.config.enums import ScaleFormat as ScaleFormat
from ep_a2a.config.transports import INTERNODE_TRANSPORTS as INTERNODE_TRANSPORTS
from ep_a2a.config.transports import register_internode_transport as register_internode_transport

if TYPE_CHECKING:
    from ep_a2a.config.op_config import ALIGNMENT_BYTES as ALIGNMENT_BYTES
    from ep_a2a.config.op_config import COMBINE_DTYPES as COMBINE_DTYPES
    from ep_a2a.config.op_config import FP8_DTYPE as FP8_DTYPE
    from ep_a2a.config.op_config import FP8_GROUP_SIZE as FP8_GROUP_SIZE
    from ep_a2a.config.op_config import GROUP_SIZES as GROUP_SIZES
    from ep_a2a.config.op_config import MAX_TOPK as MAX_TOPK
    from ep_a2a.config.op_config import EpDispatchCombineConfig as EpDispatchCombineConfig
    from ep_a2a.config.op_config import num_owned_experts as num_owned_experts
    from ep_a2a.config.op_config import parse_enum as parse_enum


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        op_config = importlib.import_module("ep_a2a.config.op_config")
        if hasattr(op_config, name):
            return getattr(op_config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
