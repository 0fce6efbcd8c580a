"""Caches Triton's types while kernels are interpreted. Triton makes each anew, which takes a third of the time."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import triton.language as tl
from triton.language import core

from ep_a2a.kernels.triton_parts import get_np_dtype, interpreter

_init_block_type, _init_tensor = core.block_type.__init__, core.tensor.__init__
_numpy_dtype = functools.cache(get_np_dtype)
_blocks: dict[Any, dict[str, Any]] = {}
"""Attributes of block types by (element type, shape)."""
_SHAPE = "ep_a2a_shape"
"""Attribute of a cached block type: the numel and the shape of its tensors."""
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


@contextlib.contextmanager
def cached_types() -> Iterator[None]:
    """Puts the caching functions in the place of Triton's, which are equal but for time."""
    core.block_type.__init__, core.tensor.__init__ = _cached_block_type, _tensor_of_cached_type
    interpreter._get_np_dtype = _dtype_of_element
    try:
        yield
    finally:
        core.block_type.__init__, core.tensor.__init__ = _init_block_type, _init_tensor
        interpreter._get_np_dtype = get_np_dtype
