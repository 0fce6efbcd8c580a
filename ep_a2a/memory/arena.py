"""Arena: hands out memory to ops. Ops of one index share it; `close` gives it back."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.errors import MAX_TOKENS, ClosedError, ConfigMismatchError, DeviceMemoryError, EpA2AError, HostMemoryError
from ep_a2a.memory.allocator_isolation import zeros_outside_pools
from ep_a2a.memory.gpus import ranks_by_gpu, refuse_other_gpus
from ep_a2a.memory.guards import SharedBlocks, outside_modes
from ep_a2a.memory.node_transport import NodeTransport
from ep_a2a.memory.peers import Peers
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.symmetric import SymmetricMemory

logger = logging.getLogger(__name__)

CLOSE_PATIENCE_SECS = 3.0
"""Less than engines give their workers to end. A peer may come later: its mappings stay."""


def default_device() -> torch.device:
    """Returns the current CUDA device, or the CPU without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def allocate_symmetric(rendezvous: Rendezvous, device: torch.device, num_bytes: int) -> SymmetricMemory:
    """Allocate one region on every rank. Collective.

    Args:
        rendezvous: the ranks that take part.
        device: cpu or a CUDA device.
        num_bytes: size of the region, > 0; must be equal on all ranks.

    Raises:
        ConfigMismatchError: ranks ask for different sizes.
        HostMemoryError, DeviceMemoryError, PeerAccessError: the memory cannot be allocated or shared.
    """
    sizes = rendezvous.exchange("symmetric memory size", [num_bytes, device.type])
    if any(size != sizes[0] for size in sizes):
        raise ConfigMismatchError("the same size and kind of symmetric memory on all ranks", f"by rank {sizes}")
    if device.type == "cpu":
        from ep_a2a.memory.host_shm import allocate_host_shared

        return allocate_host_shared(rendezvous, num_bytes)
    from ep_a2a.memory.cuda_p2p import allocate_cuda_peer

    return allocate_cuda_peer(rendezvous, device, num_bytes)


@dataclass(frozen=True)
class BlockSizes:
    """Bytes of an op's memory; symmetric sizes must be equal on all ranks.

    Attributes:
        own: symmetric memory of this op alone.
        shared: symmetric memory that ops share, by role.
        local_own: memory of this rank and op alone.
        local_shared: memory of this rank that ops share, by role.
        record_words: int32 words of the error record that kernels write and the host polls.
        fill_bytes: by shared role, the value of every byte between steps, which ops restore; see SharedBlocks.spoilt.
            Blocks of other roles hold arbitrary bytes.
    """

    own: int
    shared: dict[str, int]
    local_own: int
    local_shared: dict[str, int]
    record_words: int
    fill_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks; the error record does not count."""
        return self.own + sum(self.shared.values()) + self.local_own + sum(self.local_shared.values())


@dataclass
class OpMemory:
    """Memory of one op.

    Attributes:
        symmetric: symmetric memory by role: "own" and the shared roles.
        local_own, local_shared: memory of this rank: the op's own, and shared by role.
        record: the error record, int32, on the host.
        shared_blocks: the blocks that ops of its index share.
        user: the op that lives on this memory.
        table: the address table that kernels read.
        spans: the notes of kernels that note times. Graphs hold the addresses of both, so they outlive the op.
        words: PoisonWord, by which this rank's kernels of the op hear of lost ranks.
    """

    symmetric: dict[str, SymmetricMemory]
    local_own: torch.Tensor
    local_shared: dict[str, torch.Tensor]
    record: torch.Tensor
    shared_blocks: SharedBlocks
    user: weakref.ref[object] | None = None
    table: torch.Tensor | None = None
    spans: torch.Tensor | None = None
    words: Any = None

    @property
    def op(self) -> Any:
        """The open op that lives on this memory, or None."""
        return None if self.user is None else self.user()


class Arena:
    """Hands out symmetric memory to the ops of one group and device.

    Ops of the same index share their large blocks, so their steps must not overlap. The same key gets the same memory
    again, because captured graphs hold raw addresses. A larger op gets new blocks, and earlier ops keep theirs. Methods
    that allocate are collective; all ranks call them in the same order.

    Args:
        group: the ranks that take part.
        device: where the memory lies.
        allocate: a function that makes symmetric memory; None takes allocate_symmetric.
        rendezvous: where all ranks of `group` meet; None makes a new one.

    Raises:
        UnsupportedError: the device is an AMD GPU.

    Attributes:
        between_nodes: moves blocks to other nodes, where memory is mapped inside of a node only; else None.
        number: the place among the arenas of the group, counted from 1, in the order in which they are made.
        peers: which ranks live. When one dies, kernels of the arena's ops that wait for ranks leave.
    """

    between_nodes: NodeTransport | None = None

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        allocate: Callable[[Rendezvous, torch.device, int], SymmetricMemory] | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.group, self.device, self.closed = group, device, False
        self.allocate = allocate or allocate_symmetric
        self.rendezvous = rendezvous or Rendezvous(group)
        with self.rendezvous.telling():
            refuse_other_gpus(device.type)
        self.number = next(self.peers.arena_numbers)
        self._symmetric: weakref.WeakSet[SymmetricMemory] = weakref.WeakSet()
        self._shared_blocks: dict[int, SharedBlocks] = {}
        self._memory: dict[tuple[str, int], OpMemory] = {}
        # held while memory is given back, which another thread may be about to write to
        self._giving_back = threading.RLock()
        self.peers.alarms.add(self)
        self._num_unshared = 0
        self._free_unshared: list[int] = []

    @property
    def peers(self) -> Peers:
        """The ranks of the group, as this process sees them."""
        return self.rendezvous.peers

    def lose(self, gone: tuple[int, ...], masked: set[int]) -> None:
        """Makes the ops' kernels go on without `masked`, or leave since ranks are gone. Any thread may call it."""
        with self._giving_back:
            for words in self._words():
                words.lose(gone, masked)

    def awaited(self) -> list[set[int]]:
        """Returns whom ops await too long, for each that has waited since the last call. Any thread may call it."""
        with self._giving_back:
            return [ranks for words in self._words() if (ranks := words.awaited()) is not None]

    def _words(self) -> list[Any]:
        return [each.words for each in list(self._memory.values()) if each.words is not None and not self.closed]

    def unshared_index(self) -> int:
        """An index that no other op has, for an op whose steps may overlap with any other's. Collective.

        Indices of ops that every rank has dropped without closing them are free again. An op whose calls a graph has
        captured keeps its memory until it is closed, since the graph may be replayed.
        """
        if not self._free_unshared and self._num_unshared:
            self._reclaim()
        if self._free_unshared:
            return self._free_unshared.pop()
        self._num_unshared += 1
        return -self._num_unshared

    def is_unshared(self, index: object) -> bool:
        """Whether `unshared_index` has handed out this index, and nobody has given it back."""
        return isinstance(index, int) and -self._num_unshared <= index < 0 and index not in self._free_unshared

    def _reclaim(self) -> None:
        """Free the indices of dropped ops. Ranks collect garbage at different times, so they agree on the indices."""
        dropped = [-number for number in range(1, self._num_unshared + 1) if self._is_dropped(-number)]
        everywhere = self.rendezvous.exchange("indices of dropped ops", dropped)
        for index in sorted(set(dropped).intersection(*everywhere)):
            for memory in self._memory_of(index):
                memory.user = None
            self.give_back(index)

    def _memory_of(self, index: int) -> list[OpMemory]:
        return [memory for (_, other), memory in self._memory.items() if other == index]

    def _is_dropped(self, index: int) -> bool:
        found = self._memory_of(index)
        unused = not any(memory.op is not None or memory.shared_blocks.streams.has_captured for memory in found)
        return unused and any(memory.user is not None for memory in found)

    def give_back(self, index: int) -> None:
        """Free an index from `unshared_index`; ignore other indices. All ranks call it in the same order."""
        if index < 0:
            self._free_unshared.append(index)

    @functools.cached_property
    def ranks_per_gpu(self) -> int:
        """The most ranks that use one GPU; 0 on CPU. Collective at first, and the same on all ranks."""
        return max(map(len, ranks_by_gpu(self.rendezvous, self.device).values()), default=0)

    @property
    def users(self) -> dict[tuple[str, int], Any]:
        """The living ops by key and index."""
        return {place: op for place, memory in self._memory.items() if (op := memory.op) is not None}

    def acquire(self, key: str, index: int, sizes: BlockSizes) -> OpMemory:
        """Memory for the op of this key and index, zeroed when new. Collective.

        Raises:
            ClosedError: the arena has been closed.
        """
        if self.closed:
            raise ClosedError("an open arena", "a closed one")
        if (key, index) not in self._memory:
            try:
                self._memory[key, index] = self._allocate(self._shared_blocks.setdefault(index, SharedBlocks()), sizes)
            except EpA2AError:
                # on every rank; the index's memory that exists serves the next op
                self.give_back(index)
                raise
            logger.info("allocated memory for op %s index %d: %d bytes in all", key, index, self.num_bytes)
        return self._memory[key, index]

    def _allocate(self, shared: SharedBlocks, sizes: BlockSizes) -> OpMemory:
        symmetric = {
            role: shared.symmetric_block(role, num_bytes, sizes.fill_bytes.get(role), self.symmetric_memory)
            for role, num_bytes in sizes.shared.items()
        }
        own = symmetric["own"] = self.symmetric_memory(sizes.own)
        on_gpu = self.device.type == "cuda"

        def with_local_memory() -> OpMemory:
            try:
                return OpMemory(
                    symmetric,
                    self._zeros(sizes.local_own),
                    {role: shared.local_block(role, size, self._zeros) for role, size in sizes.local_shared.items()},
                    torch.zeros(sizes.record_words, dtype=torch.int32, device="cpu", pin_memory=on_gpu),
                    shared,
                )
            except (RuntimeError, MemoryError) as cause:  # torch's own errors when memory runs out
                kind = DeviceMemoryError if on_gpu else HostMemoryError
                remedy = f"Free memory or lower {MAX_TOKENS}."
                raise kind("memory of this rank for an op", str(cause), remedy) from cause

        try:
            return self.rendezvous.attempt("allocating memory of each rank", with_local_memory)
        except EpA2AError:
            own.close()
            raise

    @outside_modes()
    def symmetric_memory(self, num_bytes: int) -> SymmetricMemory:
        """Zeroed symmetric memory of num_bytes, equal on all ranks, until the arena is closed. Collective."""
        memory = self.allocate(self.rendezvous, self.device, num_bytes)
        self._symmetric.add(memory)
        return memory

    @property
    def _open_symmetric(self) -> list[SymmetricMemory]:
        return [memory for memory in self._symmetric if not memory.closed]

    def _zeros(self, num_bytes: int) -> torch.Tensor:
        return zeros_outside_pools(num_bytes, self.device)

    def shared_local(self, index: int, role: str, num_bytes: int) -> torch.Tensor:
        """Memory of this rank, uint8, at least num_bytes, that ops of `index` share for `role`. Local."""
        return self._shared_blocks[index].local_block(role, num_bytes, self._zeros)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds, symmetric and local."""
        local = sum(each.num_local_bytes for each in self._shared_blocks.values())
        own = sum(memory.local_own.numel() for memory in self._memory.values())
        return sum(memory.num_bytes for memory in self._open_symmetric) + local + own

    def together(self, label: str, work: Callable[[], Any]) -> None:
        """Do `work` on each rank's part of the memory while no rank uses it; if it fails on one rank, all raise."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.rendezvous.barrier(f"{label}: start")
        self.rendezvous.attempt(label, work)

    @property
    def healthy(self) -> bool:
        """Whether no op has recorded a failure here and none was left in the middle of a step."""
        failed = any(int(memory.record[0]) for memory in self._memory.values())
        return not failed and not any(each.spoilt or each.in_use for each in self._shared_blocks.values())

    def close(self, *, alone: bool = False) -> None:
        """Give all memory back; a second call does nothing. No op of this arena may be used afterwards.

        If no op has failed here or is in the middle of a step, the call is collective: it returns when all ranks have
        come, or after CLOSE_PATIENCE_SECS, and the log names the missing ranks. Else it is local. In a forked child it
        frees nothing.

        Args:
            alone: wait for no rank. Other ranks can still use their mappings of this memory.
        """
        if self.closed:
            return
        if not self.rendezvous.process.is_current:
            self.closed = True
            return
        with self._giving_back:
            self.closed = True
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            meets = not alone and bool(self._open_symmetric) and self.healthy
            if meets and (absence := self.rendezvous.leave(CLOSE_PATIENCE_SECS)):
                logger.info("rank %d closes alone: %s", self.rendezvous.rank, absence)
        finally:
            for memory in self._open_symmetric:
                memory.close()
            self._shared_blocks.clear()
            self._memory.clear()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # an exception may well be this rank's only
        self.close(alone=kind is not None)
