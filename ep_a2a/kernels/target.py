"""What differs between GPUs in device code: the one place that asks for which GPU a kernel is being compiled.

`barrier` and the functions below it are called from device code like Triton's own builtins. They are evaluated while a
kernel is compiled, so code for NVIDIA GPUs contains nothing of the code for AMD GPUs, and the other way round. In the
interpreter `interpreted_arch` chooses the fp8 format, and one poll counts as several; all else is as on NVIDIA GPUs.

Kernels compile for gfx942 (MI300) and gfx950 (MI350). They have never run there.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import triton.language as tl
from triton import knobs

AMD_BACKEND = "hip"
"""Triton's name of its backend for AMD GPUs."""
WARP_THREADS, WAVEFRONT_THREADS = 32, 64
"""Threads of a warp, in which launch numbers count, and of what executes together on gfx942 and gfx950."""
REGISTERS_PER_SM, SIMDS_PER_CU = 65536, 4
"""Of an NVIDIA multiprocessor, and of an AMD compute unit, which has wavefronts on each of its SIMDs."""


class Fp8(NamedTuple):
    """An fp8 format with 4 bits of exponent and 3 of mantissa.

    dtype: Triton's. largest: the magnitude to which casts saturate, 0x7E. bias: of exponents. nan: bits of NaN.
    negative_zero: whether there is one.
    """

    dtype: Any
    largest: float
    bias: int
    nan: int
    negative_zero: bool


E4M3FN = Fp8(tl.float8e4nv, 448.0, 7, 0x7F, True)
E4M3FNUZ = Fp8(tl.float8e4b8, 224.0, 8, 0x80, False)
"""The format of gfx942. Its largest number is 240, but -240 is 0xFF, which stands for what has not arrived. vLLM scales
to 224 there, too."""
FP8_OF_ARCH = {"gfx942": E4M3FNUZ}
"""The format by architecture; E4M3FN for all others."""

INTERPRETED_POLLS = 8
"""An interpreted poll takes as long as many others: by 32 of them a wait looked for lost ranks each 0.15 s, and beside
a load of 12 each second."""

_interpreted_arch = ""


@contextlib.contextmanager
def interpreted_arch(arch: str) -> Iterator[None]:
    """Interprets kernels with the fp8 format of an architecture."""
    global _interpreted_arch
    before, _interpreted_arch = _interpreted_arch, arch
    try:
        yield
    finally:
        _interpreted_arch = before


def amd_options(num_warps: int, max_registers: int | None) -> dict[str, Any]:
    """Triton's options for a kernel on an AMD GPU.

    Args:
        num_warps: warps of WARP_THREADS threads per program. A program has as many threads as on an NVIDIA GPU, at
            least a wavefront.
        max_registers: with which as many programs fit into the registers of an NVIDIA multiprocessor as are wanted;
            None = no number of programs is wanted.
    """
    options = {"num_warps": max(1, num_warps * WARP_THREADS // WAVEFRONT_THREADS)}
    if max_registers is not None:
        wavefronts = REGISTERS_PER_SM // max_registers // WAVEFRONT_THREADS
        options["waves_per_eu"] = max(1, wavefronts // SIMDS_PER_CU)
    return options


@contextlib.contextmanager
def compiling_for_amd() -> Iterator[None]:
    """Has Triton compile without buffer instructions.

    Their descriptors hold addresses that are equal in all threads, and the compiler cannot know that addresses of other
    ranks, which kernels load, are. So each access would become a loop over threads.
    """
    with knobs.amd.scope():
        knobs.amd.use_buffer_ops = False
        yield


def _builtin(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: Triton calls `fn` while it compiles, with its builder in `_semantic`; the interpreter without."""
    fn.__triton_builtin__ = True  # type: ignore[attr-defined]
    return fn


def _is_amd(semantic: Any) -> bool:
    return semantic is not None and semantic.builder.options.backend_name == AMD_BACKEND


def _with(semantic: Any) -> dict[str, Any]:
    return {} if semantic is None else {"_semantic": semantic}


def _given(value: Any, semantic: Any) -> Any:
    return value if semantic is None else tl.constexpr(value)


@_builtin
def barrier(_semantic: Any = None) -> None:
    """Waits for all threads of the program; what they have read and written is before what comes behind the barrier.

    On AMD GPUs the hardware's barrier orders no memory operations, so each wavefront waits for its own before.
    """
    if _is_amd(_semantic):
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0) lgkmcnt(0)\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1,
            _semantic=_semantic,
        )  # fmt: skip
    tl.debug_barrier(**_with(_semantic))


@_builtin
def on_amd(_semantic: Any = None) -> Any:
    """Whether the kernel is being compiled for an AMD GPU."""
    return _given(_is_amd(_semantic), _semantic)


@_builtin
def volatile_load(pointers: Any, mask: Any = None, other: Any = None, _semantic: Any = None) -> Any:
    """Loads, at each call anew, what other programs and other GPUs write meanwhile. mask, other: as of tl.load.

    For AMD GPUs Triton 3.6 drops "volatile"; with ".cv" loads pass the caches there.
    """
    cache = ".cv" if _is_amd(_semantic) else ""
    return tl.load(pointers, mask, other, volatile=True, cache_modifier=cache, **_with(_semantic))


@_builtin
def polls_in_one(_semantic: Any = None) -> Any:
    """As how many polls one counts."""
    return _given(INTERPRETED_POLLS if _semantic is None else 1, _semantic)


@_builtin
def fp8(_semantic: Any = None) -> Any:
    """The format of fp8 rows (Fp8)."""
    arch = _semantic.builder.options.arch if _is_amd(_semantic) else _interpreted_arch if _semantic is None else ""
    return _given(FP8_OF_ARCH.get(arch, E4M3FN), _semantic)
