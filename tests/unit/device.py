"""Shared by tests of device helpers, which run in Triton's interpreter."""

import torch

from ep_a2a.kernels.constants import Shape
from ep_a2a.kernels.layout import Region, Stage, padded

EMPTY = -1
"""Fills memory to which nothing has been written."""


def as_int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def shape_of(world_size: int, topk: int = 1, *, compact: bool = False) -> Shape:
    return Shape(world_size, padded(world_size), topk, padded(topk), compact, 0, False)


def untouched(*size: int) -> torch.Tensor:
    """int32 for a kernel's results; no helper gives 77 everywhere."""
    return torch.full(size, 77, dtype=torch.int32)


def table_of(world_size: int, regions: dict[tuple[Region, int], torch.Tensor]) -> torch.Tensor:
    """An address table with the given (region, rank), and step counters behind it."""
    table = torch.zeros(len(Region) * world_size + len(Stage), dtype=torch.int64)
    for (region, rank), memory in regions.items():
        table[region * world_size + rank] = memory.data_ptr()
    return table
