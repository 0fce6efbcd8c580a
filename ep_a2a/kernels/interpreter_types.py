"""Caches Triton's types and constants while kernels are interpreted. Making each anew takes half of the time."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import triton.language as tl
from triton.language import core

from ep_a2a.kernels.triton_parts import get_np_dtype, interpreter, interpreter_semantic

_init_block_type, _init_tensor = core.block_type.__init__, core.tensor.__init__
_plain_operands = interpreter_semantic.binary_op_type_checking_impl
_numpy_dtype = functools.cache(get_np_dtype)
_blocks: dict[Any, dict[str, Any]] = {}
"""Attributes of block types by (element type, shape)."""
_SHAPE = "ep_a2a_shape"
"""Attribute of a cached block type: the numel and the shape of its tensors."""
_constants: dict[tuple[Any, ...], Any] = {}
"""Second operands of integer operations by (element type, id of its sizes, value, whether it is arithmetic)."""
_MOST_CONSTANTS = 1024
_CONSTANT_TYPES = ("int32", "int64")
_SCALAR = tl.constexpr(1), tl.tuple([])


def _cached_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """block_type.__init__ that computes each type's attributes once; pointers are made per argument, so not kept."""
    sizes = tuple([each.value if isinstance(each, tl.constexpr) else each for each in shape])
    key = element_ty.name, sizes
    known = None if element_ty.is_ptr() else _blocks.get(key)
    if known is None:
        _init_block_type(self, element_ty, shape)
        sample = object.__new__(core.tensor)
        _init_tensor(sample, None, self)
        setattr(self, _SHAPE, (sample.numel, sample.shape))
        if not element_ty.is_ptr():
            _blocks[key] = dict(self.__dict__)
    else:
        self.__dict__.update(known)


def _tensor_of_cached_type(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  Triton's name
    """tensor.__init__ with the shape that the type has already."""
    cached = type.__dict__.get(_SHAPE) if type.is_block() else _SCALAR
    if cached is None:  # a type that was made outside
        _init_tensor(self, handle, type)
        return
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = cached


def _dtype_of_element(tt_dtype: Any) -> Any:
    """interpreter._get_np_dtype, asked once per scalar type."""
    element = tt_dtype.element_ty if tt_dtype.is_block() else tt_dtype
    return _numpy_dtype(tl.uint64 if element.is_ptr() else element)


def _operands_with_cached_constant(
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """binary_op_type_checking_impl that makes each integer operand once; no operation changes its operands."""
    kind = lhs.type if type(rhs) is int and type(lhs) is core.tensor else None
    sizes = kind and (kind.__dict__.get(_SHAPE) if kind.is_block() else _SCALAR)
    if sizes is None or lhs.dtype.name not in _CONSTANT_TYPES:
        return _plain_operands(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
    # the sizes of a shape are kept for good, so their identity is that of the shape
    key = lhs.dtype.name, id(sizes), rhs, arithmetic_check
    constant = _constants.get(key)
    if constant is None:
        if len(_constants) >= _MOST_CONSTANTS:
            _constants.clear()
        lhs, constant = _plain_operands(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        # a constant of more bits widens the other operand
        if lhs.dtype.name == constant.dtype.name:
            _constants[key] = constant
    return lhs, constant


def constant_like(operand: Any, value: int) -> Any:
    """The integer as a tensor of an operand's shape and type, or None where it has not been made yet."""
    kind = operand.type
    sizes = kind.__dict__.get(_SHAPE) if kind.is_block() else _SCALAR
    return _constants.get((operand.dtype.name, id(sizes), value, True))


@contextlib.contextmanager
def cached_types() -> Iterator[None]:
    """Puts the caching functions in the place of Triton's, which are equal but for time."""
    core.block_type.__init__, core.tensor.__init__ = _cached_block_type, _tensor_of_cached_type
    interpreter._get_np_dtype = _dtype_of_element
    interpreter_semantic.binary_op_type_checking_impl = _operands_with_cached_constant
    try:
        yield
    finally:
        core.block_type.__init__, core.tensor.__init__ = _init_block_type, _init_tensor
        interpreter._get_np_dtype = get_np_dtype
        interpreter_semantic.__dict__.pop("binary_op_type_checking_impl", None)
