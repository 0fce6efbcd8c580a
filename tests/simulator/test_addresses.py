"""Offsets of rows are computed in 64 bits: at the largest sizes a region has more than 2^31 elements.

Small runs show it, too: an offset that reaches beyond a row has been multiplied by a row's width. So every offset of 32
bits must stay inside of a row.
"""

import functools
import inspect
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from ep_a2a.kernels.combine_send_kernels import load_block, push_block, push_weights_of
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.routing_kernels import word_of_tokens
from ep_a2a.ops.memory import BoundMemory
from tests.cases.op_cases import run_case
from tests.simulator.cases import CASES
from tests.simulator.interpreter import Machine, builder, site
from tests.simulator.ranks import Conditions, simulate

OF_ROWS = {
    Region.INDICES,
    Region.TOKENS,
    Region.SCALES,
    Region.WEIGHTS,
    Region.LOW_LATENCY_ROWS,
    Region.LOW_LATENCY_SIDES,
    Region.COMBINE_ROWS,
    Region.COMBINE_SCALES,
    Region.COMBINE_WEIGHTS,
    Region.ROUTES,
    Region.SENT_INDICES,
    Region.DESTINATIONS,
    Region.RESULT,
    Region.RESULT_WEIGHTS,
    Region.EXPERT_ROWS,
    Region.EXPERT_SCALES,
    Region.EXPERT_SLOTS,
    Region.REDUCED_ROWS,
}
"""Regions [rows, width] whose number of rows grows with the tokens."""


def _lines_of(function: Any) -> set[str]:
    lines, first = inspect.getsourcelines(function.fn)
    name = Path(inspect.getfile(function.fn)).name
    return {f"{name}:{line}" for line in range(first, first + len(lines))}


IN_A_TILE = _lines_of(word_of_tokens) | _lines_of(load_block) | _lines_of(push_block) | _lines_of(push_weights_of)
"""They access tiles of few tokens or rows. A tile's start has an offset of 64 bits."""
NARROW = "narrow"
"""Attribute of an address: the offset of 32 bits in it, in bytes."""


class Watch:
    """Looks at every address that kernels compute.

    Attributes:
        too_narrow: places in the kernels' source whose offsets of 32 bits have reached beyond a row.
        num_wide: addresses with an offset of 64 bits.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.too_narrow: set[str] = set()
        self.num_wide = 0
        self._rows: dict[tuple[int, int], int] = {}
        self._add = builder.create_addptr
        bind, launch = BoundMemory.__init__, Machine.launch

        def bind_and_watch(memory: BoundMemory, *args: Any) -> None:
            bind(memory, *args)
            for block, tensor, _ in memory._blocks:
                for each in block.fields:
                    if each.region in OF_ROWS:
                        start = tensor.data_ptr() + each.offset_bytes
                        self._rows[start, start + each.num_bytes] = each.shape[1] * each.dtype.itemsize

        def launch_and_watch(machine: Machine, rank: Any, kernel: Any, programs: int, args: Any, *more: Any) -> Any:
            for each in args:
                if isinstance(each, torch.Tensor) and each.dim() > 1 and each.numel():
                    start = each.data_ptr()
                    self._rows[start, start + each.nbytes] = each.shape[-1] * each.itemsize
            return launch(machine, rank, kernel, programs, args, *more)

        patch.setattr(BoundMemory, "__init__", bind_and_watch)
        patch.setattr(Machine, "launch", launch_and_watch)
        patch.setattr(builder, "create_addptr", self.add, raising=False)
        for name in ("create_expand_dims", "create_broadcast"):
            patch.setattr(builder, name, functools.partial(self.reshape, getattr(builder, name)), raising=False)
        masked_load, masked_store = Machine.masked_load, Machine.masked_store

        def load_and_watch(machine: Machine, pointers: Any, mask: Any, *args: Any) -> Any:
            self.look(pointers, mask, IN_A_TILE)
            return masked_load(machine, pointers, mask, *args)

        def store_and_watch(machine: Machine, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
            self.look(pointers, mask, IN_A_TILE)
            return masked_store(machine, pointers, value, mask, *args)

        patch.setattr(Machine, "masked_load", load_and_watch)
        patch.setattr(Machine, "masked_store", store_and_watch)

    def add(self, pointer: Any, offset: Any) -> Any:
        """create_addptr."""
        found = self._add(pointer, offset)
        size = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
        is_wide = offset.data.dtype.itemsize == 8
        self.num_wide += is_wide
        narrow = pointer.attr.get(NARROW, 0)
        found.set_attr(NARROW, narrow if is_wide else narrow + size * offset.data.astype(np.int64))
        if found.data.size == 1:
            # its tile is another object, without the attribute
            self.look(found)
        return found

    def reshape(self, create: Any, values: Any, *args: Any) -> Any:
        """create_expand_dims or create_broadcast: vectors of addresses become tiles, offsets and all."""
        found = create(values, *args)
        if NARROW in values.attr:
            offsets = np.broadcast_to(values.attr[NARROW], values.data.shape).astype(np.int64)
            found.set_attr(NARROW, create(TensorHandle(offsets, tl.int64), *args).data)
        return found

    def look(self, pointers: Any, mask: Any = None, allowed: Collection[str] = ()) -> None:
        """Note the place where addresses have offsets of 32 bits beyond a row, if it is not `allowed`."""
        chosen = np.broadcast_to(True if mask is None else mask.data, pointers.data.shape)
        addresses = pointers.data[chosen]
        narrow = np.broadcast_to(np.abs(pointers.attr.get(NARROW, 0)), pointers.data.shape)[chosen]
        for (start, end), width_bytes in self._rows.items():
            if (narrow[(addresses >= start) & (addresses < end)] >= width_bytes).any():
                self.too_narrow |= {site()} - set(allowed)


@pytest.mark.parametrize(
    "name",
    ["low_latency", "bulk_compact", "bounded_compact_cast", "expert_major", "fp8_results", "fp8", "rings"],
)
def test_offsets_of_rows_have_64_bits(name, monkeypatch):
    watch = Watch(monkeypatch)
    case = replace(CASES[name], num_steps=1)
    num_sms = 2 * case.options.get("max_sms", 2)
    assert (
        simulate(case.world_size, run_case, case, conditions=Conditions(num_sms=num_sms)).errors
        == [None] * case.world_size
    )
    assert watch.too_narrow == set()
    assert watch.num_wide > 0
