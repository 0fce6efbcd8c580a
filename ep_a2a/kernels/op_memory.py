"""Binds an op's layout to the memory an arena gave: views of regions, and the address table that kernels read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ep_a2a.kernels.layout import RECORD_HEADER_WORDS, Field, OpLayout, Region, State
from ep_a2a.memory.arena import BlockSizes

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.kernels.layout import Block
    from ep_a2a.memory.arena import Arena, OpMemory

NS_PER_SEC = 1_000_000_000
FIRST_PAD_ID = -1


class BoundMemory:
    """The memory of one op, region by region.

    Args:
        config: the op's.
        arena: where the memory comes from; acquiring is collective.
        index: the arena's slot.
    """

    def __init__(self, config: EpDispatchCombineConfig, arena: Arena, index: int) -> None:
        self.config = config
        self.layout = OpLayout.of(config)
        self.memory: OpMemory = arena.acquire(config.digest(), index, self._sizes())
        symmetric, layout = self.memory.symmetric, self.layout
        self._blocks: list[tuple[Block, torch.Tensor, tuple[int, ...]]] = [
            (layout.control, symmetric["own"].local, symmetric["own"].peer_addresses),
            (layout.dispatch, symmetric["dispatch"].local, symmetric["dispatch"].peer_addresses),
            (layout.combine, symmetric["combine"].local, symmetric["combine"].peer_addresses),
            (layout.local, self.memory.local_own, self._own_address(self.memory.local_own)),
            (layout.result, self.memory.local_shared, self._own_address(self.memory.local_shared)),
        ]
        self.record = self.memory.record
        self._record_words = self.record.numpy()
        self.table = self._address_table(arena.device)

    def _sizes(self) -> BlockSizes:
        layout = self.layout
        return BlockSizes(
            own=layout.control.num_bytes,
            shared={"dispatch": layout.dispatch.num_bytes, "combine": layout.combine.num_bytes},
            local_own=layout.local.num_bytes,
            local_shared=layout.result.num_bytes,
            record_words=RECORD_HEADER_WORDS + self.config.world_size,
        )

    def _own_address(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() if r == self.config.rank else 0 for r in range(self.config.world_size))

    def _address_table(self, device: torch.device) -> torch.Tensor:
        table = torch.zeros(len(Region), self.config.world_size, dtype=torch.int64)
        for block, _, addresses in self._blocks:
            for field in block.fields:
                for rank, address in enumerate(addresses):
                    table[field.region, rank] = address + field.offset_bytes if address else 0
        table[Region.ERROR_RECORD, self.config.rank] = self.record.data_ptr()
        return table.to(device)

    def _find(self, region: Region) -> tuple[Field, torch.Tensor]:
        for block, tensor, _ in self._blocks:
            for field in block.fields:
                if field.region == region:
                    return field, tensor
        raise KeyError(region)

    def view(
        self, region: Region, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A tensor over this rank's region, from its start; by default all of it in the layout's dtype and shape."""
        field, tensor = self._find(region)
        shape = field.shape if shape is None else shape
        dtype = field.dtype if dtype is None else dtype
        num_bytes = math.prod(shape) * dtype.itemsize
        return tensor[field.offset_bytes : field.offset_bytes + num_bytes].view(dtype).view(shape)

    def initialize(self, timeout_secs: float) -> None:
        """Brings control words, epochs and ids into the state before the first step. Ranks meet before and after."""
        self.view(Region.POISON).zero_()
        for region in (Region.COUNT_FLAGS, Region.DISPATCH_FLAGS, Region.COMBINE_FLAGS, Region.COUNTS):
            self.view(region).zero_()
        self.view(Region.WEIGHT_EPOCHS).zero_()
        self.view(Region.INDICES).fill_(FIRST_PAD_ID)
        self.memory.local_own.zero_()
        self.view(Region.STATE)[State.LAST_PAD_ID] = FIRST_PAD_ID
        self.view(Region.LIMITS).fill_(int(timeout_secs * NS_PER_SEC))
        self.record.zero_()
        if self.memory.local_own.is_cuda:
            torch.cuda.synchronize(self.memory.local_own.device)

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` (int32, wrapping) the last finished step, on every rank alike; for tests of the wrap."""
        word = (epoch + (1 << 31)) % (1 << 32) - (1 << 31)
        self.view(Region.STATE)[[State.DISPATCH_EPOCH, State.COMBINE_EPOCH]] = word
        for region in (Region.COUNT_FLAGS, Region.DISPATCH_FLAGS, Region.COMBINE_FLAGS):
            self.view(region).fill_(word)

    @property
    def failed(self) -> bool:
        """Whether a kernel has recorded a failure; reads one word, without synchronising."""
        return bool(self._record_words[0])

    def record_words(self) -> list[int]:
        """The whole error record, after the device has come to rest."""
        if self.memory.local_own.is_cuda:
            torch.cuda.synchronize(self.memory.local_own.device)
        return [int(word) for word in self._record_words]
