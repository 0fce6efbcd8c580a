"""The enumerations of the configuration, and how a value is taken for a member of one."""

from __future__ import annotations

import enum
from typing import Any

from ep_a2a.errors import UnknownNameError


class EpDispatchCombineKernelType(enum.Enum):
    """Which kernels move the tokens; MORI's names and values."""

    IntraNode = 0
    InterNode = 1
    InterNodeV1 = 2
    InterNodeV1LL = 3
    AsyncLL = 4
    IntraNodeLL = 5


RING_KERNEL_TYPES = (
    EpDispatchCombineKernelType.InterNodeV1,
    EpDispatchCombineKernelType.InterNodeV1LL,
    EpDispatchCombineKernelType.AsyncLL,
)
"""Kernels that send a token once to each other node, through rings of chunks."""
WHOLE_RING_KERNEL_TYPES = RING_KERNEL_TYPES[1:]
"""Those whose rings hold a whole step, for few tokens: one chunk per channel, in which each token has its own line."""


class QuantType(enum.StrEnum):
    """How tokens are quantised on the wire, by MORI's and our names."""

    NONE = "none"
    FP8_PER_TOKEN = "fp8_per_token"
    FP8_PER_1X128 = "fp8_per_1x128"
    FP8_DIRECT_CAST = "fp8_direct_cast"
    FP8_BLOCKWISE = "fp8_blockwise"


DISPATCH_QUANT_TYPES = (QuantType.NONE, QuantType.FP8_PER_TOKEN, QuantType.FP8_PER_1X128)
COMBINE_QUANT_TYPES = (QuantType.NONE, QuantType.FP8_DIRECT_CAST, QuantType.FP8_BLOCKWISE)


class Layout(enum.StrEnum):
    """How received rows are arranged.

    COMPACT: `[R, H]`, rows dense over all sources, ascending by (source rank, source token).
    RANK_MAJOR: `[W, max_num_tokens, H]`, source s's rows dense from the front of block s.
    EXPERT_MAJOR: `[E, W * max_num_tokens, H]`, the rows of each local expert dense from the front of its block, again
        ascending by (source rank, source token); combine weighs and adds the experts' rows.
    """

    COMPACT = "compact"
    RANK_MAJOR = "rank_major"
    EXPERT_MAJOR = "expert_major"


class ScaleFormat(enum.StrEnum):
    """Format of the scales that a fused fp8 cast writes.

    FLOAT32: float32. UE8M0: rounded up to a power of two, of which the exponent byte is written.
    FLOAT32_POWER_OF_TWO: rounded up likewise and written as float32, as vLLM does for DeepGEMM.
    """

    FLOAT32 = "float32"
    UE8M0 = "ue8m0"
    FLOAT32_POWER_OF_TWO = "float32_power_of_two"


class CompiledCalls(enum.StrEnum):
    """Which forms of calls are compiled when an op is built; others are when they are first made, outside of captures.

    ALL: all whole calls.
    SERVING: what an engine's layers make: dispatch with weights, and with scales where the config has them and makes
        none; combine without weights and indices.
    """

    ALL = "all"
    SERVING = "serving"


RAILS = ("auto", "torch.distributed", "peer_memory", "nvshmem")
"""Names of what carries tokens between nodes; "auto" leaves the choice to the package."""


def parse_enum(kind: type[enum.Enum], value: Any, what: str) -> Any:
    """The member of `kind` that `value` is or names; UnknownNameError listing the members otherwise."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise UnknownNameError(f"{what} to be one of {names}", repr(value)) from None
