"""Types that are remembered while kernels are interpreted equal those that Triton makes, and are gone afterwards.

test_interpreter_operators.py compares what operators make of them.
"""

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from ep_a2a.kernels.interpreter_types import cached_types

ELEMENTS = (tl.int1, tl.uint8, tl.int32, tl.int64, tl.bfloat16, tl.float32, tl.float8e4nv, tl.pointer_type(tl.int32))
SHAPES = ([1], [8], [4, 16], [2, 1, 4])


def facts_of(kind: Any) -> tuple[Any, ...]:
    """What device code and the interpreter see of a type and of a tensor of it."""
    tensor = core.tensor("handle", kind)
    shape = kind.shape.values if kind.is_block() else None
    return (
        str(kind),
        shape,
        getattr(kind, "numel", None),
        kind.scalar,
        tensor.handle,
        tensor.type is kind,
        tensor.dtype,
        tensor.numel.value,
        [size.value for size in tensor.shape],
        interpreter._get_np_dtype(kind),
    )


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("shape", [None, *SHAPES], ids=str)
def test_they_equal_tritons(element: Any, shape: list[int] | None) -> None:
    def make() -> Any:
        return element if shape is None else tl.block_type(element, [tl.constexpr(size) for size in shape])

    expected = facts_of(make())
    with cached_types():
        for _ in range(2):  # made, and remembered
            found = make()
            assert facts_of(found) == expected
            assert shape is None or found == tl.block_type(element, shape)
    assert facts_of(make()) == expected


def test_tritons_own_come_back_after_an_error() -> None:
    before = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    with pytest.raises(ValueError, match="power of 2"), cached_types():
        tl.block_type(tl.int32, [3])
    assert (core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype) == before


def test_pointers_to_different_elements_are_not_taken_for_each_other() -> None:
    with cached_types():
        first, second = (tl.block_type(tl.pointer_type(element), [4]) for element in (tl.int32, tl.float32))
        assert first.element_ty.element_ty != second.element_ty.element_ty
        assert interpreter._get_np_dtype(first) == interpreter._get_np_dtype(second) == np.uint64
