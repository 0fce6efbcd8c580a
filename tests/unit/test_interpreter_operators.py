"""Operators on remembered types, with Triton's checks and without, give what Triton's own give."""

import contextlib
import operator
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from ep_a2a.kernels import primitives
from ep_a2a.kernels.interpreter_operators import fast_operators
from ep_a2a.kernels.interpreter_types import cached_types
from ep_a2a.kernels.portable import _without_overflow_checks

OPERATORS = ["add", "sub", "mul", "and_", "or_", "xor", "eq", "ne", "lt", "le", "gt", "ge"]
ELEMENTS = {np.bool_: tl.int1, np.int32: tl.int32, np.int64: tl.int64, np.uint32: tl.uint32, np.float32: tl.float32}
SHAPES = [(1,), (4,), (2, 4)]
VALUES = [0, 7, -1, 2**31 - 1, 2**31, 2**40]


def tensor_of(dtype: Any, shape: tuple[int, ...], *, begin: int = -2, is_block: bool = True) -> Any:
    data = (np.arange(begin, begin + np.prod(shape)).reshape(shape)).astype(dtype)
    element = ELEMENTS[dtype]
    kind = tl.block_type(element, list(shape)) if is_block else element
    return core.tensor(interpreter.TensorHandle(data, element), kind)


def pointer(dtype: Any) -> Any:
    kind = tl.pointer_type(ELEMENTS[dtype])
    return core.tensor(interpreter.TensorHandle(np.array([2**40], np.uint64), kind), kind)


def outcome(name: str, lhs: Any, rhs: Any) -> Any:
    try:
        found = getattr(operator, name)(lhs(), rhs())
    except Exception as error:  # noqa: BLE001 - whatever Triton raises
        return type(error)
    data = found.handle.data
    return str(found.type), str(found.handle.dtype), data.dtype, data.shape, data.tolist(), found.shape.values


def compare(name: str, lhs: Any, rhs: Any) -> None:
    patches = interpreter._patch_lang(primitives.pause.fn)
    try:
        with _without_overflow_checks():
            expected = outcome(name, lhs, rhs)
            with cached_types():
                for operators in (contextlib.nullcontext, fast_operators, contextlib.nullcontext):
                    with operators():
                        for _ in range(2):  # made, and remembered
                            assert outcome(name, lhs, rhs) == expected
    finally:
        patches.restore()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("is_block", [True, False])
def test_they_equal_tritons(name: str, dtype: Any, is_block: bool) -> None:
    for shape in SHAPES if is_block else SHAPES[:1]:

        def lhs(shape: Any = shape) -> Any:
            return tensor_of(dtype, shape, is_block=is_block)

        for value in VALUES:
            compare(name, lhs, lambda value=value: value)
            compare(name, lhs, lambda value=value: core.constexpr(value))
        for other in ELEMENTS:
            compare(name, lhs, lambda other=other, shape=shape: tensor_of(other, shape, begin=3, is_block=is_block))
            compare(name, lhs, lambda other=other: tensor_of(other, (1,), begin=3, is_block=False))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_addresses_equal_tritons(dtype: Any) -> None:
    for element in (np.int32, np.float32):
        for shape in SHAPES:
            compare("add", lambda element=element: pointer(element), lambda shape=shape: tensor_of(dtype, shape))
        compare("add", lambda element=element: pointer(element), lambda: tensor_of(dtype, (1,), is_block=False))
        compare("add", lambda element=element: pointer(element), lambda: 3)


def test_tritons_own_come_back() -> None:
    before = dict(core.tensor.__dict__)
    with cached_types(), fast_operators():
        assert core.tensor.__dict__["__add__"] is not before["__add__"]
    assert dict(core.tensor.__dict__) == before
