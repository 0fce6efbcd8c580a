"""The memory of a manager's ops: handed out here, shared by ops that run one after another, freed by close()."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.errors import AlternationError, ClosedError
from ep_a2a.memory.allocate import allocate_symmetric
from ep_a2a.memory.rendezvous import Rendezvous

if TYPE_CHECKING:
    import torch.distributed as dist

    from ep_a2a.memory.symmetric import SymmetricMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockSizes:
    """Bytes of an op's memory; symmetric sizes must be equal on all ranks.

    Attributes:
        own: symmetric, never shared. shared: symmetric, by role. local_own, local_shared: this rank's only.
        record_words: int32 words of the error record that kernels write and the host polls.
    """

    own: int
    shared: dict[str, int]
    local_own: int
    local_shared: int
    record_words: int


class Slot:
    """Memory that ops of one index share; at most one of them may be between dispatch and combine."""

    def __init__(self) -> None:
        self.symmetric: dict[str, list[SymmetricMemory]] = {}
        self.local: list[torch.Tensor] = []
        self._user: weakref.ref[object] | None = None

    def enter(self, op: object) -> None:
        """Marks the slot as used by an op's step; AlternationError when another op's step is not over."""
        user = None if self._user is None else self._user()
        if user is not None and user is not op:
            raise AlternationError(
                "one op at a time to be between dispatch and combine in the memory that ops of one index share",
                "dispatch of a second op before combine of the first",
                "Give ops whose steps overlap different indices: get_handle(kwargs, index).",
            )
        self._user = weakref.ref(op)

    def leave(self, op: object) -> None:
        """Ends an op's step."""
        if self._user is not None and self._user() is op:
            self._user = None


@dataclass
class OpMemory:
    """What one op got: symmetric memory by role ("own" and the shared roles), local tensors, the error record."""

    symmetric: dict[str, SymmetricMemory]
    local_own: torch.Tensor
    local_shared: torch.Tensor
    record: torch.Tensor
    slot: Slot
    user: weakref.ref[object] | None = None

    @property
    def in_use(self) -> bool:
        """Whether an op that has not been closed lives on this memory."""
        return self.user is not None and self.user() is not None


@dataclass
class Arena:
    """Hands out symmetric memory to the ops of one group and device.

    Ops of the same index share their large blocks, so their steps must not overlap. The same key gets the same
    memory again, because captured graphs hold raw addresses; a larger op later gets new blocks and leaves the
    earlier ops' alone. All methods that allocate are collective and must come in the same order on all ranks.

    Args:
        group: ranks that take part.
        device: where the memory lies.
    """

    group: dist.ProcessGroup
    device: torch.device
    closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.rendezvous = Rendezvous(self.group)
        self._slots: dict[int, Slot] = {}
        self._memory: dict[tuple[str, int], OpMemory] = {}
        self._num_unshared = 0
        self._free_unshared: list[int] = []

    def unshared_index(self) -> int:
        """An index that no other op has: for ops made without a manager, whose steps may overlap with any other's."""
        if self._free_unshared:
            return self._free_unshared.pop()
        self._num_unshared += 1
        return -self._num_unshared

    def give_back(self, index: int) -> None:
        """Lets an index from `unshared_index` be used again, on all ranks in the same order; others are ignored."""
        if index < 0:
            self._free_unshared.append(index)

    def in_use(self, key: str, index: int) -> bool:
        """Whether a living op has the memory of this key and index."""
        return (key, index) in self._memory and self._memory[key, index].in_use

    def acquire(self, key: str, index: int, sizes: BlockSizes) -> OpMemory:
        """Memory for the op of this key and index; zeroed when new. Collective.

        Raises:
            ClosedError: the arena has been closed.
        """
        if self.closed:
            raise ClosedError("an open arena", "a closed one")
        if (key, index) not in self._memory:
            slot = self._slots.setdefault(index, Slot())
            symmetric = {role: self._shared(slot, role, num_bytes) for role, num_bytes in sizes.shared.items()}
            symmetric["own"] = allocate_symmetric(self.rendezvous, self.device, sizes.own)
            self._memory[key, index] = OpMemory(
                symmetric,
                torch.zeros(sizes.local_own, dtype=torch.uint8, device=self.device),
                self._shared_local(slot, sizes.local_shared),
                torch.zeros(sizes.record_words, dtype=torch.int32, pin_memory=self.device.type == "cuda"),
                slot,
            )
            logger.info("allocated memory for op %s index %d: %d bytes in all", key, index, self.num_bytes)
        return self._memory[key, index]

    def _shared(self, slot: Slot, role: str, num_bytes: int) -> SymmetricMemory:
        blocks = slot.symmetric.setdefault(role, [])
        for block in blocks:
            if block.num_bytes >= num_bytes:
                return block
        blocks.append(allocate_symmetric(self.rendezvous, self.device, num_bytes))
        return blocks[-1]

    def _shared_local(self, slot: Slot, num_bytes: int) -> torch.Tensor:
        for tensor in slot.local:
            if tensor.numel() >= num_bytes:
                return tensor
        slot.local.append(torch.zeros(num_bytes, dtype=torch.uint8, device=self.device))
        return slot.local[-1]

    def _all_symmetric(self) -> list[SymmetricMemory]:
        shared = [block for slot in self._slots.values() for blocks in slot.symmetric.values() for block in blocks]
        return shared + [memory.symmetric["own"] for memory in self._memory.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds for ops now, symmetric and local."""
        local = sum(tensor.numel() for slot in self._slots.values() for tensor in slot.local)
        own = sum(memory.local_own.numel() for memory in self._memory.values())
        return sum(block.num_bytes for block in self._all_symmetric()) + local + own

    def close(self) -> None:
        """Gives all memory back; local, and a second call does nothing. No op of this arena may be used afterwards."""
        if self.closed:
            return
        self.closed = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for block in self._all_symmetric():
            block.close()
        self._slots.clear()
        self._memory.clear()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
