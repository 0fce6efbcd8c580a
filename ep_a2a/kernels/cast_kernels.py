"""The fp8 cast inside dispatch, bit-equal to ep_a2a/quantization.py on GPU and in the interpreter.

The interpreter's own fp32 -> fp8 conversion rounds differently, so there the cast is integer arithmetic. On an NVIDIA
GPU the native conversion gives the same bits for all 2^32 inputs (tests/multigpu/test_cast.py) and is used instead. For
AMD GPUs functions "by integers" are compiled that the interpreter runs, too, but for the conversion itself.

"e4m3" is the target's format here: e4m3fnuz on gfx942 (scales of amax / 224), e4m3fn everywhere else (amax / 448).
"""

import triton.language as tl

from ep_a2a.kernels.constants import GIVEN_SCALE, MX_SCALES, POWER_OF_TWO_SCALES
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.target import E4M3FN, fp8, on_amd

FP8_MAX = tl.constexpr(E4M3FN.largest)
MIN_AMAX = tl.constexpr(1e-10)
INFINITY = tl.constexpr(float("inf"))


@portable
def round_shift(value, shift):
    """value >> shift, rounded to nearest, ties to even; 1 <= shift <= 30."""
    half = (1 << (shift - 1)) - 1
    return (value + half + ((value >> shift) & 1)) >> shift


@portable
def e4m3_bits_by_integers(values):
    """float32 -> e4m3 bit patterns (uint8): nearest even, saturating at 0x7E and 0xFE; one NaN for all."""
    bits = values.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    # normal results: drop 20 mantissa bits and move the exponent's bias from 127 to 7 (fnuz: 8)
    least = 128 - fp8().bias
    normal = round_shift(magnitude, 20) - ((least - 1) << 3)
    # subnormal results (below 2^-6) count steps of 2^-9 (fnuz: half of both): the mantissa with its hidden bit,
    # shifted further
    shift = tl.minimum(tl.maximum(least + 20 - exponent, 20), 30)
    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    subnormal = tl.where(exponent < least - 4, 0, round_shift(mantissa, shift))
    result = tl.minimum(tl.where(exponent < least, subnormal, normal), 0x7E)
    if fp8().negative_zero:
        result = result | sign
    else:
        result = tl.where(result == 0, 0, result | sign)
    return tl.where(magnitude > 0x7F800000, fp8().nan, result).to(tl.uint8)


@portable(interpreted=e4m3_bits_by_integers)
def e4m3_bits(values):
    """e4m3_bits_by_integers, by the GPU's own conversion, which on NVIDIA GPUs saturates.

    For gfx950 Triton 3.6 would emit a long replacement of it.
    """
    if on_amd():
        # NaN, which is neither larger nor smaller, becomes a bound first
        largest: tl.constexpr = fp8().largest
        bounded = tl.minimum(tl.maximum(values, -largest), largest)
        # the lower half of a register is written, twice the same byte; what follows may read it a cycle later
        twice = tl.inline_asm_elementwise(
            "v_cvt_pk_fp8_f32 $0, $1, $1\ns_nop 1", "=v,v", [bounded], dtype=tl.int32, is_pure=True, pack=1
        )
        bits = twice & 0xFF
        if not fp8().negative_zero:
            bits = tl.where(bits == 0x80, 0, bits)
        bits = tl.where(values != values, fp8().nan, bits).to(tl.uint8)
    else:
        bits = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return bits


def _interpreted_widened(bits, DTYPE):
    if DTYPE not in (tl.float8e4nv, tl.float8e4b8):
        return bits.to(DTYPE, bitcast=True).to(tl.float32)
    # the interpreter takes NaN for a number; Triton 3.6's has one of the formats only
    values = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if DTYPE == tl.float8e4b8:
        values = values * 0.5
    codes = bits & 0x7F if fp8().negative_zero else bits
    return tl.where(codes == fp8().nan, float("nan"), values)


@portable(interpreted=_interpreted_widened)
def widened(bits, DTYPE: tl.constexpr):
    """float32 values of the bit patterns of DTYPE."""
    return bits.to(DTYPE, bitcast=True).to(tl.float32)


def _interpreted_magnitudes(values):
    magnitudes = tl.abs(values)
    return tl.where(magnitudes < INFINITY, magnitudes, 0.0)


@portable(interpreted=_interpreted_magnitudes)
def magnitudes_of(values):
    """Magnitudes of float32 values for a maximum of the finite ones: NaN, which a maximum leaves out, for the others.

    In the interpreter 0 for the others, since its maxima take NaN.
    """
    return tl.abs(tl.fma(values, tl.full(values.shape, 0.0, tl.float32), values))


@portable(interpreted=lambda values: tl.div_rn(values, tl.full(values.shape, fp8().largest, tl.float32)))
def over_fp8_max(values):
    """values / 448 (fnuz: / 224) of float32 values from MIN_AMAX on, rounded to nearest even.

    It has none of a division's branches. Half of 448 has the same mantissa, so it rounds equally.
    """
    largest: tl.constexpr = fp8().largest
    reciprocal = tl.full(values.shape, 1 / largest, tl.float32)
    near = values * reciprocal
    remainder = tl.fma(near, tl.full(values.shape, -largest, tl.float32), values)
    return tl.fma(remainder, reciprocal, near)


@portable(interpreted=lambda values: tl.div_rn(tl.full(values.shape, 1.0, tl.float32), values))
def reciprocals_of(values):
    """1 / values, rounded to nearest even, where both are normal float32 numbers; without branches."""
    ones = tl.full(values.shape, 1.0, tl.float32)
    if on_amd():
        result = tl.div_rn(ones, values)
    else:
        near = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )
        result = tl.fma(near, tl.fma(-values, near, ones), near)
    return result


@portable
def scales_of(maxima, given, SCALING: tl.constexpr):
    """Scales of groups with these largest finite magnitudes.

    Args:
        given: int32 pointer to the bits of the one scale, with SCALING GIVEN_SCALE. SCALING: see constants.py.

    Returns:
        (scale bits as int32, reciprocals as float32), both of the shape of maxima. 0 stands for 2^-127.
    """
    if SCALING == MX_SCALES:
        # as vLLM's MXFP8 has it: the least power of two with which the largest is at most 448, or 2^-127
        bits = tl.maximum(maxima, 0.0).to(tl.int32, bitcast=True)
        # the largest number of the format is 1.75 * 2^8 (fnuz: 2^7): a mantissa above .75 carries into the exponent
        exponents = tl.maximum(((bits + 0x1FFFFF) >> 23) - (15 - fp8().bias), 0)
        bits, reciprocals = exponents << 23, ((254 - exponents) << 23).to(tl.float32, bitcast=True)
    elif SCALING == GIVEN_SCALE:
        bits = tl.full(maxima.shape, 0, tl.int32) + tl.load(given)
        reciprocals = reciprocals_of(bits.to(tl.float32, bitcast=True))
    else:
        scales = over_fp8_max(tl.maximum(maxima, MIN_AMAX))
        bits = scales.to(tl.int32, bitcast=True)
        if SCALING == POWER_OF_TWO_SCALES:
            exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
            bits = tl.minimum(tl.maximum(exponent, 1), 254) << 23
            scales = bits.to(tl.float32, bitcast=True)
        reciprocals = reciprocals_of(scales)
    return bits, reciprocals


def _interpreted_round_to(values, DTYPE):
    # the interpreter truncates float32 to bf16
    if DTYPE != tl.bfloat16:
        return values.to(DTYPE)
    bits = values.to(tl.int32, bitcast=True)
    # unsigned, since the carry may reach the sign bit of a large negative pattern
    low = tl.add(bits.to(tl.int64) & 0xFFFFFFFF, 0x7FFF)
    rounded = tl.where(values != values, 0x7FC0, (tl.add(low, (bits >> 16) & 1) >> 16) & 0xFFFF)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@portable(interpreted=_interpreted_round_to)
def round_to(values, DTYPE: tl.constexpr):
    """float32 values rounded to DTYPE, nearest even."""
    return values.to(DTYPE)


@portable
def plus_biases(total, bias_0, bias_1, token, offsets, HIDDEN: tl.constexpr):
    """A part of a token's float32 sums plus that part of its line in each bias [., HIDDEN] that is not None."""
    at = tl.cast(token, tl.int64) * HIDDEN + offsets
    if bias_0 is not None:
        total += tl.load(bias_0 + at, mask=offsets < HIDDEN, other=0).to(tl.float32)
    if bias_1 is not None:
        total += tl.load(bias_1 + at, mask=offsets < HIDDEN, other=0).to(tl.float32)
    return total


@portable
def quarters_by_shifts(words):
    """quarters_of by the conversion of single bytes."""
    quarters = ()
    for place in tl.static_range(4):
        quarters = quarters + (widened(((words >> (8 * place)) & 0xFF).to(tl.uint8), fp8().dtype),)
    return quarters


@portable(interpreted=quarters_by_shifts)
def quarters_of(words):
    """float32 values of the four e4m3 bit patterns of each word, from the lowest bits on."""
    if on_amd():
        quarters = quarters_by_shifts(words)
    else:
        # Triton's own conversion takes two patterns of one register, which shifts would put together
        quarters = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, h0, h1, h2, h3;
            .reg .b32 first, second;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mov.b32 {h0, h1}, first;
            mov.b32 {h2, h3}, second;
            cvt.f32.f16 $0, h0;
            cvt.f32.f16 $1, h1;
            cvt.f32.f16 $2, h2;
            cvt.f32.f16 $3, h3;
            }""",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return quarters


@portable
def elements_of(words, DTYPE: tl.constexpr):
    """float32 values of the elements in each word of 32 bits, a tile for each of them from the lowest bits on."""
    if DTYPE == tl.float8e4nv:
        values = quarters_of(words)
    elif DTYPE == tl.bfloat16:
        # a bf16 is the upper half of a float32
        values = (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    elif DTYPE.primitive_bitwidth == 16:
        values = widened((words & 0xFFFF).to(tl.int16), DTYPE), widened((words >> 16).to(tl.int16), DTYPE)
    else:
        values = (widened(words, DTYPE),)
    return values
