"""The parts of Triton outside its public interface that this package uses.

Each is looked up by `module` or `part`, so that a Triton that lacks one ends in one error with a remedy.
"""

from __future__ import annotations

import importlib
from typing import Any

import triton

from ep_a2a.errors import UnsupportedError

WORKING_VERSIONS = "triton>=3.6,<3.10"


def module(name: str) -> Any:
    """Import a module of Triton.

    Raises:
        UnsupportedError: the installed Triton lacks it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(name) from error


def part(owner: Any, name: str) -> Any:
    """Return the attribute `name` of a module, class or object of Triton.

    Raises:
        UnsupportedError: the installed Triton lacks it.
    """
    if not hasattr(owner, name):
        raise _missing(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
    return getattr(owner, name)


def _missing(name: str) -> UnsupportedError:
    remedy = f"Install a version that works: pip install '{WORKING_VERSIONS}'."
    return UnsupportedError(f"a Triton with {name}", f"Triton {triton.__version__}", remedy)


interpreter = module("triton.runtime.interpreter")
InterpretedFunction = part(interpreter, "InterpretedFunction")
part(InterpretedFunction, "rewrite")
interpreter_builder = part(interpreter, "interpreter_builder")
part(part(interpreter_builder, "options"), "sanitize_overflow")
get_np_dtype = part(interpreter, "_get_np_dtype")
interpreter_semantic = part(interpreter, "interpreter_semantic")
part(interpreter_semantic, "binary_op_type_checking_impl")
GridExecutor = part(interpreter, "GridExecutor")
# `portable` overrides these two. Without them Triton would copy shared memory back over other ranks' writes.
part(GridExecutor, "_init_args_hst")
part(GridExecutor, "_restore_args_dev")
JITFunction = part(module("triton.runtime.jit"), "JITFunction")
part(JITFunction, "cache_key")
aggregate = part(module("triton.language.core"), "_aggregate")
