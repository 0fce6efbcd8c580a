"""A kernel with its compile-time constants: interpreted on CPU, compiled once and launched cheaply on a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from ep_a2a.errors import StateError
from ep_a2a.kernels.constants import by_name, plain
from ep_a2a.kernels.target import REGISTERS_PER_SM
from ep_a2a.kernels.triton_parts import part
from ep_a2a.memory import nvshmem

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.kernels.portable import PortableFunction


TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


NO_HOOKS = (None, None, None)
"""Arguments of Triton's launcher: no metadata, and no hooks before and after a launch."""
REGISTER_GRANULARITY = 8
"""Of NVIDIA GPUs: a thread gets a multiple of so many registers."""
CARVEOUT, WHOLE_CARVEOUT = 9, 100
"""CUDA's number of the attribute "preferred shared memory carve-out", and per cent."""


def linked_with_nvshmem(device: torch.device) -> dict[str, Any]:
    """Returns the arguments that a CompiledKernel needs when its kernel calls NVSHMEM, which must have been started."""
    libraries = {"libnvshmem_device": str(nvshmem.device_library(device))}
    return {"libraries": libraries, "on_load": nvshmem.load_into}


def prefer_shared_memory(function: int) -> None:
    """Lets a multiprocessor that runs this CUfunction alone have all its shared memory, in place of a larger cache.

    A multiprocessor divides its memory anew while it runs nothing. Else programs that need shared memory would wait.
    """
    code = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, WHOLE_CARVEOUT)
    if code:
        raise RuntimeError(f"cuFuncSetAttribute: CUDA error {code}")


@dataclass
class CompiledKernel:
    """One kernel with one set of constants.

    Attributes:
        kernel: device code.
        constants: its compile-time arguments by name, for `num_warps` warps per program.
        num_warps: warps per program.
        max_registers: most registers per thread, so that more programs fit; None = as many as the compiler likes.
        shares_sm: whether programs of other kernels, which need much shared memory, run on the same multiprocessors.
        libraries: files of bitcode to link, by name; on_load: given the CUDA module of the kernel once it is loaded.
        programs_per_sm: programs that the registers of a multiprocessor hold at once; None before compilation.
    """

    kernel: PortableFunction
    constants: dict[str, Any]
    num_warps: int
    max_registers: int | None = None
    shares_sm: bool = False
    libraries: dict[str, str] | None = None
    on_load: Callable[[int], None] | None = None
    programs_per_sm: int | None = field(default=None, init=False)
    _launch: Any = field(default=None, init=False)
    _handle: tuple[Any, Any] = field(default=(None, None), init=False)
    _trailing: tuple[Any, ...] = field(default=(), init=False)
    _tensors: tuple[int, ...] = field(default=(), init=False)

    @property
    def named_constants(self) -> dict[str, Any]:
        """The compile-time arguments by name, with the fields of named tuples beside the others."""
        return by_name(self.constants)

    @property
    def name(self) -> str:
        """Name of the device code, without its ending."""
        return str(self.kernel.__name__).removesuffix("_kernel")

    @property
    def is_compiled(self) -> bool:
        """Whether the kernel is loaded, so that a launch compiles nothing."""
        return self._launch is not None

    def run(self, num_programs: int, args: tuple[Any, ...], device: torch.device) -> None:
        """Runs the kernel on a device: launched on a GPU, interpreted on CPU."""
        if device.type == "cpu":
            self.interpret(num_programs, args)
        else:
            self.launch(num_programs, args, device)

    def interpret(self, num_programs: int, args: tuple[Any, ...]) -> None:
        """Runs the kernel in Triton's interpreter."""
        self.kernel.interpret((num_programs,), *args, **plain(self.constants))

    def compile(self, args: tuple[Any, ...]) -> None:
        """Compiles and loads the kernel for arguments like these; nothing is launched.

        Raises:
            StateError: a graph is being captured.
            UnsupportedError: the installed Triton lacks a part that is needed here.
            UntrustedFolderError: Triton's cache is not this user's alone.
        """
        if self.is_compiled:
            return
        if torch.cuda.is_current_stream_capturing():
            raise StateError(
                "a form of the call that has run before a graph captures it", "its first use",
                "Make the call once outside of the capture: kernels are compiled then.",
            )  # fmt: skip
        linked = {} if self.libraries is None else {"extern_libs": self.libraries}
        compiled = self.kernel.warmup(
            *args,
            grid=(1,),
            **self.constants,
            num_warps=self.num_warps,
            launch_pdl=self.named_constants.get("DEPENDENT_LAUNCH", False),
            maxnreg=self.max_registers,
            **linked,
        )
        part(compiled, "_init_handles")()
        if self.shares_sm:
            prefer_shared_memory(part(compiled, "function"))
        if self.on_load is not None:
            self.on_load(part(compiled, "module"))
        self._tensors = tuple(place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor))
        self._trailing = tuple(self.constants[name] for name in self.kernel.arg_names[len(args) :])
        registers = -(-int(part(compiled, "n_regs")) // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
        self.programs_per_sm = max(1, REGISTERS_PER_SM // (registers * 32 * self.num_warps))
        self._handle = part(compiled, "function"), part(compiled, "packed_metadata")
        self._launch = part(compiled, "run")

    def launch(self, num_programs: int, args: tuple[Any, ...], device: torch.device) -> None:
        """Launches the kernel on the current stream by the compiled kernel's own launcher.

        A call through Triton binds, hashes and looks up all arguments and asks the profiling hooks. That takes more
        host time than the rest of a step. The types of the arguments are fixed after compilation, so the launcher can
        be called directly, with addresses in place of tensors and without hooks.
        """
        if self._launch is None:
            self.compile(args)
        values = list(args)
        for place in self._tensors:
            values[place] = args[place].data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        self._launch(num_programs, 1, 1, stream, *self._handle, *NO_HOOKS, *values, *self._trailing)
