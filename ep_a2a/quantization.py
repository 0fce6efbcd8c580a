"""FP8 e4m3fn quantisation in plain torch: the oracle that a fused cast must match bit for bit.

Rounding is done on integers, so that every device, the Triton interpreter included, gives the same bytes.
Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0 for e4m3 in saturating mode, OCP Microscaling (MX) 1.0 for
UE8M0 and MXFP8, vLLM's `per_token_group_quant_fp8` for `scale = max(amax, 1e-10) / 448`, and its `scaled_fp8_quant`
for given scales.
"""

import math

import torch

from ep_a2a.config import (
    DISPATCH_QUANT_TYPES,
    FP8_DTYPE,
    FP8_GROUP_SIZE,
    MX_GROUP_SIZE,
    QuantType,
    ScaleFormat,
    parse_enum,
)
from ep_a2a.errors import DtypeError, ShapeError, UnknownNameError

E4M3_MAX = 448.0
"""Largest finite e4m3fn value; larger magnitudes and infinities saturate to it."""
AMAX_FLOOR = 1e-10
"""Smallest amax (as float32) that a scale is computed from: zero rows get AMAX_FLOOR / 448 instead of a zero scale."""
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_MAGNITUDE_MASK = 0x7FFFFFFF
_MANTISSA_MASK = 0x007FFFFF
_IMPLICIT_BIT = 0x00800000
_INFINITY_BITS = 0x7F800000
_QUIET_NAN_BITS = 0x7FC00000
_E4M3_MAX_BITS = 0x43E00000
_E4M3_SMALLEST_NORMAL_BITS = 0x3C800000
_DROPPED_MANTISSA_BITS = 20
_REBIAS = (127 - 7) << 3
_SUBNORMAL_SHIFT_BASE = 141
_MAX_SUBNORMAL_SHIFT = 25


def fp32_to_e4m3_bits(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to e4m3fn, to nearest with ties to even.

    Subnormals are kept (the smallest is 2^-9). Magnitudes beyond 448 and infinities saturate to 448 (0x7E, 0xFE),
    NaN of either sign becomes 0x7F, zeros keep their sign (-0.0 is 0x80).

    Args:
        x: float32, any shape.

    Returns:
        The e4m3fn bytes as uint8, shape of x.

    Raises:
        DtypeError: x is not float32.
    """
    _require_dtype("x", x, (torch.float32,))
    bits = x.view(torch.int32)
    magnitude = bits & _MAGNITUDE_MASK
    clamped = magnitude.clamp(max=_E4M3_MAX_BITS)
    is_subnormal = clamped < _E4M3_SMALLEST_NORMAL_BITS
    code = torch.where(is_subnormal, _subnormal_code(clamped), _normal_code(clamped))
    # The shift is arithmetic: only bit 7 of its result is the sign, so it is masked afterwards.
    code = code | ((bits >> 24) & 0x80)
    return torch.where(magnitude > _INFINITY_BITS, 0x7F, code).to(torch.uint8)


def _normal_code(magnitude: torch.Tensor) -> torch.Tensor:
    # Exponent and mantissa are adjacent, so a carry out of the rounded mantissa raises the exponent by itself.
    tie_to_even = (magnitude >> _DROPPED_MANTISSA_BITS) & 1
    half_below = (1 << (_DROPPED_MANTISSA_BITS - 1)) - 1
    return ((magnitude + half_below + tie_to_even) >> _DROPPED_MANTISSA_BITS) - _REBIAS


def _subnormal_code(magnitude: torch.Tensor) -> torch.Tensor:
    # The code is |x| * 2^9 rounded; |x| = significand * 2^(exponent - 150), hence the shift of 141 - exponent.
    # At a shift of 25 every 24-bit significand rounds to 0, so smaller magnitudes (fp32 subnormals too) may share it.
    exponent = magnitude >> 23
    shift = (_SUBNORMAL_SHIFT_BASE - exponent).clamp(min=1, max=_MAX_SUBNORMAL_SHIFT)
    significand = (magnitude & _MANTISSA_MASK) | _IMPLICIT_BIT
    half_below = (torch.ones_like(shift) << (shift - 1)) - 1
    return (significand + half_below + ((significand >> shift) & 1)) >> shift


def round_scale_up_to_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """The exponent byte of the smallest power of two that is >= scale.

    Args:
        scale: positive finite normal float32, any shape.

    Returns:
        uint8, shape of scale: byte e stands for 2^(e - 127); clamped to [1, 254].

    Raises:
        DtypeError: scale is not float32.
    """
    _require_dtype("scale", scale, (torch.float32,))
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + ((bits & _MANTISSA_MASK) != 0).to(torch.int32)
    return exponent.clamp(min=1, max=254).to(torch.uint8)


def scales_to_float32(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32 factors, from either scale format.

    Args:
        scales: float32 (returned as it is), or uint8 UE8M0 bytes: e stands for 2^(e - 127), 255 for NaN (OCP MX 1.0).

    Returns:
        float32, shape of scales.

    Raises:
        DtypeError: scales is neither float32 nor uint8.
    """
    _require_dtype("scales", scales, (torch.float32, torch.uint8))
    if scales.dtype == torch.float32:
        return scales
    exponent = scales.to(torch.int32)
    # Exponent 0 means an fp32 subnormal: 2^-127 is its mantissa's highest bit.
    bits = torch.where(exponent == 0, _IMPLICIT_BIT >> 1, exponent << 23)
    return torch.where(exponent == 255, _QUIET_NAN_BITS, bits).view(torch.float32)


def quantize_groups(
    groups: torch.Tensor, scale_format: ScaleFormat | str = ScaleFormat.FLOAT32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every group, the elements along the last dimension, with one scale.

    amax = max(largest finite |x| of the group, 1e-10); scale = amax / 448, rounded up to a power of two unless the
    format is FLOAT32; inverse = 1 / scale; q = e4m3(x * inverse). The two divisions and the product are one IEEE
    float32 operation each.
    NaN elements become 0x7F and infinities +-448; neither moves the scale of its group. An all-zero group becomes
    zero bytes (with the sign of each zero) and the scale of amax = 1e-10.

    Args:
        groups: bf16, fp16 or fp32, `[..., G]`, G >= 1; other dimensions may be 0.
        scale_format: one of ScaleFormat's values.

    Returns:
        q float8_e4m3fn `[..., G]` and scales `[...]`, float32 factors or uint8 UE8M0 exponent bytes. x ~ q * scale.

    Raises:
        DtypeError: groups has another dtype.
        ShapeError: groups has no last dimension, or G is 0.
        UnknownNameError: scale_format is not known.
    """
    _require_dtype("groups", groups, INPUT_DTYPES)
    if groups.ndim == 0 or groups.shape[-1] == 0:
        raise ShapeError("groups of at least one element along the last dimension", str(tuple(groups.shape)))
    kind: ScaleFormat = parse_enum(ScaleFormat, scale_format, "scale_format")
    x = groups.to(torch.float32)
    amax = _finite_amax_bits(x).view(torch.float32).clamp(min=AMAX_FLOOR)
    # Divisors and dividends are tensors: torch on CUDA turns a division by a Python number into a multiplication by
    # its reciprocal, which may differ in the last bit from the one IEEE division that is meant.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    stored = scale if kind == ScaleFormat.FLOAT32 else round_scale_up_to_ue8m0(scale)
    factor = scales_to_float32(stored)
    stored = factor if kind == ScaleFormat.FLOAT32_POWER_OF_TWO else stored
    inverse = torch.ones_like(factor) / factor
    return fp32_to_e4m3_bits(x * inverse.unsqueeze(-1)).view(FP8_DTYPE), stored


def _finite_amax_bits(x: torch.Tensor) -> torch.Tensor:
    # Magnitudes of finite floats are ordered as their bits are.
    magnitude = x.view(torch.int32) & _MAGNITUDE_MASK
    return torch.where(magnitude < _INFINITY_BITS, magnitude, 0).amax(dim=-1)


def quantize_per_token(
    x: torch.Tensor, scale_format: ScaleFormat | str = ScaleFormat.FLOAT32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row with one scale; see `quantize_groups` for formula and errors.

    Args:
        x: bf16, fp16 or fp32 `[T, H]`; T may be 0.
        scale_format: one of ScaleFormat's values.

    Returns:
        q float8_e4m3fn `[T, H]` and scales `[T, 1]`, float32 or uint8 (UE8M0).
    """
    _require_matrix("x", x)
    q, scales = quantize_groups(x, scale_format)
    return q, scales.unsqueeze(-1)


def quantize_per_1x128(
    x: torch.Tensor, scale_format: ScaleFormat | str = ScaleFormat.FLOAT32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each run of 128 elements of a row with one scale; see `quantize_groups` for formula and errors.

    Args:
        x: bf16, fp16 or fp32 `[T, H]`, H a multiple of 128; T may be 0.
        scale_format: one of ScaleFormat's values.

    Returns:
        q float8_e4m3fn `[T, H]` and scales `[T, H / 128]`, float32 or uint8 (UE8M0).

    Raises:
        ShapeError: also where H is not a positive multiple of 128.
    """
    q, scales = quantize_groups(_groups(x, FP8_GROUP_SIZE), scale_format)
    return q.reshape(x.shape), scales


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each run of 32 elements of a row with one UE8M0 scale: OCP MX 1.0's format, vLLM's scale.

    The scale is the least power of two with which the largest finite |x| of the run is at most 448, at least 2^-127.
    Elements are multiplied by its inverse, which is exact. NaN elements become 0x7F and infinities +-448; neither
    moves the scale.

    Args:
        x: bf16, fp16 or fp32 `[T, H]`, H a multiple of 32; T may be 0.

    Returns:
        q float8_e4m3fn `[T, H]` and scales uint8 `[T, H / 32]`; byte e stands for 2^(e - 127).

    Raises:
        DtypeError: x has another dtype.
        ShapeError: x is no matrix, or H is not a positive multiple of 32.
    """
    _require_dtype("x", x, INPUT_DTYPES)
    groups = _groups(x, MX_GROUP_SIZE).to(torch.float32)
    # 448 is 0.875 * 2^9, and fractions lie in [0.5, 1).
    fraction, exponent = torch.frexp(_finite_amax_bits(groups).view(torch.float32))
    power = torch.where(fraction == 0, -127, exponent - 9 + (fraction > 0.875).to(torch.int32)).clamp(min=-127)
    scales = (power + 127).to(torch.uint8)
    inverse = torch.ones_like(scales, dtype=torch.float32) / scales_to_float32(scales)
    q = fp32_to_e4m3_bits(groups * inverse.unsqueeze(-1))
    return q.view(FP8_DTYPE).reshape(x.shape), scales


def quantize_static(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantise by a given scale: q = e4m3(x * (1 / scale)), two IEEE float32 operations.

    Args:
        x: bf16, fp16 or fp32 `[T, H]`; T may be 0.
        scale: float32, one element, from 2^-126 to 2^126. Kernels on GPUs round others another way.

    Returns:
        q float8_e4m3fn `[T, H]`. NaN elements become 0x7F, and values beyond 448 * scale +-448.

    Raises:
        DtypeError, ShapeError: x or scale is another tensor.
    """
    _require_matrix("x", x)
    _require_dtype("x", x, INPUT_DTYPES)
    _require_dtype("scale", scale, (torch.float32,))
    if scale.numel() != 1:
        raise ShapeError("scale of one element", str(tuple(scale.shape)))
    return fp32_to_e4m3_bits(x.to(torch.float32) * (torch.ones_like(scale) / scale).flatten()).view(FP8_DTYPE)


def _groups(x: torch.Tensor, size: int) -> torch.Tensor:
    _require_matrix("x", x)
    num_tokens, hidden_dim = x.shape
    if hidden_dim == 0 or hidden_dim % size:
        raise ShapeError(f"x [T, H] with H a positive multiple of {size}", str(tuple(x.shape)))
    return x.reshape(num_tokens, hidden_dim // size, size)


def quantize_per_128x128(
    weights: torch.Tensor, scale_format: ScaleFormat | str = ScaleFormat.FLOAT32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each 128x128 block of a weight matrix with one scale; see `quantize_groups` for formula and errors.

    Args:
        weights: bf16, fp16 or fp32 `[N, K]`, both >= 1; the last blocks may be smaller than 128.
        scale_format: one of ScaleFormat's values.

    Returns:
        q float8_e4m3fn `[N, K]` and scales `[ceil(N / 128), ceil(K / 128)]`, float32 or uint8 (UE8M0).

    Raises:
        ShapeError: also where N or K is 0.
    """
    _require_matrix("weights", weights)
    if weights.numel() == 0:
        raise ShapeError("weights [N, K] with N >= 1 and K >= 1", str(tuple(weights.shape)))
    num_rows, num_columns = weights.shape
    row_blocks, column_blocks = math.ceil(num_rows / FP8_GROUP_SIZE), math.ceil(num_columns / FP8_GROUP_SIZE)
    padding = (0, column_blocks * FP8_GROUP_SIZE - num_columns, 0, row_blocks * FP8_GROUP_SIZE - num_rows)
    padded = torch.nn.functional.pad(weights, padding)
    blocks = padded.reshape(row_blocks, FP8_GROUP_SIZE, column_blocks, FP8_GROUP_SIZE).transpose(1, 2)
    q, scales = quantize_groups(blocks.reshape(row_blocks, column_blocks, FP8_GROUP_SIZE**2), scale_format)
    tiles = q.view(torch.uint8).reshape(row_blocks, column_blocks, FP8_GROUP_SIZE, FP8_GROUP_SIZE).transpose(1, 2)
    matrix = tiles.reshape(padded.shape)[:num_rows, :num_columns].contiguous()
    return matrix.view(FP8_DTYPE), scales


def quantize(
    x: torch.Tensor,
    quant_type: QuantType | str,
    scale_format: ScaleFormat | str = ScaleFormat.FLOAT32,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise tokens `[T, H]` as a fused cast inside dispatch does.

    Args:
        x: bf16, fp16 or fp32 `[T, H]`.
        quant_type: fp8_per_token, fp8_per_1x128, mxfp8 or fp8_static.
        scale_format: of the scales, with the first two.
        scale: with fp8_static, float32 of one element.

    Returns:
        q float8_e4m3fn `[T, H]` and scales: `[T, 1]` or `[T, H / 128]`, float32 or uint8 (UE8M0); of mxfp8
        `[T, H / 32]` uint8; of fp8_static the given one.

    Raises:
        UnknownNameError: quant_type is none of them.
        DtypeError, ShapeError: as the function of the cast raises them.
    """
    kind = _dispatch_quant_type(quant_type)
    if kind == QuantType.FP8_STATIC:
        if scale is None:
            raise DtypeError("scale with fp8_static", "none")
        return quantize_static(x, scale), scale
    if kind == QuantType.MXFP8:
        return quantize_mxfp8(x)
    quantizer = quantize_per_token if kind == QuantType.FP8_PER_TOKEN else quantize_per_1x128
    return quantizer(x, scale_format)


def dequantize(
    q: torch.Tensor, scales: torch.Tensor, quant_type: QuantType | str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns q * scale in float32, rounded once to dtype: the inverse of `quantize`.

    Args:
        q: float8_e4m3fn `[T, H]`.
        scales: float32 or uint8 (UE8M0), `[T, 1]` for fp8_per_token, `[T, H / 128]` for fp8_per_1x128, `[T, H / 32]`
            for mxfp8; one element for fp8_static.
        quant_type: of these.
        dtype: dtype of the result.

    Returns:
        `[T, H]` in dtype; the byte 0x7F gives NaN.

    Raises:
        DtypeError: q is not float8_e4m3fn, or scales is neither float32 nor uint8.
        ShapeError: the shapes do not fit each other.
        UnknownNameError: quant_type is none of them.
    """
    kind = _dispatch_quant_type(quant_type)
    _require_matrix("q", q)
    _require_dtype("q", q, (FP8_DTYPE,))
    num_tokens, hidden_dim = q.shape
    group_size = {QuantType.FP8_PER_1X128: FP8_GROUP_SIZE, QuantType.MXFP8: MX_GROUP_SIZE}.get(kind, hidden_dim)
    if hidden_dim == 0 or hidden_dim % group_size:
        raise ShapeError(f"q [T, H] with H a positive multiple of {group_size}", str(tuple(q.shape)))
    if kind == QuantType.FP8_STATIC:
        _require_shape("scales", scales.flatten(), (1,))
        scales = scales.flatten().expand(num_tokens, 1)
    num_groups = hidden_dim // group_size
    _require_shape("scales", scales, (num_tokens, num_groups))
    values = q.to(torch.float32).reshape(num_tokens, num_groups, group_size)
    return (values * scales_to_float32(scales).unsqueeze(-1)).reshape(num_tokens, hidden_dim).to(dtype)


def dequantize_per_128x128(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns q * scale in float32, rounded once to dtype: the inverse of `quantize_per_128x128`.

    Args:
        q: float8_e4m3fn `[N, K]`.
        scales: float32 or uint8 (UE8M0) `[ceil(N / 128), ceil(K / 128)]`.
        dtype: dtype of the result.

    Returns:
        `[N, K]` in dtype.

    Raises:
        DtypeError: q is not float8_e4m3fn, or scales is neither float32 nor uint8.
        ShapeError: the shapes do not fit each other.
    """
    _require_matrix("q", q)
    _require_dtype("q", q, (FP8_DTYPE,))
    num_rows, num_columns = q.shape
    _require_shape("scales", scales, (math.ceil(num_rows / FP8_GROUP_SIZE), math.ceil(num_columns / FP8_GROUP_SIZE)))
    factors = scales_to_float32(scales)
    factors = factors.repeat_interleave(FP8_GROUP_SIZE, 0).repeat_interleave(FP8_GROUP_SIZE, 1)
    return (q.to(torch.float32) * factors[:num_rows, :num_columns]).to(dtype)


def _dispatch_quant_type(quant_type: QuantType | str) -> QuantType:
    kind: QuantType = parse_enum(QuantType, quant_type, "quant_type")
    casts = [cast.value for cast in DISPATCH_QUANT_TYPES if cast != QuantType.NONE]
    if kind.value not in casts:
        raise UnknownNameError(f"to be one of {', '.join(casts)}", repr(kind.value), field="quant_type")
    return kind


def _require_dtype(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise DtypeError(f"{name} of dtype {' or '.join(map(str, dtypes))}", str(tensor.dtype))


def _require_matrix(name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim != 2:
        raise ShapeError(f"{name} with two dimensions", str(tuple(tensor.shape)))


def _require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} of shape {shape}", str(tuple(tensor.shape)))
