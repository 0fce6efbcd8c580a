"""Compile-time arguments of kernels that follow from the config: the op's shape and the form of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton.language as tl

from ep_a2a.config import EpDispatchCombineConfig, Layout, QuantType, ScaleFormat
from ep_a2a.kernels.compiled_kernel import TRITON_DTYPES
from ep_a2a.kernels.constants import (
    FULL_SCALES,
    GIVEN_SCALE,
    MX_SCALES,
    POWER_OF_TWO_SCALES,
    Block,
    ExpertPlacement,
    Row,
    Scales,
    Shape,
)
from ep_a2a.kernels.layout import WORD_BYTES, padded

SCALING_OF_CAST = {QuantType.MXFP8: MX_SCALES, QuantType.FP8_STATIC: GIVEN_SCALE}
"""How casts scale a row, where the format of scales does not say it."""
MAX_BLOCK_WORDS = 4096
"""The most words of a row that a program copies at once: a row of 7168 bf16 elements has 3584. Other numbers were not
timed."""
LINE_WORDS = 4
"""The most words that a thread loads at once: 16 bytes, its widest load (compute capability 9.0)."""
COUNTED_TOKENS, COUNTED_WORDS, COUNTED_WORDS_OF_THREAD = 128, 4096, 16
"""Tokens whose destinations a program finds at once, when it counts the rows of all tokens: a thread of 256 loads half
of a token's ids, all it has to, at once. And the most pairs of such a token and a rank, of a program and of a thread.
µs of the sending stage of a dispatch (one H200 whose peers' memory is its own, 2 ranks, bf16, 30 November); * marks
what was chosen:

    tokens at once      128*   256
    T = 128             5.60  5.80
    T = 256             6.69  6.85
"""


def placement_of(config: EpDispatchCombineConfig) -> ExpertPlacement:
    """The linear ownership of experts by the op's ranks."""
    return ExpertPlacement(config.total_experts, config.world_size)


def shape_of(config: EpDispatchCombineConfig) -> Shape:
    """The constants that all kernels of an op share."""
    world_size, topk = config.world_size, config.topk
    local_ids_of = config.total_experts if config.local_ids else 0
    is_compact = config.layout == Layout.COMPACT
    return Shape(world_size, padded(world_size), topk, padded(topk), is_compact, local_ids_of, config.masks)


def counted_tokens(world_size: int, threads: int) -> int:
    """Tokens whose ids a program looks at at once, when it counts the rows of all tokens."""
    num_words = min(COUNTED_WORDS, COUNTED_WORDS_OF_THREAD * threads)
    return min(COUNTED_TOKENS, max(1, num_words // padded(world_size)))


def row_constants(
    config: EpDispatchCombineConfig, *, casts: bool, least_words: int = 1, most_words: int = MAX_BLOCK_WORDS
) -> Row:
    """The constants of a row on the wire, of which a program moves so many words at once."""
    group = config.cast_group if casts else 0
    by_format = FULL_SCALES if config.scale_format == ScaleFormat.FLOAT32 else POWER_OF_TWO_SCALES
    row_words = config.hidden_dim * config.wire_dtype.itemsize // WORD_BYTES
    return Row(
        ROW_WORDS=row_words,
        BLOCK_WORDS=max(min(padded(row_words), most_words), least_words),
        GROUP=group,
        GROUP_LANES=padded(max(1, group)),
        GROUPS_LANES=padded(config.hidden_dim // group) if group else 1,
        SCALING=SCALING_OF_CAST.get(config.dispatch_quant, by_format).value,
        BYTE_SCALES=config.scale_bytes == 1,
    )


def scale_constants(num_bytes: int, *, by_bytes: bool = False) -> Scales:
    """The constants of a row's num_bytes bytes of scales: in words where they fill words, unless `by_bytes`."""
    in_words = num_bytes % WORD_BYTES == 0 and not by_bytes
    width = num_bytes // WORD_BYTES if in_words else num_bytes
    return Scales(width, padded(max(1, width)), tl.int32 if in_words else tl.uint8)


@dataclass(frozen=True)
class ResultRows:
    """Dtypes of combine's rows on the wire: fp8 after a cast, else the results' own in words of 4 bytes.

    Attributes:
        dtype: Triton's dtype of the results.
        plain_element: Triton's integers of the same width.
        quantized: whether rows are cast.
        scaled: whether each FP8_GROUP_SIZE elements of a cast row have a scale.
    """

    dtype: Any
    plain_element: Any
    quantized: bool
    scaled: bool

    @classmethod
    def of(cls, config: EpDispatchCombineConfig) -> ResultRows:
        """The dtypes for a config."""
        dtype = config.combined_dtype
        return cls(
            TRITON_DTYPES[dtype],
            tl.int16 if dtype.itemsize == 2 else tl.int32,
            config.combine_quant != QuantType.NONE,
            config.combine_quant == QuantType.FP8_BLOCKWISE,
        )

    def block(
        self, hidden_dim: int, most_elements: int, num_warps: int, num_rows: int = 1, *, adds: bool = False
    ) -> Block:
        """The constants of a kernel that moves so many elements of `num_rows` rows each, at least a word a thread.

        Where elements are cast or added a thread has lines of words that follow each other.
        """
        dtype = tl.float8e4nv if self.quantized else self.dtype
        per_word = WORD_BYTES * 8 // dtype.primitive_bitwidth
        width, threads = hidden_dim // per_word, 32 * num_warps
        num_words = max(min(padded(width), most_elements // per_word), threads)
        group = min(LINE_WORDS, num_words // threads) if adds or self.quantized else num_words
        return Block(width, num_words // group, group, tl.int32, dtype, self.quantized, self.scaled, num_rows)
