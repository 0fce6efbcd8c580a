"""Puts of kernels into memory of other nodes, which no store reaches: NVSHMEM's on GPUs, copies of bytes on CPU.

A put names an address of this rank's own symmetric memory; it writes to the same place of the other rank's. NVSHMEM's
device functions are linked in from its bitcode: kernels which put are compiled with it (CompiledKernel.puts).
"""

from typing import Any

import triton.language as tl
from triton.language import core

from ep_a2a.kernels.portable import portable
from ep_a2a.memory import host_shm
from ep_a2a.memory.nvshmem import COMPARE_GE, SIGNAL_ADD

ADD = tl.constexpr(SIGNAL_ADD)
GE = tl.constexpr(COMPARE_GE)


def _call(name: str, args: list[Any], types: tuple[str, ...], semantic: Any) -> Any:
    """A call of a device function of NVSHMEM."""
    functions = {tuple(map(core.dtype, types)): (name, core.dtype("int32"))}
    return core.extern_elementwise("", "", args, functions, is_pure=False, _semantic=semantic)


@core.extern
def put_with_signal(target, source, num_bytes, signal, value, operation, element, _semantic=None):
    """All threads of a program together copy bytes to a symmetric address of an element, then signal it once.

    NVSHMEM's signal alone (nvshmemx_signal_op) is made by each thread: it would count as often as there are threads.
    """
    args = [target, source, num_bytes, signal, value, operation, element]
    types = ("int64", "int64", "int64", "int64", "uint64", "int32", "int32")
    return _call("nvshmemx_putmem_signal_block", args, types, _semantic)


@core.extern
def wait_for_signal(signal, comparison, value, _semantic=None):
    """NVSHMEM's wait, which has no bound."""
    return _call("nvshmem_signal_wait_until", [signal, comparison, value], ("int64", "int32", "uint64"), _semantic)


@core.extern
def _fence(_semantic=None):
    return _call("nvshmem_fence", [], (), _semantic)


@core.extern
def _quiet(_semantic=None):
    return _call("nvshmem_quiet", [], (), _semantic)


def _number(value: Any) -> int:
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


def _interpreted_put(target: Any, source: Any, num_bytes: Any, counter: Any, element: Any) -> None:
    rank = _number(element)
    host_shm.put(_number(target), _number(source), _number(num_bytes), rank)
    host_shm.count(_number(counter), rank)


@portable(interpreted=_interpreted_put)
def put_and_count(target, source, num_bytes, counter, element):
    """Copies bytes to another rank, then adds one to a counter (int64) there; `source` may be used again at once.

    All threads of the program together: what they have written to `source` must be behind a barrier.

    Args:
        target, counter: this rank's addresses (int64) of the places that are meant at the other one.
        element: the other rank's number in NVSHMEM.
    """
    put_with_signal(
        target, source, tl.cast(num_bytes, tl.int64), counter, tl.full((), 1, tl.uint64), tl.full((), ADD, tl.int32),
        tl.cast(element, tl.int32),
    )  # fmt: skip


def _in_order(_counter: object, _target: object) -> None:
    """On CPU bytes that were copied before a counter can be read with it."""


@portable(interpreted=_in_order)
def after_arrival(counter, target):
    """Orders reads behind a counter (address) that has reached `target`, as the transport needs it; returns at once."""
    wait_for_signal(counter, tl.full((), GE, tl.int32), tl.cast(target, tl.uint64))


# on CPU copies are made in their order, and at once
@portable(interpreted=lambda: None)
def fence():
    """Puts to a rank that come after this arrive there behind those before it."""
    _fence()


@portable
def quiet_kernel(table):
    """Ends when all that this rank's kernels have put is there; one program."""
    _quiet()
