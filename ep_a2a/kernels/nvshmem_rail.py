"""A rail whose blocks are put by NVSHMEM from inside of kernels: over InfiniBand, RoCE or NVLink, as NVSHMEM finds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.errors import RankTimeoutError, StateError, UnsupportedError
from ep_a2a.kernels.nvshmem_kernels import (
    NUM_WORDS,
    await_blocks_kernel,
    put_blocks_kernel,
    release_blocks_kernel,
)
from ep_a2a.kernels.variants import Variant, linked_with_nvshmem
from ep_a2a.memory import nvshmem
from ep_a2a.memory.pools import zeros_outside_pools
from ep_a2a.memory.rails import RailTransport, check_blocks

if TYPE_CHECKING:
    from ep_a2a.memory.node_grid import NodeGrid
    from ep_a2a.memory.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

STAGING_BYTES = 128 << 20
"""Of the blocks for all nodes, and as much of those from them; larger exchanges go in rounds."""
WORD_BYTES = 8
"""Of a signal, and of what is copied at once."""
SMALLEST_PIECE_BYTES = 32 << 10
MOST_PIECES = 128
"""Programs that put one block."""
WARPS = 16
LONGEST_MS = 2**31 - 1


class NvshmemRail(RailTransport):
    """Blocks are copied to symmetric memory, put from there into the peers', and copied out. Making one is collective.

    Every wait is bounded, in graphs too: what is behind one that was in vain does nothing, and `check` raises.

    Args:
        rendezvous: all ranks of the group that `grid` is of, not only the rail's: NVSHMEM's memory is theirs.
        grid, timeout_secs, reason: as in RailTransport.
        device: a GPU.

    Raises:
        MissingPackageError, UnsupportedError: NVSHMEM is not there, or runs for other ranks; see memory/nvshmem.py.
        DeviceMemoryError: a rank had not enough memory.
    """

    name = "nvshmem"

    def __init__(
        self, rendezvous: Rendezvous, grid: NodeGrid, device: torch.device, timeout_secs: float, reason: str = ""
    ) -> None:
        super().__init__(grid, timeout_secs, reason)
        wrong = None if device.type == "cuda" else UnsupportedError("GPUs, for rail transport 'nvshmem'", device.type)
        rendezvous.agree("choosing NVSHMEM", wrong)
        self._library = nvshmem.start(rendezvous, device)
        nodes = grid.num_nodes
        self._capacity = STAGING_BYTES // nodes // SMALLEST_PIECE_BYTES * SMALLEST_PIECE_BYTES
        blocks_bytes = nodes * self._capacity
        self._block = self._library.allocate(rendezvous, 2 * blocks_bytes + 3 * nodes * WORD_BYTES)
        self.num_bytes = self._block.num_bytes
        memory = self._block.tensor(device)
        self._staged = memory[:blocks_bytes].view(nodes, self._capacity)
        self._landed = memory[blocks_bytes : 2 * blocks_bytes].view(nodes, self._capacity)
        self._arrived, self._taken, self._unread = memory[2 * blocks_bytes :].view(torch.int64).view(3, nodes)
        elements = [self._library.elements[rank] for rank in grid.rail_ranks]
        self._elements = torch.tensor(elements, dtype=torch.int32, device=device)
        self._state = zeros_outside_pools(NUM_WORDS * WORD_BYTES, device).view(torch.int64)
        self._stopped = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._device, self._is_open = device, True
        linked = linked_with_nvshmem(device)
        self._put, self._await, self._release = (
            Variant(kernel, {"NUM_NODES": nodes}, WARPS, **linked)
            for kernel in (put_blocks_kernel, await_blocks_kernel, release_blocks_kernel)
        )
        for variant, values in zip((self._put, self._await, self._release), self._values(1, 1, timeout_secs)):
            variant.compile(values)
        logger.info("rail of ranks %s: NVSHMEM: %s", ", ".join(map(str, grid.rail_ranks)), reason)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, timeout_secs: float | None = None) -> None:
        """See the base class.

        Raises:
            RankTimeoutError: as `check`.
        """
        self.check()
        check_blocks(received, sent, self.grid.num_nodes)
        received, sent = (blocks.view(torch.uint8).view(self.grid.num_nodes, -1) for blocks in (received, sent))
        bound_secs = self.timeout_secs if timeout_secs is None else timeout_secs
        for first in range(0, sent.shape[1], self._capacity):
            part = slice(first, first + self._capacity)
            self._exchange_part(received[:, part], sent[:, part], bound_secs)
        own = self.grid.node
        received[own].copy_(sent[own])

    def _exchange_part(self, received: torch.Tensor, sent: torch.Tensor, timeout_secs: float) -> None:
        others, num_bytes = self.grid.num_nodes - 1, sent.shape[1]
        if not others:
            return
        piece_bytes = max(SMALLEST_PIECE_BYTES, -(-num_bytes // MOST_PIECES // 16) * 16)
        num_pieces = -(-num_bytes // piece_bytes)
        put, wait, release = self._values(num_bytes, piece_bytes, timeout_secs)
        _copy(self._staged[:, :num_bytes], sent)
        self._put.launch(others * num_pieces, put, self._device)
        self._await.launch(others, wait, self._device)
        _copy(received, self._landed[:, :num_bytes])
        self._release.launch(1, release, self._device)

    def _values(self, num_bytes: int, piece_bytes: int, timeout_secs: float) -> tuple[tuple[Any, ...], ...]:
        """Arguments of the three launches."""
        node, state = self.grid.node, self._state
        bound = self._stopped, min(int(timeout_secs * 1000), LONGEST_MS)
        put = (
            self._staged, self._landed, self._arrived, self._taken, self._elements, state, *bound, num_bytes,
            piece_bytes, self._capacity, node,
        )  # fmt: skip
        wait = (self._arrived, state, *bound, num_bytes, piece_bytes, node)
        return put, wait, (self._taken, self._unread, self._elements, state, num_bytes, piece_bytes, node)

    def check(self) -> None:
        """See the base class."""
        if not self._is_open:
            raise StateError("a rail that works", "one that is closed", "Make a new one on all ranks.")
        node = int(self._stopped[0]) - 1
        if node >= 0:
            missing = self.grid.rail_ranks[node]
            raise RankTimeoutError(
                "every rank within the bound of the exchange", f"nothing from rank {missing} over NVSHMEM",
                "See why it stopped; then make a new manager on all ranks.", missing_ranks=(missing,),
            )  # fmt: skip

    def close(self) -> None:
        """See the base class; the memory is lent to the next rail of this process."""
        if self._is_open:
            self._is_open = False
            torch.cuda.synchronize(self._device)
            self._block.is_lent = False


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies rows of bytes, as words where they consist of such."""
    places = (number for rows in (target, source) for number in (rows.stride(0), rows.data_ptr()))
    if not any(number % WORD_BYTES for number in (target.shape[1], *places)):
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source)
