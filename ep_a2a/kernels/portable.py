"""One kernel source for GPU and CPU: a Triton function that compiles for the GPU and also runs in Triton's interpreter.

Triton chooses between compiling and interpreting at decoration, for the whole process, by TRITON_INTERPRET. That would
reach every other Triton kernel of the process (an engine's, say), so the choice is made here per launch instead.
Restrictions that follow: device code uses core builtins, those of `target.py` and functions decorated with `portable`
only (`tl.full`, not `tl.zeros`; `tl.reduce`, not `tl.sum`), because Triton's own library functions are compiled ones
here.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl

from ep_a2a.errors import UnsupportedError
from ep_a2a.kernels import layout, op_context, ring_shape, target
from ep_a2a.kernels.interpreter_operators import fast_operators
from ep_a2a.kernels.interpreter_types import cached_types
from ep_a2a.kernels.kernel_cache import check_kernel_cache
from ep_a2a.kernels.triton_parts import GridExecutor, InterpretedFunction, JITFunction, interpreter_builder

FP_FUSION = False
"""Whether compilers may fuse a multiplication and an addition, which rounds once where the reference rounds twice.

Set for every kernel, because Triton's own default differs between versions and follows the environment.
"""
_interpreting = threading.Lock()


@functools.cache
def _builtins_digest() -> str:
    sources = (inspect.getsource(module) for module in (layout, op_context, ring_shape, target))
    return hashlib.sha256("".join(sources).encode()).hexdigest()


class _InPlaceExecutor(GridExecutor):
    """Interprets a grid on the caller's own memory.

    Triton's executor copies the storage of every tensor argument before and after a launch. On shared memory that
    write-back would overwrite what other processes wrote meanwhile.
    """

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
        return args_dev, kwargs

    def _restore_args_dev(self, *args: Any) -> None:
        return None


def _indexable(grid: tuple[int, ...]) -> Callable[[Any], tuple[int, ...]]:
    """`grid` as a function, which the executor calls once it has replaced triton.language's parts.

    The `__index__` that Triton 3.6 puts in refuses to work on the one-element arrays of numpy 2.4 and later.
    """

    def prepare(_: Any) -> tuple[int, ...]:
        tl.tensor.__index__ = lambda self: int(self.handle.data.item())
        return grid

    return prepare


@contextlib.contextmanager
def _without_overflow_checks() -> Iterator[None]:
    """Triton's check of every addition takes nearly half of the interpreter's time, and its verdict is not asserted."""
    options = interpreter_builder.options
    interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter_builder.options = options


class PortableFunction(JITFunction):
    """A Triton function to be compiled (`function[grid](...)`) or interpreted (`function.interpret(grid, ...)`)."""

    def __init__(
        self, fn: Callable[..., Any], *, interpreted: Callable[..., Any] | None = None, **options: Any
    ) -> None:
        super().__init__(fn, **options)
        self._twin = interpreted

    @functools.cached_property
    def python(self) -> Callable[..., Any]:
        """The function as Python code that works on the interpreter's values."""
        return self._twin or InterpretedFunction(self.fn).rewrite()

    @property
    def cache_key(self) -> str:
        """The name of this function, with all that it calls, in Triton's disk cache.

        Triton 3.6 takes a callee's globals into the key only if the callee has got its own key earlier. So the
        same kernel had another key in a process that compiled its kernels in another order, and was compiled again.
        Here the callees get their keys first. A function may be named by its module (`prim.address`). A constant so
        named would not be in the key, so device code imports constants by name. The functions of `target.py`, the
        class of `op_context.py` and the numbers of `layout.py` and `ring_shape.py` are builtins, at which Triton does
        not look. So the text of these modules is in every key.
        """
        if self.hash is None:
            super().cache_key  # noqa: B018 - for its effect: the callees have their keys afterwards
            self.hash = None
        return f"{super().cache_key}-{_builtins_digest()}"

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compile, or load from Triton's cache, and launch: all that `function[grid](...)` and `warmup` do.

        Raises:
            UntrustedFolderError: another user may have put code into the cache.
        """
        check_kernel_cache()
        return super().run(*args, enable_fp_fusion=FP_FUSION, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function from interpreted device code; the compiler resolves such calls by itself."""
        return self.python(*args, **kwargs)

    def interpret(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Runs the programs of `grid` one after another in this process, on CPU tensors and raw addresses.

        Raises:
            UnsupportedError: another thread of this process interprets a kernel; Triton's interpreter replaces parts of
                triton.language meanwhile, so there can be only one.
        """
        if not _interpreting.acquire(blocking=False):
            raise UnsupportedError(
                "one interpreted kernel at a time in a process", "a second thread", "Use one process per rank on CPU."
            )
        try:
            with _without_overflow_checks(), cached_types(), fast_operators():
                _InPlaceExecutor(self.python, self.arg_names, _indexable(grid))(*args, **kwargs)
        finally:
            _interpreting.release()


def portable(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator: makes a Triton function of `fn` that runs on GPU and in the interpreter.

    Args:
        fn: device code.
        options: Triton's options of `jit`, and `interpreted`, a Python function that stands in for `fn` in the
            interpreter where device code needs an instruction that the interpreter lacks.
    """
    if fn is None:
        return functools.partial(portable, **options)
    return PortableFunction(fn, **options)
