"""A kernel with its compile-time constants: interpreted on CPU, compiled once and launched cheaply on a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from ep_a2a.errors import StateError
from ep_a2a.kernels.constants import as_constexprs, by_name
from ep_a2a.kernels.target import REGISTERS_PER_SM
from ep_a2a.kernels.triton_parts import part
from ep_a2a.memory import nvshmem

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ep_a2a.kernels.portable import PortableFunction


TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


NO_HOOKS = (None, None, None)
"""Arguments of Triton's launcher: no metadata, and no hooks before and after a launch."""
REGISTER_GRANULARITY = 8
"""Of NVIDIA GPUs: a thread gets a multiple of so many registers."""
CARVEOUT, WHOLE_CARVEOUT = 9, 100
"""CUDA's number of the attribute "preferred shared memory carve-out", and per cent."""


def prefer_shared_memory(function: int) -> None:
    """Lets a multiprocessor that runs this CUfunction alone have all its shared memory, in place of a larger cache.

    A multiprocessor divides its memory anew while it runs nothing. Else programs that need shared memory would wait.
    """
    code = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, WHOLE_CARVEOUT)
    if code:
        raise RuntimeError(f"cuFuncSetAttribute: CUDA error {code}")


@dataclass
class CompiledKernel:
    """One kernel with one set of constants. Kernels of equal `key` are compiled to the same code.

    Attributes:
        kernel: device code.
        operands: the first run-time arguments, up to the last one that is no number. Each tensor is given by the dtype
            that the kernel reads it in, a number by any number, an argument that is always None by None. All further
            arguments are numbers.
        constants: the compile-time arguments by name, for `num_warps` warps per program.
        num_warps: warps per program.
        max_registers: most registers per thread, so that more programs fit; None = as many as the compiler likes.
        shares_sm: whether programs of other kernels, which need much shared memory, run on the same multiprocessors.
        puts: whether the kernel calls NVSHMEM, which must have been started.
        programs_per_sm: programs that the registers of a multiprocessor hold at once; None before compilation.
    """

    kernel: PortableFunction
    operands: tuple[torch.dtype | int | None, ...]
    constants: dict[str, Any]
    num_warps: int
    max_registers: int | None = None
    shares_sm: bool = False
    puts: bool = False
    programs_per_sm: int | None = field(default=None, init=False)
    _launch: Any = field(default=None, init=False)
    _handle: tuple[Any, ...] = field(default=(), init=False)
    _trailing: tuple[Any, ...] = field(default=(), init=False)
    _tensors: tuple[int, ...] = field(default=(), init=False)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """All that the compiled code depends on."""
        constants = tuple(self.constants.items())
        return self.kernel, self.operands, constants, self.num_warps, self.max_registers, self.shares_sm, self.puts

    @property
    def named_constants(self) -> dict[str, Any]:
        """The compile-time arguments by name, with the fields of named tuples beside the others."""
        return by_name(self.constants)

    @property
    def stand_ins(self) -> tuple[torch.dtype | int | None, ...]:
        """Run-time arguments to compile for, as Triton's warmup takes them: dtypes in place of tensors."""
        num_arguments = len(self.kernel.arg_names) - len(self.constants)
        return (*self.operands, *[0] * (num_arguments - len(self.operands)))

    @property
    def name(self) -> str:
        """Name of the device code, without its ending."""
        return str(self.kernel.__name__).removesuffix("_kernel")

    @property
    def is_compiled(self) -> bool:
        """Whether the kernel is loaded, so that a launch compiles nothing."""
        return self._launch is not None

    def run(self, num_programs: int, args: tuple[Any, ...], device: torch.device) -> None:
        """Runs the kernel on a device: launched on a GPU, interpreted on CPU.

        args: tensors of any dtype whose bytes are those of `operands`; None for one that the kernel does not read.
        """
        if device.type == "cpu":
            self.interpret(num_programs, args)
        else:
            self.launch(num_programs, args, device)

    def interpret(self, num_programs: int, args: tuple[Any, ...]) -> None:
        """Runs the kernel in Triton's interpreter."""
        self.kernel.interpret((num_programs,), *self.as_read(args), **self.constants)

    def as_read(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The run-time arguments with each tensor in the dtype that the kernel reads it in."""
        read = (_as_read(arg, dtype) for arg, dtype in zip(args, self.operands))
        return (*read, *args[len(self.operands) :])

    def compile(self) -> None:
        """Compiles and loads the kernel; nothing is launched.

        Raises:
            StateError: a graph is being captured.
            UnsupportedError: the installed Triton lacks a part that is needed here.
            UntrustedFolderError: Triton's cache is not this user's alone.
            MissingPackageError: NVSHMEM's device functions are not installed.
        """
        if not self.is_compiled:
            self.refuse_capture()
            self.load(self.build())

    def refuse_capture(self) -> None:
        """Returns where no graph is being captured on the current stream.

        Raises:
            StateError: one is; code cannot be loaded then.
        """
        if torch.cuda.is_current_stream_capturing():
            raise StateError(
                "a form of the call that has run before a graph captures it", "its first use",
                "Make the call once outside of the capture: kernels are compiled then.",
            )  # fmt: skip

    def build(self) -> Any:
        """Compiles the kernel, or finds it in Triton's cache, and brings its code onto the current device.

        Threads may build at the same time. Triton 3.6 also compiles a launcher in C, 0.4 s for each signature.

        Returns:
            What `load` takes.
        """
        linked = {}
        if self.puts:
            linked = {"extern_libs": {"libnvshmem_device": str(nvshmem.device_library(torch.device("cuda")))}}
        compiled = self.kernel.warmup(
            *self.stand_ins,
            grid=(1,),
            **as_constexprs(self.constants),
            num_warps=self.num_warps,
            launch_pdl=self.named_constants.get("DEPENDENT_LAUNCH", False),
            maxnreg=self.max_registers,
            **linked,
        )
        part(compiled, "_init_handles")()
        return compiled

    def load(self, compiled: Any) -> None:
        """Makes what `build` returned ready for launches."""
        if self.shares_sm:
            prefer_shared_memory(part(compiled, "function"))
        if self.puts:
            nvshmem.load_into(part(compiled, "module"))
        constants = as_constexprs(self.constants)
        self._tensors = tuple(place for place, dtype in enumerate(self.operands) if isinstance(dtype, torch.dtype))
        self._trailing = tuple(constants[name] for name in self.kernel.arg_names[len(self.stand_ins) :])
        registers = -(-int(part(compiled, "n_regs")) // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
        self.programs_per_sm = max(1, REGISTERS_PER_SM // (registers * 32 * self.num_warps))
        self._handle = (part(compiled, "function"), part(compiled, "packed_metadata"), *NO_HOOKS)
        self._launch = part(compiled, "run")

    def launch(self, num_programs: int, args: tuple[Any, ...], device: torch.device) -> None:
        """Launches the kernel on the current stream by the compiled kernel's own launcher.

        A call through Triton binds, hashes and looks up all arguments and asks the profiling hooks. That takes more
        host time than the rest of a step. The types of the arguments are fixed after compilation, so the launcher can
        be called directly, with addresses in place of tensors and without hooks.
        """
        if self._launch is None:
            self.compile()
        values = list(args)
        for place in self._tensors:
            tensor = values[place]
            values[place] = 0 if tensor is None else tensor.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        self._launch(num_programs, 1, 1, stream, *self._handle, *values, *self._trailing)


def _as_read(arg: Any, dtype: torch.dtype | int | None) -> Any:
    if not isinstance(dtype, torch.dtype):
        return arg
    if arg is None:
        return torch.empty(0, dtype=dtype)
    try:
        return arg.view(dtype)
    except RuntimeError:  # torch refuses some views whose strides do not matter: those of one row, or of none
        return arg.flatten().view(dtype) if arg.numel() else arg.new_empty(0, dtype=dtype)
