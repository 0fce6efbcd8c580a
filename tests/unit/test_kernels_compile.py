"""The kernels compiled for GPUs that this machine does not have: what they refuse, how they move rows, what they use.

A first run compiles for half a minute; later ones find Triton's disk cache.
"""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton

from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.kernels.intra_node import IntraNodeKernels
from ep_a2a.policy import Phase, choose_launch
from ep_a2a.testing.offline_compile import compile_offline

if TYPE_CHECKING:
    from pathlib import Path

Variant = tuple[Any, Phase, tuple[Any, ...], dict[str, Any]]

AMPERE, HOPPER = 80, 90
NUM_SMS = 132
REGISTERS_PER_SM = 65536
SHARED_BYTES_PER_SM = 227 * 1024
# Dispatch takes seconds to compile. What it can do is compiled at least once, but not every combination of it.
DISPATCHES = {
    ("none", "compact"): ("dispatch-has_weights",),
    ("none", "rank_major"): ("dispatch", "dispatch-has_weights"),
    ("fp8_per_1x128", "compact"): ("dispatch-cast128-has_weights", "dispatch-scales56-has_weights"),
    ("fp8_per_1x128", "rank_major"): ("dispatch-cast128", "dispatch-has_weights"),
    ("fp8_per_token", "compact"): ("dispatch-cast7168-has_weights",),
    ("fp8_per_token", "rank_major"): ("dispatch-scales1",),
}


def config_of(**changes: Any) -> EpDispatchCombineConfig:
    """DeepSeek-V3 on 8 GPUs."""
    values: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "rank": 0,
        "world_size": 8,
        "hidden_dim": 7168,
        "scale_dim": 0,
        "scale_type_size": 0,
        "max_token_type_size": 4,
        "max_num_inp_token_per_rank": 4096,
        "num_experts_per_rank": 32,
        "num_experts_per_token": 8,
    }
    return EpDispatchCombineConfig(**{**values, **changes})


def variants_of(config: EpDispatchCombineConfig) -> list[Variant]:
    table = torch.zeros(32, config.world_size, dtype=torch.int64)
    return list(IntraNodeKernels(config, table, torch.device("cpu")).variants())


def named(variant: Variant) -> str:
    kernel, _, _, constants = variant
    marks = [f"scales{constants['SCALE_WIDTH']}"] if constants.get("SCALE_WIDTH") else []
    marks += [f"cast{constants['GROUP']}"] if constants.get("GROUP") else []
    marks += [name for name in ("COPY_ROWS", "HAS_WEIGHTS", "CHECK_INDICES") if constants.get(name)]
    return "-".join([kernel.__name__.removesuffix("_kernel"), *marks]).lower()


def chosen() -> list[Any]:
    cases = []
    for (quant, layout), dispatches in DISPATCHES.items():
        config = config_of(quant_type=quant, layout=layout)
        variants = {named(variant): variant for variant in variants_of(config)}
        names = list(dispatches)
        if quant == "none":
            # what follows dispatch does not know about casts: test_casts_change_dispatch_only
            names += [name for name in variants if not name.startswith("dispatch")]
        cases += [pytest.param(config, variants[name], id=f"{quant}-{layout}-{name}") for name in names]
    return cases


def compiled(config: EpDispatchCombineConfig, variant: Variant, capability: int) -> dict[str, Any]:
    kernel, phase, args, constants = variant
    launch = choose_launch(config, phase, config.max_num_inp_token_per_rank, NUM_SMS)
    return compile_offline(kernel, args, constants, launch.num_warps, capability)


def vector_accesses(ptx: str) -> tuple[int, int]:
    """16-byte loads from and stores to global memory."""
    kinds = [re.findall(rf"\b{op}\.global\S*\.v4\.b32", ptx) for op in ("ld", "st")]
    return len(kinds[0]), len(kinds[1])


def resources(cubin: bytes, directory: Path) -> dict[str, int]:
    """Registers per thread and bytes of shared memory, as cuobjdump prints them: "REG:64 STACK:0 SHARED:1024 ..."."""
    path = directory / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run([tool, "-res-usage", path], check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|SHARED|LOCAL):(\d+)", text)}


@pytest.mark.parametrize(("config", "variant"), chosen())
def test_every_variant_compiles_for_hopper(config, variant, tmp_path):
    _, phase, _, constants = variant
    asm = compiled(config, variant, HOPPER)
    loads, stores = vector_accesses(asm["ptx"])
    moves_rows = phase is Phase.DISPATCH or phase is Phase.COMBINE or constants.get("COPY_ROWS")
    if moves_rows:
        assert loads > 0
        assert stores > 0
    if phase is Phase.COMBINE:
        # one load for each rank that a row may come from
        assert loads == config.world_size
    _check_co_residency(config, phase, asm["cubin"], tmp_path)


def _check_co_residency(config: EpDispatchCombineConfig, phase: Phase, cubin: bytes, directory: Path) -> None:
    """All programs of a full launch wait for other ranks, so all must fit on the device together."""
    launch = choose_launch(config, phase, config.world_size * config.max_num_inp_token_per_rank, NUM_SMS)
    programs_per_sm = -(-launch.num_programs // NUM_SMS)
    used = resources(cubin, directory)
    assert used["REG"] * 32 * launch.num_warps * programs_per_sm <= REGISTERS_PER_SM
    assert used["SHARED"] * programs_per_sm <= SHARED_BYTES_PER_SM
    assert used["LOCAL"] == 0


def test_casts_change_dispatch_only():
    """Why the other kernels are compiled for one quant type: they are the same with all."""

    def others(quant: str) -> list[Any]:
        found = variants_of(config_of(quant_type=quant))
        return [
            (kernel.__name__, constants, [arg.dtype if isinstance(arg, torch.Tensor) else "integer" for arg in args])
            for kernel, phase, args, constants in found
            if phase is not Phase.DISPATCH
        ]

    assert others("none") == others("fp8_per_1x128") == others("fp8_per_token")


@pytest.mark.parametrize(
    ("quant", "num_dispatch"),
    [("none", 2), ("fp8_per_1x128", 6), ("fp8_per_token", 6)],
)
def test_variants_are_all_that_calls_can_reach(quant, num_dispatch):
    """With and without weights; with a cast also fp8 tokens that come cast, with scales or (no tokens) without."""
    variants = variants_of(config_of(quant_type=quant))
    names = [named(variant) for variant in variants]
    assert len(set(names)) == len(names) == num_dispatch + 1 + 3 + 4
    assert sum(variant[1] is Phase.DISPATCH for variant in variants) == num_dispatch


@pytest.mark.parametrize("hidden_dim", [2880, 3080])
def test_rows_that_are_no_power_of_two_move_in_vectors_too(hidden_dim):
    """Masks must not spoil the vectors: gpt-oss has 2880 elements in a row."""
    config = config_of(hidden_dim=hidden_dim, layout="rank_major", world_size=2, num_experts_per_token=2)
    for variant in variants_of(config):
        kernel, _, _, constants = variant
        if constants.get("HAS_WEIGHTS") is False and not constants.get("CHECK_INDICES"):
            loads, stores = vector_accesses(compiled(config, variant, HOPPER)["ptx"])
            assert (loads > 0, stores > 0) == (True, True), kernel.__name__


def test_a_rack_and_an_older_gpu():
    """72 ranks on compute capability 8.0, which has no fp8 conversion: everything but the fused cast."""
    config = config_of(
        world_size=72, layout="rank_major", hidden_dim=2048, num_experts_per_rank=4, num_experts_per_token=2
    )
    seen = set()
    for variant in variants_of(config):
        kernel, phase, _, constants = variant
        if constants.get("HAS_WEIGHTS") is not True and not constants.get("CHECK_INDICES"):
            seen.add(kernel.__name__)
            ptx = compiled(config, variant, AMPERE)["ptx"]
            assert ".target sm_80" in ptx
            if phase is not Phase.STAGE or constants.get("COPY_ROWS"):
                assert min(vector_accesses(ptx)) > 0
    assert seen == {"dispatch_kernel", "stage_kernel", "combine_kernel", "count_local_experts_kernel"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_every_dtype_compiles_for_an_older_gpu(dtype):
    config = config_of(
        data_type=dtype, world_size=3, hidden_dim=144, num_experts_per_token=3, num_experts_per_rank=5,
        scale_dim=5, scale_type_size=1,
    )  # fmt: skip
    for variant in variants_of(config):
        _, phase, _, constants = variant
        if phase is not Phase.DISPATCH or (constants["HAS_WEIGHTS"] and constants["SCALE_WIDTH"]):
            assert ".target sm_80" in compiled(config, variant, AMPERE)["ptx"]


def test_the_fused_cast_needs_a_newer_gpu():
    """What docs/memory-model.md says of older GPUs; the integer conversion is the interpreter's only."""
    config = config_of(quant_type="fp8_per_token", hidden_dim=256, world_size=2, num_experts_per_token=2)
    cast = next(variant for variant in variants_of(config) if variant[3].get("GROUP"))
    assert "e4m3x2" in compiled(config, cast, HOPPER)["ptx"]
    with pytest.raises(triton.compiler.errors.CompilationError) as caught:
        compiled(config, cast, AMPERE)
    cause: BaseException = caught.value
    while cause.__cause__ is not None:
        cause = cause.__cause__
    assert "fp8e4nv" in str(cause)
