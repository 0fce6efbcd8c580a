"""Compile-time arguments that follow from what a token's row is, for all kernels that send rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.config import FP8_GROUP_SIZE, QuantType, ScaleFormat
from ep_a2a.kernels.layout import WORD_BYTES, padded

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig

MAX_BLOCK_WORDS = 4096
"""Words of a row that a program copies at once, at most."""
MANY_TOKENS = 256
"""Tokens whose destinations a program works out at once, where it counts all."""


def row_constants(config: EpDispatchCombineConfig, *, casts: bool) -> dict[str, Any]:
    """Words of a row on the wire, and how the fp8 cast groups its elements (GROUP 0: no cast)."""
    group = 0
    if casts:
        group = FP8_GROUP_SIZE if config.dispatch_quant == QuantType.FP8_PER_1X128 else config.hidden_dim
    return {
        "ROW_WORDS": config.hidden_dim * config.wire_dtype.itemsize // WORD_BYTES,
        "GROUP": group, "GROUP_LANES": padded(max(1, group)),
        "GROUPS_LANES": padded(config.hidden_dim // group) if group else 1,
        "POWERS_OF_TWO": config.scale_format != ScaleFormat.FLOAT32, "BYTE_SCALES": config.scale_bytes == 1,
    }  # fmt: skip
