"""The FP8 oracle against definitions written independently of it: numpy arithmetic and torch's own cast."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ep_a2a import quantization
from ep_a2a.config import QuantType, ScaleFormat
from ep_a2a.errors import DtypeError, ShapeError, UnknownNameError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = ("float32", "ue8m0", "float32_power_of_two")


def e4m3_value(code: int) -> float:
    """Value of a non-negative e4m3fn byte below 0x7F, from the format's definition."""
    exponent, mantissa = code >> 3, code & 7
    return math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)


VALUES = np.array([e4m3_value(code) for code in range(127)])
MIDPOINTS = (VALUES[1:] + VALUES[:-1]) / 2


def nearest_even_code(values: np.ndarray) -> np.ndarray:
    """Bytes by comparison with the exact midpoints in float64; no NaN."""
    magnitude = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    code = np.searchsorted(MIDPOINTS, magnitude, side="left")
    ties = np.isin(magnitude, MIDPOINTS)
    code = np.where(ties & (code % 2 == 1), code + 1, code)
    return (code + np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def check_codes(x: torch.Tensor) -> None:
    assert x.dtype == torch.float32
    got = quantization.fp32_to_e4m3_bits(x)
    assert got.dtype == torch.uint8
    assert got.shape == x.shape
    nan = x.isnan()
    assert (got[nan] == 0x7F).all()
    np.testing.assert_array_equal(got[~nan].numpy(), nearest_even_code(x[~nan].numpy()))
    finite = x.abs() <= 448
    assert torch.equal(got[finite], x[finite].to(torch.float8_e4m3fn).view(torch.uint8))


def float32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def numpy_scale(amax: float, scale_format: str) -> tuple[np.float32, int]:
    """The scale as a float32 factor and, for UE8M0, its byte, from an exact power-of-two round-up."""
    scale = np.float32(max(np.float32(amax), np.float32(1e-10))) / np.float32(448)
    if scale_format == "float32":
        return scale, 0
    fraction, exponent = math.frexp(float(scale))
    exponent -= fraction == 0.5
    return np.float32(math.ldexp(1.0, exponent)), exponent + 127


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_of_16_bits(dtype: torch.dtype) -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    check_codes(bits.view(dtype).to(torch.float32))


def test_midpoints_and_one_ulp_beside_them() -> None:
    middle = MIDPOINTS.astype(np.float32)
    assert (middle == MIDPOINTS).all()
    for points in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))):
        check_codes(float32(np.concatenate([points, -points])))


def test_random_fp32_patterns() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    check_codes(bits.view(torch.float32))
    near = (bits & 0x807FFFFF) | (torch.randint(115, 138, bits.shape, generator=generator).to(torch.int32) << 23)
    check_codes(near.view(torch.float32))


def test_ue8m0_rounds_up_to_a_power_of_two() -> None:
    power = np.ldexp(np.float32(1), np.arange(-126, 127))
    above = np.nextafter(power, np.float32(np.inf))
    exponents = np.arange(1, 254)
    np.testing.assert_array_equal(quantization.round_scale_up_to_ue8m0(float32(power)).numpy(), exponents)
    np.testing.assert_array_equal(quantization.round_scale_up_to_ue8m0(float32(above)).numpy(), exponents + 1)
    largest = torch.tensor([torch.finfo(torch.float32).max, 1e-45])
    assert quantization.round_scale_up_to_ue8m0(largest).tolist() == [254, 1]


def test_every_ue8m0_byte_decodes() -> None:
    factors = quantization.scales_to_float32(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    np.testing.assert_array_equal(factors[:255].numpy(), np.ldexp(np.float32(1), np.arange(-127, 128)))
    assert factors[255].isnan()


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_groups_follow_the_formula(dtype: torch.dtype, scale_format: str) -> None:
    generator = torch.Generator().manual_seed(2)
    size = torch.logspace(-4, 4, 40)[:, None] if dtype == torch.float16 else torch.logspace(-12, 30, 40)[:, None]
    x = (torch.randn(40, 24, generator=generator) * size).to(dtype)
    # a row of zeros, and the largest and smallest numbers there are
    x[0], x[1, :2], x[2] = 0, torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    q, scales = quantization.quantize_groups(x, scale_format)
    assert scales.dtype == (torch.uint8 if scale_format == "ue8m0" else torch.float32)
    for row, codes, stored in zip(x.to(torch.float32).numpy(), q.view(torch.uint8).numpy(), scales.tolist()):
        factor, byte = numpy_scale(np.abs(row).max(), scale_format)
        assert stored == (byte if scale_format == "ue8m0" else float(factor))
        inverse = np.float32(1) / factor
        np.testing.assert_array_equal(codes, nearest_even_code(row * inverse))


def test_elements_are_multiplied_by_the_inverse_not_divided_by_the_scale() -> None:
    amax = torch.rand(50, 1, generator=torch.Generator().manual_seed(6)).numpy() + np.float32(0.5)
    scale = amax / np.float32(448)
    # Elements that lie on ties but for the rounding of this product: there the two formulas differ.
    x = np.concatenate([amax, MIDPOINTS.astype(np.float32) * scale], axis=1)
    product, quotient = nearest_even_code(x * (np.float32(1) / scale)), nearest_even_code(x / scale)
    assert (product != quotient).any()
    np.testing.assert_array_equal(quantization.quantize_groups(float32(x))[0].view(torch.uint8).numpy(), product)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_nan_and_infinity_leave_the_scale_alone(dtype: torch.dtype, scale_format: str) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(3)).to(dtype)
    clean = x.clone()
    clean[:, [5, 6, 7]] = 0
    special = clean.clone()
    special[:, 5], special[:, 6], special[:, 7] = math.nan, math.inf, -math.inf
    q, scales = quantization.quantize_per_1x128(special, scale_format)
    expected, expected_scales = quantization.quantize_per_1x128(clean, scale_format)
    assert torch.equal(scales, expected_scales)
    codes = expected.view(torch.uint8).clone()
    codes[:, 5], codes[:, 6], codes[:, 7] = 0x7F, 0x7E, 0xFE
    assert torch.equal(q.view(torch.uint8), codes)


def test_layouts_agree_with_groups() -> None:
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(4))
    q, scales = quantization.quantize_per_1x128(x)
    assert q.shape == (5, 384)
    assert scales.shape == (5, 3)
    for group in range(3):
        part, part_scales = quantization.quantize_per_token(x[:, 128 * group : 128 * (group + 1)])
        assert same_bytes(q[:, 128 * group : 128 * (group + 1)], part)
        assert torch.equal(scales[:, group : group + 1], part_scales)
    assert q.is_contiguous()
    assert same_bytes(quantization.quantize_per_1x128(x.T.contiguous().T)[0], q)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (200, 300), (256, 1)])
def test_weight_blocks(shape: tuple[int, int], scale_format: str) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * torch.arange(1, shape[0] + 1)[:, None]
    q, scales = quantization.quantize_per_128x128(weights, scale_format)
    assert q.shape == shape
    assert q.is_contiguous()
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i, j in np.ndindex(*scales.shape):
        block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
        part, part_scale = quantization.quantize_per_token(weights[block].reshape(1, -1), scale_format)
        assert scales[i, j] == part_scale.item()
        assert same_bytes(q[block].reshape(1, -1), part)
    back = quantization.dequantize_per_128x128(q, scales)
    assert (back - weights).abs().max() <= weights.abs().max() / 16


CASTS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "fp8_per_token": lambda x: quantization.quantize_per_token(x, "ue8m0"),
    "fp8_per_1x128": lambda x: quantization.quantize_per_1x128(x, "ue8m0"),
    "mxfp8": quantization.quantize_mxfp8,
    "fp8_static": lambda x: (quantization.quantize_static(x, SCALE), SCALE),
}
SCALE = torch.tensor([0.37])


@pytest.mark.parametrize("quant_type", list(QuantType))
def test_quantize_dispatches_by_type(quant_type: QuantType) -> None:
    x = torch.randn(3, 256)
    if quant_type.value in CASTS:
        for kind in (quant_type, quant_type.value):
            q, scales = quantization.quantize(x, kind, ScaleFormat.UE8M0, SCALE)
            direct, direct_scales = CASTS[quant_type.value](x)
            assert same_bytes(q, direct)
            assert torch.equal(scales, direct_scales)
        back = quantization.dequantize(q, scales, quant_type)
        assert (back - x).abs().max() < 0.3
        assert torch.equal(quantization.dequantize(q, scales, quant_type, torch.bfloat16), back.bfloat16())
        nothing = quantization.quantize(x[:0], quant_type, ScaleFormat.UE8M0, SCALE)
        assert quantization.dequantize(*nothing, quant_type).shape == (0, 256)
        return
    with pytest.raises(UnknownNameError, match="fp8_per_1x128"):
        quantization.quantize(x, quant_type)
    with pytest.raises(UnknownNameError, match="fp8_per_1x128"):
        quantization.dequantize(x.to(torch.float8_e4m3fn), torch.ones(3, 1), quant_type)


def test_mxfp8_scales_are_the_least_powers_of_two_that_fit() -> None:
    """Of numbers around 448 * 2^n for each n, of the smallest and largest numbers, NaN and infinity."""
    edges = 448.0 * torch.exp2(torch.arange(-149.0, 120.0))
    edges = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(torch.tensor(0.0))])
    x = torch.zeros(edges.numel(), 32)
    x[:, 7], x[:, 8], x[:, 9] = edges, torch.nan, -torch.inf
    q, scales = quantization.quantize_mxfp8(x)
    for amax, byte in zip(edges.tolist(), scales.flatten().tolist()):
        assert amax <= math.ldexp(448.0, byte - 127)
        assert byte == 0 or amax > math.ldexp(448.0, byte - 128)
    assert (q.view(torch.uint8)[:, 8] == 0x7F).all()
    assert (q.view(torch.uint8)[:, 9] == 0xFE).all()


Q = torch.zeros(2, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: quantization.fp32_to_e4m3_bits(torch.zeros(2, dtype=torch.bfloat16)), DtypeError),
        (lambda: quantization.scales_to_float32(torch.ones(2, dtype=torch.bfloat16)), DtypeError),
        (lambda: quantization.round_scale_up_to_ue8m0(torch.ones(2, dtype=torch.float64)), DtypeError),
        (lambda: quantization.quantize_per_token(torch.zeros(2, 8, dtype=torch.float64)), DtypeError),
        (lambda: quantization.quantize_per_token(Q), DtypeError),
        (lambda: quantization.quantize_per_token(torch.zeros(1, 128), "e5m2"), UnknownNameError),
        (lambda: quantization.quantize_per_token(torch.zeros(8)), ShapeError),
        (lambda: quantization.quantize_per_token(torch.zeros(2, 0)), ShapeError),
        (lambda: quantization.quantize_groups(torch.tensor(1.0)), ShapeError),
        (lambda: quantization.quantize_per_1x128(torch.zeros(2, 130)), ShapeError),
        (lambda: quantization.quantize_per_1x128(torch.zeros(2, 0)), ShapeError),
        (lambda: quantization.quantize_per_1x128(torch.zeros(2, 2, 128)), ShapeError),
        (lambda: quantization.quantize_per_128x128(torch.zeros(0, 128)), ShapeError),
        (lambda: quantization.quantize_per_128x128(torch.zeros(128, 0)), ShapeError),
        (lambda: quantization.quantize_per_128x128(torch.zeros(4, dtype=torch.float32)), ShapeError),
        (lambda: quantization.quantize_per_128x128(torch.zeros(4, 4, dtype=torch.int8)), DtypeError),
        (lambda: quantization.dequantize(torch.zeros(2, 256), torch.ones(2, 1), "fp8_per_token"), DtypeError),
        (lambda: quantization.dequantize(Q, torch.ones(2, 2), "fp8_per_token"), ShapeError),
        (lambda: quantization.dequantize(Q, torch.ones(2, 1), "fp8_per_1x128"), ShapeError),
        (lambda: quantization.dequantize(Q[:, :100], torch.ones(2, 1), "fp8_per_1x128"), ShapeError),
        (lambda: quantization.dequantize(Q[:, :0], torch.ones(2, 1), "fp8_per_token"), ShapeError),
        (lambda: quantization.dequantize(Q, torch.ones(2, 1, dtype=torch.float64), "fp8_per_token"), DtypeError),
        (lambda: quantization.quantize_mxfp8(torch.zeros(2, 48)), ShapeError),
        (lambda: quantization.quantize_static(torch.zeros(2, 48), torch.ones(2)), ShapeError),
        (lambda: quantization.quantize(torch.zeros(2, 48), "fp8_static"), DtypeError),
        (lambda: quantization.dequantize_per_128x128(Q, torch.ones(1, 1)), ShapeError),
        (lambda: quantization.dequantize_per_128x128(torch.zeros(2, 256), torch.ones(1, 2)), DtypeError),
    ],
)
def test_wrong_arguments(call: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
