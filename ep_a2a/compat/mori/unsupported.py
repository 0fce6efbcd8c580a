"""MORI's names without a counterpart in this package. Each raises UnsupportedError with a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ep_a2a.compat.parameters import remedy_of
from ep_a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

OP = "ops.EpDispatchCombineOp"
_HANDLE = "ops.dispatch_combine.EpDispatchRoutingHandle"


def refused(function: str, parameter: str = "") -> UnsupportedError:
    """Returns the error for a call that MORI has and this package has not, with the remedy of ep_a2a.compat.parameters.

    Args:
        function: MORI's name for it, below `mori`.
        parameter: the parameter whose value is refused; "" for the whole callable.
    """
    refused_name = f"{parameter} of mori.{function}" if parameter else f"mori.{function}"
    return UnsupportedError(
        "a function or value that ep_a2a.compat.mori offers",
        f"{refused_name}, which only MORI's own kernels have",
        remedy_of("mori", function, parameter),
    )


def unsupported(function: str) -> Callable[..., NoReturn]:
    """Returns a function that takes any arguments and raises `refused(function)`."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise refused(function)

    refuse.__name__ = function.rpartition(".")[2]
    refuse.__doc__ = f"Not supported: raises UnsupportedError, with a remedy, in place of mori.{function}."
    return refuse


class EpDispatchRoutingHandle:
    """MORI's snapshot of a step's routing. Not supported: the constructor and all methods raise UnsupportedError."""

    __init__ = unsupported(_HANDLE)
    tensors = unsupported(f"{_HANDLE}.tensors")
    from_tensors = staticmethod(unsupported(f"{_HANDLE}.from_tensors"))


class UnsupportedOpMethods:
    """The methods of MORI's op that raise UnsupportedError. Rows by expert are a layout of the config instead."""

    dispatch_standard_moe = unsupported(f"{OP}.dispatch_standard_moe")
    combine_standard_moe = unsupported(f"{OP}.combine_standard_moe")
    convert_dispatch_output = unsupported(f"{OP}.convert_dispatch_output")
    convert_combine_input = unsupported(f"{OP}.convert_combine_input")
    get_debug_time_buf = unsupported(f"{OP}.get_debug_time_buf")
    get_debug_time_offset = unsupported(f"{OP}.get_debug_time_offset")
