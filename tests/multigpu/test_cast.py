"""The GPU's own fp8 conversion and quick divisions against exact ones, for all float32 bit patterns in question."""

import torch
import triton.language as tl

from ep_a2a.kernels.cast_kernels import FP8_MAX, MIN_AMAX, e4m3_bits, e4m3_bits_by_integers, scales_of
from ep_a2a.kernels.portable import portable
from ep_a2a.quantization import fp32_to_e4m3_bits

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
        bits, reciprocals = scales_of(maxima, False)
        scales = tl.div_rn(maxima, tl.full((BLOCK,), FP8_MAX, tl.float32))
        exact = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), scales)
        found += ((bits != scales.to(tl.int32, bitcast=True)) | (reciprocals != exact)).to(tl.int32)
    tl.store(differences + program, tl.reduce(found, 0, tl.standard._sum_combine))


@portable
def cast(values, out, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + where, e4m3_bits(tl.load(values + where)))


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


def test_native_conversion_equals_the_reference() -> None:
    patterns = torch.randint(-(2**31), 2**31 - 1, (1 << 22,), dtype=torch.int64).to(torch.int32)
    values = patterns.view(torch.float32)
    out = torch.empty(values.shape, dtype=torch.uint8, device="cuda")
    cast[(values.numel() // BLOCK,)](values.cuda(), out, BLOCK=BLOCK)
    assert torch.equal(out.cpu(), fp32_to_e4m3_bits(values))
