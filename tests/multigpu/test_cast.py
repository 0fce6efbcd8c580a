"""The GPU's own fp8 conversion and quick divisions against exact ones, for all float32 bit patterns in question."""

import torch
import triton.language as tl

from ep_a2a.kernels.cast_kernels import FP8_MAX, MIN_AMAX, e4m3_bits, e4m3_bits_by_integers, quarters_of, scales_of
from ep_a2a.kernels.line_cast_kernels import packed_e4m3, quantize_lines
from ep_a2a.kernels.portable import portable
from ep_a2a.quantization import fp32_to_e4m3_bits, quantize_groups

BLOCK = 4096
BLOCKS_PER_PROGRAM = 256


@portable
def count_differences(differences, first, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    program = tl.program_id(0)
    found = tl.full((BLOCK,), 0, tl.int32)
    for block in range(NUM_BLOCKS):
        patterns = first + tl.cast(program, tl.int64) * (BLOCK * NUM_BLOCKS) + block * BLOCK + tl.arange(0, BLOCK)
        values = patterns.to(tl.uint32).to(tl.float32, bitcast=True)
        found += (e4m3_bits(values) != e4m3_bits_by_integers(values)).to(tl.int32)
    tl.store(differences + program, tl.reduce(found, 0, tl.standard._sum_combine))


@portable
def count_other_scales(differences, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    program = tl.program_id(0)
    found = tl.full((BLOCK,), 0, tl.int32)
    for block in range(NUM_BLOCKS):
        patterns = tl.cast(program, tl.int64) * (BLOCK * NUM_BLOCKS) + block * BLOCK + tl.arange(0, BLOCK)
        maxima = patterns.to(tl.int32).to(tl.float32, bitcast=True)
        maxima = tl.where((maxima >= MIN_AMAX) & (maxima < float("inf")), maxima, 1.0)
        bits, reciprocals = scales_of(maxima, None, 0)
        scales = tl.div_rn(maxima, tl.full((BLOCK,), FP8_MAX, tl.float32))
        exact = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), scales)
        found += ((bits != scales.to(tl.int32, bitcast=True)) | (reciprocals != exact)).to(tl.int32)
    tl.store(differences + program, tl.reduce(found, 0, tl.standard._sum_combine))


def test_native_conversion_equals_integer_rounding() -> None:
    num_programs = (1 << 32) // (BLOCK * BLOCKS_PER_PROGRAM)
    differences = torch.zeros(num_programs, dtype=torch.int32, device="cuda")
    count_differences[(num_programs,)](differences, 0, BLOCK=BLOCK, NUM_BLOCKS=BLOCKS_PER_PROGRAM, num_warps=8)
    assert int(differences.sum()) == 0


def test_quick_divisions_equal_exact_ones() -> None:
    """Of every maximum that a group can have."""
    num_programs = (1 << 31) // (BLOCK * BLOCKS_PER_PROGRAM)
    differences = torch.zeros(num_programs, dtype=torch.int32, device="cuda")
    count_other_scales[(num_programs,)](differences, BLOCK=BLOCK, NUM_BLOCKS=BLOCKS_PER_PROGRAM, num_warps=8)
    assert int(differences.sum()) == 0


@portable
def pack_and_take_apart(values, words, out, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = values + where * 4
    packed = packed_e4m3(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    tl.store(words + where, packed)
    first, second, third, fourth = quarters_of(packed)
    at = out + where * 4
    tl.store(at, first)
    tl.store(at + 1, second)
    tl.store(at + 2, third)
    tl.store(at + 3, fourth)


def test_words_of_four_equal_the_reference() -> None:
    values = torch.randint(-(2**31), 2**31 - 1, (1 << 22,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    values[::2] = torch.randn(values[::2].shape) * 100
    words = torch.empty(values.numel() // 4, dtype=torch.int32, device="cuda")
    out = torch.empty_like(values, device="cuda")
    pack_and_take_apart[(words.numel() // BLOCK,)](values.cuda(), words, out, BLOCK=BLOCK)
    expected = fp32_to_e4m3_bits(values)
    assert torch.equal(words.cpu().view(torch.uint8), expected)
    wide = expected.view(torch.float8_e4m3fn).to(torch.float32)
    torch.testing.assert_close(out.cpu(), wide, rtol=0, atol=0, equal_nan=True)


@portable
def quantize_pairs(words_in, words_out, scales_out):
    lines = tl.program_id(0) * 256 + tl.arange(0, 256)
    parts = ()
    for part in tl.static_range(2):
        parts = parts + (tl.load(words_in + (lines * 8 + part * 4)[:, None] + tl.arange(0, 4)[None, :]),)  # noqa: RUF005
    words, scale_bits = quantize_lines(parts, 8, tl.bfloat16)
    tl.store(words_out + lines[:, None] * 4 + tl.arange(0, 4)[None, :], words)
    tl.store(scales_out + lines, scale_bits)


def test_groups_of_any_bf16_equal_the_reference() -> None:
    """Each group of 128 draws from all patterns, or is of a size with some that are not finite among it."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(-(2**15), 2**15, (1 << 13, 128), generator=generator, dtype=torch.int32).to(torch.int16)
    rows = rows.view(torch.bfloat16)
    sizes = torch.randn(1 << 12, 1, generator=generator).mul(20).exp2()
    rows[::2] = (torch.randn(1 << 12, 128, generator=generator) * sizes).to(torch.bfloat16)
    rows[::4, 5], rows[::8, 6] = float("inf"), float("nan")
    words = torch.empty(1 << 13, 32, dtype=torch.int32, device="cuda")
    scales = torch.empty(1 << 13, 8, dtype=torch.int32, device="cuda")
    quantize_pairs[(1 << 8,)](rows.view(torch.int32).cuda(), words, scales)
    expected, expected_scales = quantize_groups(rows, "float32")
    assert torch.equal(words.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales.cpu(), expected_scales.view(torch.int32).view(-1, 1).expand(-1, 8))
