"""Compiles kernels for a GPU that this machine does not have, so that a machine without GPUs finds what they refuse."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.constants import as_constexprs
from ep_a2a.kernels.portable import FP_FUSION, PortableFunction
from ep_a2a.kernels.target import AMD_BACKEND, WAVEFRONT_THREADS, amd_options, compiling_for_amd

_TYPE_NAMES = {
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}


def compile_offline(
    kernel: PortableFunction,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
    capability: int = 90,
    max_registers: int | None = None,
) -> dict[str, Any]:
    """Compiles one variant of a kernel for CUDA compute capability `capability` / 10.

    Args:
        kernel: what to compile.
        args: dtypes, or tensors of any device, in place of its tensors, integers or None; only types matter. Tensors
            are taken to be aligned to 16 bytes.
        constants: its compile-time arguments by name.
        num_warps: warps per program.
        capability: 80 Ampere, 89 Ada, 90 Hopper, 100 Blackwell.
        max_registers: most registers per thread; None = as many as the compiler likes.

    Returns:
        The stages by name: "ttgir", "ptx", ...
    """
    options = {"num_warps": num_warps, "maxnreg": max_registers}
    return dict(_compiled(kernel, args, constants, GPUTarget("cuda", capability, 32), options).asm)


def compile_for_amd(kernel: CompiledKernel, arch: str) -> tuple[str, int]:
    """Compiles a kernel for an AMD GPU: (assembly, bytes of LDS). arch: "gfx942", "gfx950"."""
    options = amd_options(kernel.num_warps, kernel.max_registers)
    with compiling_for_amd():
        target = GPUTarget(AMD_BACKEND, arch, WAVEFRONT_THREADS)
        compiled = _compiled(kernel.kernel, kernel.stand_ins, kernel.constants, target, options)
    return compiled.asm["amdgcn"], compiled.metadata.shared


def _compiled(
    kernel: PortableFunction,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    target: GPUTarget,
    options: dict[str, Any],
) -> Any:
    names = kernel.arg_names[: len(args)]
    constants = as_constexprs(constants) | {name: None for name, arg in zip(names, args) if arg is None}
    dtypes = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args]
    signature = {name: f"*{_TYPE_NAMES[each]}" if each in _TYPE_NAMES else "i32" for name, each in zip(names, dtypes)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, each in enumerate(dtypes) if each in _TYPE_NAMES}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    return triton.compile(source, target=target, options=options | {"enable_fp_fusion": FP_FUSION})


def compile_kernel(kernel: CompiledKernel, capability: int = 90) -> dict[str, Any]:
    """compile_offline of a compiled kernel with its own constants, warps and bound on registers."""
    return compile_offline(
        kernel.kernel,
        kernel.stand_ins,
        kernel.constants,
        kernel.num_warps,
        capability,
        max_registers=kernel.max_registers,
    )


def vector_accesses(ptx: str) -> tuple[int, int]:
    """The numbers of 16-byte loads from and stores to global memory."""
    kinds = [re.findall(rf"\b{op}\.global\S*\.v4\.b32", ptx) for op in ("ld", "st")]
    return len(kinds[0]), len(kinds[1])


def check_moves(kernels: Iterable[CompiledKernel], moving: set[str], folder: Path) -> None:
    """Kernels compile for Hopper without spilling; one of each name in `moving` loads and stores in vectors."""
    left = set(moving)
    for kernel in kernels:
        name = kernel.kernel.__name__
        asm = compile_kernel(kernel)
        assert resources(asm["cubin"], folder)["STACK"] == 0, name
        if name in left:
            left.remove(name)
            assert min(vector_accesses(asm["ptx"])) > 0, name
    assert not left


def resources(cubin: bytes, directory: Path) -> dict[str, int]:
    """Registers per thread and bytes of stack (of spilled ones, too) and of shared memory, as cuobjdump prints them.

    Args:
        cubin: a stage of compile_offline. directory: for a file.
    """
    path = directory / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    # "REG:64 STACK:0 SHARED:1024 LOCAL:0 ..."
    text = subprocess.run([tool, "-res-usage", path], check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
