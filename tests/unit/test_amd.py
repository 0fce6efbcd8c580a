"""Kernels for AMD GPUs: they compile for gfx942 and gfx950, and casts to e4m3fnuz are torch's, bit for bit.

Nothing here needs an AMD GPU, and nothing has run on one.
"""

import functools
import re

import pytest
import torch
import triton.language as tl

from ep_a2a.commands.bench.layer_kernels import quantize_tile
from ep_a2a.kernels.cast_kernels import MIN_AMAX, e4m3_bits, quarters_of
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.line_cast_kernels import packed_e4m3
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import after_previous_launch, allow_next_launch, clock_ns, pause
from ep_a2a.kernels.target import (
    E4M3FNUZ,
    SIMDS_PER_CU,
    WARP_THREADS,
    WAVEFRONT_THREADS,
    amd_options,
    barrier,
    interpreted_arch,
    volatile_load,
)
from tests.offline_compile import compile_for_amd
from tests.unit.test_device_functions import ALL_BF16, BLOCK, NANS, floats_of, padded_to_block
from tools import compare_ptx

GROUP = 128
LDS_BYTES = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
"""Of a compute unit, by architecture."""
VECTOR_REGISTERS, SCALAR_REGISTERS = 512, 108
"""Of a SIMD, for each thread of all its wavefronts; and the most of a wavefront, with those for special uses."""
LARGEST = {"gfx942": "0x43600000", "gfx950": "0x43e00000"}
"""The bits of 224 and 448."""
VARIANTS = {
    "low-latency dispatch": "ep2-rank_major-bf16-0-dispatch",
    "low-latency dispatch, cast": "ep2-compact-cast-0-dispatch",
    "bulk dispatch": "ep2-compact-bf16-3-dispatch",
    "bulk dispatch, cast": "ep2-rank_major-cast-3-dispatch",
    "combine": "ep2-compact-bf16-4-combine",
    "combine, cast": "ep2-rank_major-combine-fp8-5-combine",
    "expert blocks, numbers": "ep2-expert_major-cast-1-local",
    "expert blocks, sums": "ep2-expert_major-cast-6-local",
    "rings, numbers": "ep2x2-rings-bf16-0-local",
    "rings, dispatch": "ep2x2-rings-bf16-1-local",
    "rings, results": "ep2x2-rings-combine-fp8-3-local",
    "rings, combine": "ep2x2-rings-combine-fp8-4-local",
}


@portable
def cast_kernel(values, out, words):
    where = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    value = tl.load(values + where)
    tl.store(out + where, e4m3_bits(value))
    tl.store(words + where, packed_e4m3(value, -value, value * 0.5, value * 0.25))


@portable
def widen_kernel(words, out):
    where = tl.arange(0, 64)
    quarters = quarters_of(tl.load(words + where))
    for place in tl.static_range(4):
        tl.store(out + where * 4 + place, quarters[place])


@portable
def quantize_kernel(values, out, scales, SCALING: tl.constexpr):
    groups, elements = tl.arange(0, 64), tl.arange(0, 128)
    at = groups[:, None] * 128 + elements[None, :]
    bits, scale_bits = quantize_tile(tl.load(values + at), None, SCALING)
    tl.store(out + at, bits)
    tl.store(scales + groups, scale_bits)


def fnuz_of(values: torch.Tensor) -> torch.Tensor:
    """torch's conversion of what saturates at 224."""
    return values.clamp(-E4M3FNUZ.largest, E4M3FNUZ.largest).to(torch.float8_e4m3fnuz).view(torch.uint8)


def test_casts_of_gfx942_are_torchs() -> None:
    """Of all bf16, of the neighbours of all ties, of NaN: and never 0xFF, which stands for what has not arrived."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fnuz).float().nan_to_num().unique()
    ties = ((codes[1:] + codes[:-1]) / 2).view(torch.int32)
    values = padded_to_block(torch.cat([ALL_BF16, NANS, *(floats_of(ties + step) for step in (-1, 0, 1))]))
    out, words = torch.zeros(values.shape, dtype=torch.uint8), torch.zeros(values.shape, dtype=torch.int32)
    with interpreted_arch("gfx942"):
        cast_kernel.interpret((values.numel() // BLOCK,), values, out, words)
    assert torch.equal(out, fnuz_of(values))
    packed = torch.stack([fnuz_of(each) for each in (values, -values, values * 0.5, values * 0.25)], 1)
    assert torch.equal(words.view(torch.uint8).view(-1, 4), packed)
    assert not (out == 0xFF).any()
    assert int(fnuz_of(torch.tensor(1e9))) == 0x7E


def test_numbers_of_gfx942_are_torchs() -> None:
    codes, out = torch.arange(256, dtype=torch.uint8), torch.zeros(256)
    with interpreted_arch("gfx942"):
        widen_kernel.interpret((1,), codes.view(torch.int32), out)
    assert torch.equal(out.nan_to_num(1e9), codes.view(torch.float8_e4m3fnuz).float().nan_to_num(1e9))


def test_scales_of_gfx942() -> None:
    """Largest magnitude / 224, also where it is a power of two that is rounded up; infinity and NaN do not count."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, GROUP, generator=generator) * torch.logspace(-12, 30, 64)[:, None]
    values[0] = 0
    values[1, :2] = torch.tensor([float("inf"), float("nan")])
    finite = torch.where(values.isfinite(), values, 0)
    exact = finite.abs().amax(1).clamp_min(MIN_AMAX.value) / E4M3FNUZ.largest
    for powers_of_two in (False, True):
        out, scales = torch.zeros(values.shape, dtype=torch.uint8), torch.zeros(64, dtype=torch.int32)
        with interpreted_arch("gfx942"):
            quantize_kernel.interpret((1,), values, out, scales, SCALING=powers_of_two)
        expected = torch.exp2(exact.double().log2().ceil()).float() if powers_of_two else exact
        assert torch.equal(scales.view(torch.float32), expected)
        assert torch.equal(out, fnuz_of(values * (1 / expected)[:, None]))


@portable
def orders_kernel(words, flag, pause_ns):
    after_previous_launch()
    where = tl.arange(0, 256)
    start = clock_ns()
    while tl.reduce(volatile_load(words + where), 0, tl.standard._sum_combine) == 0:
        pause(pause_ns)
    tl.store(words + 256 + where, (clock_ns() - start).to(tl.int32))
    barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")
    tl.store(words + 512 + where, tl.atomic_add(flag, 0, sem="acquire", scope="sys"), cache_modifier=".wt")
    allow_next_launch()


@pytest.mark.parametrize("arch", LDS_BYTES)
def test_orders_are_those_of_amd_gpus(arch: str) -> None:
    """What polls and posts passes the caches, and all threads have stored before one of them releases a flag."""
    asm, _ = compile_for_amd(CompiledKernel(orders_kernel, (torch.int32, torch.int32), {}, num_warps=8), arch)
    in_order = (
        "s_memrealtime",
        "global_load_dword .* sc0 sc1",
        "s_sleep",
        "s_memrealtime",
        "global_store_dword ",
        r"s_waitcnt vmcnt\(0\) lgkmcnt\(0\)",
        "s_barrier",
        "buffer_wbl2 sc0 sc1",
        "global_atomic_swap .* sc1",
        "global_(atomic_add|load_dword) .* sc0 sc1",
        "buffer_inv sc0 sc1",
        "global_store_dword .* sc0 sc1",
    )
    found = re.findall("|".join(f"(?:{each})" for each in in_order), asm)
    assert re.search(".*".join(in_order), asm.replace("\n", ";")), found


@functools.cache
def variants() -> dict[str, CompiledKernel]:
    return dict([*compare_ptx.headline_variants((2,)), *compare_ptx.node_variants((4,))])


@pytest.mark.full
@pytest.mark.parametrize("arch", LDS_BYTES)
@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_compile_and_fit(name: str, arch: str) -> None:
    """Without a stack; as many wavefronts fit as launches want."""
    variant = variants()[VARIANTS[name]]
    asm, lds = compile_for_amd(variant, arch)
    used = {key: int(number) for key, number in re.findall(r"\.(\w+): +(\d+)$", asm, re.MULTILINE)}
    assert used["wavefront_size"] == WAVEFRONT_THREADS
    assert used["max_flat_workgroup_size"] == WARP_THREADS * variant.num_warps
    assert used["vgpr_spill_count"] == used["private_segment_fixed_size"] == 0
    # scalar registers go to the lanes of at most two vector registers, not to memory
    assert used["sgpr_spill_count"] <= 2 * WAVEFRONT_THREADS
    options = amd_options(variant.num_warps, variant.max_registers)
    wavefronts = max(options.get("waves_per_eu", 1), -(-options["num_warps"] // SIMDS_PER_CU))
    assert used["vgpr_count"] * wavefronts <= VECTOR_REGISTERS
    assert used["sgpr_count"] <= SCALAR_REGISTERS
    assert lds * max(1, wavefronts * SIMDS_PER_CU // options["num_warps"]) <= LDS_BYTES[arch]
    # a loop over threads would surround each of them
    assert not re.search("buffer_(load|store|atomic)", asm)
    if "cast" in name:
        assert "v_cvt_pk_fp8_f32" in asm
        assert LARGEST[arch] in asm
