"""Operators of integers and addresses in the interpreter, without Triton's checks where the types are plainly right.

They are most of what interpreted kernels do, and the checks of types take most of their time.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl
from triton.language import core

from ep_a2a.kernels.interpreter_types import constant_like
from ep_a2a.kernels.triton_parts import interpreter_builder, interpreter_semantic

_INTEGERS = ("int32", "int64")
_COMPARISONS = {
    "__eq__": "create_icmpEQ",
    "__ne__": "create_icmpNE",
    "__lt__": "create_icmpSLT",
    "__le__": "create_icmpSLE",
    "__gt__": "create_icmpSGT",
    "__ge__": "create_icmpSGE",
}
_ARITHMETIC = {"__sub__": "create_sub", "__mul__": "create_mul"}
_BITWISE = {"__and__": "create_and", "__or__": "create_or", "__xor__": "create_xor"}


def _second_operand(lhs: Any, rhs: Any, types: tuple[str, ...]) -> Any:
    """The right operand as a tensor of the type of the left one; None where they differ or are of other types."""
    if lhs.dtype.name not in types:
        return None
    if type(rhs) is core.constexpr:
        rhs = rhs.value
    if type(rhs) is core.tensor:
        return rhs if rhs.shape is lhs.shape and rhs.dtype is lhs.dtype else None
    return constant_like(lhs, rhs) if type(rhs) is int else None


def _operator(plain: Callable[..., Any], name: str, types: tuple[str, ...], *, compares: bool) -> Callable[..., Any]:
    def operator(self: Any, other: Any) -> Any:
        second = _second_operand(self, other, types)
        if second is None:
            return plain(self, other, _semantic=interpreter_semantic)
        result = getattr(interpreter_builder, name)(self.handle, second.handle)
        return core.tensor(result, self.type.with_element_ty(tl.int1) if compares else self.type)

    return operator


def _addition(plain: Callable[..., Any]) -> Callable[..., Any]:
    add = _operator(plain, "create_add", _INTEGERS, compares=False)

    def operator(self: Any, other: Any) -> Any:
        if type(self.type) is not core.pointer_type or type(other) is not core.tensor:
            return add(self, other)
        if other.dtype.name not in _INTEGERS:
            return plain(self, other, _semantic=interpreter_semantic)
        address = interpreter_builder.create_addptr(self.handle, other.handle)
        kind = core.block_type(self.type, other.type.shape) if other.type.is_block() else self.type
        return core.tensor(address, kind)

    return operator


_OPERATORS = {"__add__": _addition(core.tensor.__add__)}
for _operations, _types in ((_COMPARISONS, _INTEGERS), (_ARITHMETIC, _INTEGERS), (_BITWISE, ("int1", *_INTEGERS))):
    for _name, _operation in _operations.items():
        _plain, _compares = getattr(core.tensor, _name), _operations is _COMPARISONS
        _OPERATORS[_name] = _operator(_plain, _operation, _types, compares=_compares)


@contextlib.contextmanager
def fast_operators() -> Iterator[None]:
    """Puts these operators in the place of Triton's, which are equal but for time; inside `cached_types`."""
    kept = {name: core.tensor.__dict__[name] for name in _OPERATORS}
    for name, operator in _OPERATORS.items():
        setattr(core.tensor, name, operator)
    try:
        yield
    finally:
        for name, operator in kept.items():
            setattr(core.tensor, name, operator)
