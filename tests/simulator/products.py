"""Products of 32 bits that become addresses: with enough rows they overflow, so they must be made in 64 bits."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl

from tests.simulator.interpreter import builder, interpreter, site

PASSES_ON = (
    "create_add",
    "create_sub",
    "create_splat",
    "create_expand_dims",
    "create_broadcast",
    "create_int_cast",
    "create_select",
)
"""Operations whose result is part of an address if an operand is."""


@contextlib.contextmanager
def narrow_products() -> Iterator[set[str]]:
    """The places "file:line" of products of 32 bits that are added to a pointer, or made one, meanwhile."""
    found: set[str] = set()
    kind = type(builder)
    plain: dict[str, Callable[..., Any]] = {
        name: getattr(kind, name) for name in ("create_mul", "create_addptr", "create_int_to_ptr", *PASSES_ON)
    }

    def multiply(self: Any, left: Any, right: Any) -> Any:
        result = plain["create_mul"](self, left, right)
        if result.data.dtype == np.int32:
            result.attr["products"] = {site()}
        return result

    def add_to_pointer(self: Any, pointer: Any, offset: Any) -> Any:
        found.update(offset.attr.get("products", ()))
        return plain["create_addptr"](self, pointer, offset)

    def make_pointer(self: Any, number: Any, kind: Any) -> Any:
        found.update(number.attr.get("products", ()))
        return plain["create_int_to_ptr"](self, number, kind)

    def passes_on(name: str) -> Callable[..., Any]:
        def operation(self: Any, *args: Any) -> Any:
            result = plain[name](self, *args)
            products = set().union(*(getattr(each, "attr", {}).get("products", ()) for each in args))
            if products:
                result.attr["products"] = products
            return result

        return operation

    def numbers(*bounds: Any) -> Iterator[Any]:
        for number in range(*map(int, bounds)):
            yield tl.tensor(interpreter.TensorHandle(np.array([number], np.int32), tl.int32), tl.int32)

    def loop(*bounds: Any) -> Any:
        # as the compiler does, unlike the interpreter, a loop over bounds of 32 bits counts in 32 bits
        return numbers(*bounds) if any(isinstance(each, tl.tensor) for each in bounds) else range(*bounds)

    kernels = [module for name, module in sys.modules.items() if name.startswith("ep_a2a.kernels.")]
    new = {"create_mul": multiply, "create_addptr": add_to_pointer, "create_int_to_ptr": make_pointer} | {
        name: passes_on(name) for name in PASSES_ON
    }
    try:
        for module in kernels:
            module.__dict__["range"] = loop
        for name, operation in new.items():
            setattr(kind, name, operation)
        yield found
    finally:
        for module in kernels:
            del module.__dict__["range"]
        for name, operation in plain.items():
            setattr(kind, name, operation)
