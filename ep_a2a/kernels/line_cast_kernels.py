"""The fp8 cast of lines of words in registers: two values at a time become e4m3 words and a scale.

The result is bit-equal to ep_a2a/quantization.py, as that of cast_kernels.py is.
"""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import e4m3_bits, elements_of, magnitudes_of, scales_of
from ep_a2a.kernels.constants import FULL_SCALES
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import reduce_max
from ep_a2a.kernels.target import on_amd


@portable
def packed_by_shifts(first, second, third, fourth):
    """packed_e4m3 by the conversion of single values."""
    lower = e4m3_bits(first).to(tl.int32) | (e4m3_bits(second).to(tl.int32) << 8)
    return lower | (e4m3_bits(third).to(tl.int32) << 16) | (e4m3_bits(fourth).to(tl.int32) << 24)


@portable(interpreted=packed_by_shifts)
def packed_e4m3(first, second, third, fourth):
    """e4m3_bits of four values in one word, the first in the lowest bits."""
    if on_amd():
        words = packed_by_shifts(first, second, third, fourth)
    else:
        # two values at a time
        words = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [first, second, third, fourth],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return words


@portable
def neighbours_of(values):
    """Elements 0, 2, 4, ... and 1, 3, 5, ... of each line of a tile."""
    lines: tl.constexpr = values.shape[0]
    half: tl.constexpr = values.shape[1] // 2
    return tl.split(tl.reshape(values, (lines, half, 2)))


@portable
def finite_pairs_by_integers(words):
    """The magnitudes of the two bf16 of each word, 0 for those that are not finite."""
    magnitudes = words & 0x7FFF7FFF
    low, high = magnitudes & 0x7FFF, magnitudes >> 16
    return tl.where(low < 0x7F80, low, 0) | (tl.where(high < 0x7F80, high, 0) << 16)


@portable(interpreted=finite_pairs_by_integers)
def finite_pairs(words):
    """The two bf16 of each word; for infinity NaN, which larger_pairs leaves out. By integers: magnitudes, and 0."""
    if on_amd():
        finite = finite_pairs_by_integers(words)
    else:
        # one product with 0
        finite = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }",
            "=r,r",
            [words],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return finite


@portable
def larger_pairs_by_integers(first, second):
    """larger_pairs of what finite_pairs_by_integers returns."""
    low, high = tl.maximum(first & 0xFFFF, second & 0xFFFF), tl.maximum(first >> 16, second >> 16)
    return low | (high << 16)


@portable(interpreted=larger_pairs_by_integers)
def larger_pairs(first, second):
    """The larger magnitude of two bf16, with either sign, for both in each word."""
    if on_amd():
        larger = larger_pairs_by_integers(first, second)
    else:
        larger = tl.inline_asm_elementwise(
            "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    return larger


@portable
def largest_pairs(words):
    """The largest bf16 magnitudes, with either sign, of both places in each line's pairs: [lines, 1]."""
    found = finite_pairs(words)
    for _ in tl.static_range(words.shape[1] // 2):
        first, second = neighbours_of(found)
        found = larger_pairs(first, second)
    return found


@portable
def largest_of_tiles(tiles, DTYPE: tl.constexpr):
    """float32: the largest finite magnitude of each place in two tiles of words with elements of DTYPE, or NaN."""
    if DTYPE == tl.bfloat16:
        elements = elements_of(larger_pairs(finite_pairs(tiles[0]), finite_pairs(tiles[1])), DTYPE)
        largest = tl.maximum(tl.abs(elements[0]), tl.abs(elements[1]))
    else:
        elements = elements_of(tiles[0], DTYPE) + elements_of(tiles[1], DTYPE)
        largest = magnitudes_of(elements[0])
        for each in tl.static_range(1, len(elements)):
            largest = tl.maximum(largest, magnitudes_of(elements[each]))
    return largest


@portable
def largest_of(parts, DTYPE: tl.constexpr):
    """float32: the largest finite magnitude of each line, or NaN. parts, DTYPE: as of quantize_lines."""
    if DTYPE == tl.bfloat16:
        found = largest_pairs(parts[0])
        if len(parts) == 2:
            found = larger_pairs(found, largest_pairs(parts[1]))
        lower, upper = elements_of(found, DTYPE)
        largest = reduce_max(tl.maximum(tl.abs(lower), tl.abs(upper)), 1)
    else:
        largest = tl.full((parts[0].shape[0],), 0.0, tl.float32)
        for part in tl.static_range(len(parts)):
            elements = elements_of(parts[part], DTYPE)
            for each in tl.static_range(len(elements)):
                largest = tl.maximum(largest, reduce_max(magnitudes_of(elements[each]), 1))
    return largest


@portable
def scaled_words(lines, reciprocals, DTYPE: tl.constexpr):
    """e4m3 words of lines of words with elements of DTYPE, times each line's reciprocal if not None."""
    elements, scaled = elements_of(lines, DTYPE), ()
    for each in tl.static_range(len(elements)):
        value = elements[each]
        if reciprocals is not None:
            value = value * reciprocals[:, None]
        scaled = scaled + (value,)
    even, odd = scaled if len(scaled) == 2 else neighbours_of(scaled[0])
    first, third = neighbours_of(even)
    second, fourth = neighbours_of(odd)
    return packed_e4m3(first, second, third, fourth)


@portable
def line_words(parts, reciprocals, DTYPE: tl.constexpr):
    """scaled_words of lines in parts. parts, DTYPE: as of quantize_lines."""
    words = ()
    for part in tl.static_range(len(parts)):
        words = words + (scaled_words(parts[part], reciprocals, DTYPE),)
    joined = words[0]
    if len(parts) == 2:
        both = tl.permute(tl.join(words[0], words[1]), (0, 2, 1))
        joined = tl.reshape(both, (joined.shape[0], 2 * joined.shape[1]))
    return joined


@portable
def quantize_lines(parts, GROUP_LINES: tl.constexpr, DTYPE: tl.constexpr):
    """Quantises lines of words with elements of DTYPE: (line_words, the bits of each line's scale as int32).

    Args:
        parts: tiles of words, of which each has a part of every line. GROUP_LINES: lines that share a scale.
    """
    largest = largest_of(parts, DTYPE)
    num_lines: tl.constexpr = largest.shape[0]
    groups: tl.constexpr = num_lines // GROUP_LINES
    bits, reciprocals = scales_of(reduce_max(tl.reshape(largest, (groups, GROUP_LINES)), 1), None, FULL_SCALES)
    # of its group, for each line
    bits = tl.reshape(tl.broadcast_to(bits[:, None], (groups, GROUP_LINES)), (num_lines,))
    reciprocals = tl.reshape(tl.broadcast_to(reciprocals[:, None], (groups, GROUP_LINES)), (num_lines,))
    return line_words(parts, reciprocals, DTYPE), bits
