"""BoundMemory: the regions of an op in the memory that its arena gave, and the address table that kernels read.

Besides it the two words there that the host writes while kernels run: the bounds of waits, and the poison word.
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass
from typing import Any

import torch

from ep_a2a import clock
from ep_a2a.config import EpDispatchCombineConfig, Layout
from ep_a2a.config.requirements import checked_seconds
from ep_a2a.errors import PeerAccessError, StateError, UnsupportedError
from ep_a2a.kernels.layout import (
    ARRIVAL_SHIFT,
    RECORD_HEADER_WORDS,
    REMOTE_MIRRORS,
    STEP_SHIFT,
    Block,
    FailureCode,
    OpLayout,
    Record,
    Region,
    Stage,
    State,
)
from ep_a2a.kernels.ring_shape import Rings
from ep_a2a.memory.allocator_isolation import outside_pools
from ep_a2a.memory.arena import Arena, BlockSizes, OpMemory
from ep_a2a.memory.guards import is_capturing, outside_modes
from ep_a2a.memory.nvshmem import NVSHMEM_KIND
from ep_a2a.memory.peers import STOPPED_SECS, TRIAL_SECS
from ep_a2a.ops.failures import COMBINE_PHASE, UINT32_MASK, Failure
from ep_a2a.policy import adds_arrived

logger = logging.getLogger(__name__)

FIRST_PAD_ID = -1
EMPTY_BYTE = 0xFF
NS_PER_SEC = 1_000_000_000
FIRST_EPOCH = 1
FIRST_JUDGED_WAIT = 5
"""Record.WAITS of the first wait behind two steps."""
RANK_BITS = 16
"""Low bits of a poison word, code << 16 | accused rank, that hold the rank (kernels/primitives.py)."""


def block_sizes(config: EpDispatchCombineConfig) -> BlockSizes:
    """Bytes that an op takes from an arena when it is built. Pure arithmetic."""
    layout = OpLayout.of(config)
    dispatch, combine = shared_roles(config)
    return BlockSizes(
        own=layout.control.num_bytes,
        shared={dispatch: layout.dispatch.num_bytes, combine: layout.combine.num_bytes},
        local_own=layout.local.num_bytes,
        local_shared={"result": layout.result.num_bytes, "expert": layout.expert.num_bytes},
        record_words=RECORD_HEADER_WORDS + 2 * config.world_size,
        fill_bytes={combine: EMPTY_BYTE} if _leaves_empty(config) else {},
    )


def _addresses(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def _leaves_empty(config: EpDispatchCombineConfig) -> bool:
    return not (config.uses_rings or adds_arrived(config))


def shared_roles(config: EpDispatchCombineConfig) -> tuple[str, str]:
    """Roles of an op's dispatch and combine blocks, which ops of one index share.

    Ops share a combine block only if they leave the same byte in it between steps. Where ranks may be masked, ops of
    other configs share none: a masked rank that wakes may still store there, at the places of its own rows.
    """
    of_config = f" of {config.digest()}" if config.masks else ""
    return f"dispatch{of_config}", f"{'combine' if _leaves_empty(config) else 'combine_unmarked'}{of_config}"


@dataclass(frozen=True)
class Timeouts:
    """Seconds that one wait for other ranks may take.

    Attributes:
        step_secs: in any step but the first.
        first_step_secs: in the first since the op was built or reset, in which other ranks may still be loading,
            compiling or capturing.
    """

    step_secs: float
    first_step_secs: float

    @classmethod
    def of(cls, config: EpDispatchCombineConfig) -> Timeouts:
        """The time-outs of an op's config."""
        return cls(config.timeout, config.first_timeout)

    @classmethod
    def same(cls, timeout_secs: float) -> Timeouts:
        """The same time-out for all steps.

        Raises:
            ConfigError: it is not a number of seconds that the kernels' clock can count.
        """
        timeout_secs = checked_seconds("timeout_secs", timeout_secs)
        return cls(timeout_secs, timeout_secs)

    def of_step(self, epoch: int) -> float:
        """The time-out of a step, in seconds; steps count from 1."""
        return self.first_step_secs if epoch == FIRST_EPOCH else self.step_secs

    def in_nanoseconds(self) -> tuple[int, int]:
        """In the order in which kernels read them: of a step, of the first step."""
        return int(self.step_secs * NS_PER_SEC), int(self.first_step_secs * NS_PER_SEC)

    def named(self, epoch: int) -> str:
        """The time-out that held in a step, as "name = seconds"."""
        if epoch == FIRST_EPOCH and self.first_step_secs != self.step_secs:
            return f"first_timeout_secs = {self.first_step_secs:g}"
        return f"timeout_secs = {self.step_secs:g}"


def failure_of(word: int) -> Failure | None:
    """Returns the failure that a poison word reports; None for 0."""
    return Failure(word >> RANK_BITS, word & ((1 << RANK_BITS) - 1)) if word else None


class PoisonWord:
    """This rank's poison word: kernels that wait leave when it is not 0, and later ones send nothing. And its masks.

    On a GPU copies go by a stream of their own, so that nothing waits for kernels that still run. `lose` makes no call
    that would break the capture of a graph in another thread.

    Args:
        config: the op's.
        words: int32, region POISON of the op's memory.
        record_words: the error record.

    Attributes:
        word: [1]. Work that is enqueued behind a kernel reads there what this kernel has met.
        masked_there, reported: [1], as of Poison.
        masked: the ranks that are masked; a new set whenever one is added.
    """

    def __init__(self, config: EpDispatchCombineConfig, words: torch.Tensor, record_words: Any) -> None:
        self._config, self._record_words = config, record_words
        self.word, self.masked_there, self.reported = words[:, None]
        self.forget()
        on_gpu = words.is_cuda
        self._stream = torch.cuda.Stream(words.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._seen, self._posted, self._masks = (
            torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu) for _ in range(3)
        )

    def forget(self) -> None:
        """Forgets masks and waits, when the op begins anew."""
        self.masked, self._wait, self._began_at, self._looked_at = frozenset[int](), 0, 0.0, clock.now()

    def read(self) -> Failure | None:
        """Returns the failure that any rank had reported here when the kernels that this rank has waited for ended."""
        if self._stream is None:
            return failure_of(int(self.word))
        with torch.cuda.stream(self._stream):
            self._seen.copy_(self.word, non_blocking=True)
        self._stream.synchronize()
        return failure_of(int(self._seen))

    def lose(self, gone: tuple[int, ...], masked: set[int]) -> None:
        """Makes kernels leave since ranks are gone; where ranks may be masked, go on without `masked`.

        Also those that run. Returns at once; any thread may call it.
        """
        if self._config.masks:
            self.masked |= masked
            gone = tuple(self.masked & {self._config.rank})
        # an earlier failure takes precedence; a GPU's word cannot be seen at once
        if gone and (self._stream is not None or not int(self.word)):
            self._write(self.word, self._posted, FailureCode.TIMEOUT << RANK_BITS | gone[0])
        self._write(self.masked_there, self._masks, sum(1 << rank for rank in self.masked))

    def awaited(self) -> set[int] | None:
        """Returns whom kernels await for mask_after_secs; None where they have not waited since the last call."""
        words, ranks = self._record_words, Record.RANKS + self._config.world_size
        wait, late = int(words[Record.WAITS]), words[ranks:].nonzero()[0].tolist()
        words[Record.WAITS] = words[ranks:] = 0
        away_secs, self._looked_at = clock.now() - self._looked_at, clock.now()
        if away_secs > STOPPED_SECS:
            # the others may have waited for this rank meanwhile
            self._began_at += away_secs
        if wait not in (0, self._wait):
            self._wait, self._began_at = wait, self._looked_at
        # the trial ends mask_after_secs after the wait has begun; a wait of the second step may be for a first one
        is_long = self._looked_at >= self._began_at + self._config.mask_after_secs - TRIAL_SECS
        if not wait:
            return None
        return {*late} if wait >= FIRST_JUDGED_WAIT and is_long else set()

    def _write(self, place: torch.Tensor, staged: torch.Tensor, value: int) -> None:
        staged.numpy()[0] = value
        with (
            torch.inference_mode(),
            contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream),
        ):
            place.copy_(staged, non_blocking=True)


class BoundMemory:
    """The memory of one op, region by region.

    Args:
        config: the op's.
        arena: where the memory comes from; acquiring is collective.
        index: the place in the arena.

    Attributes:
        name: of the op, for readers; equal on all ranks.
        failure_key: names the failure of this op's steps, if one comes, on all ranks.
        timeouts: bounds of the kernels' waits.
        poison: this rank's poison word.
        record_words: the error record, readable without synchronising; the first word is 0 until a kernel has failed.
        dispatch_addresses: of this rank's dispatch block. A peer that has its own rows begins the next dispatch and
            writes there, while this rank may still be sending to others from there: combine copies such rows first.
        received: the addresses of what dispatch returns: that block, and the received ids, which lie elsewhere.
    """

    def __init__(self, config: EpDispatchCombineConfig, arena: Arena, index: int) -> None:
        self.config = config
        self.layout = OpLayout.of(config)
        if config.layout == Layout.EXPERT_MAJOR:
            logger.info(
                "layout expert_major: %d bytes on rank %d for the rows of %d experts",
                self.layout.expert.num_bytes,
                config.rank,
                config.num_local_experts,
            )
        self.acquired: OpMemory = arena.acquire(config.digest(), index, block_sizes(config))
        self.peers, self.failure_key = arena.peers, ""
        self.timeouts = Timeouts.of(config)
        symmetric, layout = self.acquired.symmetric, self.layout
        dispatch, combine = (symmetric[role] for role in shared_roles(config))
        local, shared = self.acquired.local_own, self.acquired.local_shared
        self._blocks: list[tuple[Block, torch.Tensor, tuple[int, ...]]] = [
            (layout.control, symmetric["own"].local, symmetric["own"].peer_addresses),
            (layout.dispatch, dispatch.local, dispatch.peer_addresses),
            (layout.combine, combine.local, combine.peer_addresses),
            (layout.local, local, self._own_address(local)),
            (layout.result, shared["result"], self._own_address(shared["result"])),
            (layout.expert, shared["expert"], self._own_address(shared["expert"])),
        ]
        self._fields = {field.region: (field, tensor) for block, tensor, _ in self._blocks for field in block.fields}
        self._arena, self.index = arena, index
        self.name = f"the op of index {index} in arena {arena.number} of the group"
        self._locals: dict[str, torch.Tensor] = {}
        self.record = self.acquired.record
        self.record_words = self.record.numpy()
        self.dispatch_addresses = _addresses(dispatch.local)
        self.received = self.dispatch_addresses, _addresses(self.view(Region.INDICES))
        if self.acquired.table is None:
            self.acquired.table = self._address_table(arena.device)
        self.table = self.acquired.table
        behind = self.table[len(Region) * config.world_size :]
        self.steps, self.spans_address = behind[: len(Stage)], behind[len(Stage) :]
        self.poison = self.acquired.words = PoisonWord(config, self.view(Region.POISON), self.record_words)

    def _own_address(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() if r == self.config.rank else 0 for r in range(self.config.world_size))

    def _address_table(self, device: torch.device) -> torch.Tensor:
        table = torch.zeros(len(Region), self.config.world_size, dtype=torch.int64, device="cpu")
        for block, _, addresses in self._blocks:
            for field in block.fields:
                for rank, address in enumerate(addresses):
                    table[field.region, rank] = address + field.offset_bytes if address else 0
        table[Region.ERROR_RECORD, self.config.rank] = self.record.data_ptr()
        rings = Rings.of(self.config)
        if rings.by_puts or rings.by_host:
            self._point_at_mirrors(table, by_puts=rings.by_puts)
        words = torch.cat([table.flatten(), table.new_zeros(len(Stage) + 1)])
        return outside_pools(lambda: words.to(device), device)

    def _point_at_mirrors(self, table: torch.Tensor, *, by_puts: bool) -> None:
        """Point the columns of ranks on other nodes, which no store reaches, at local mirrors.

        A put kernel copies the mirrors out.
        """
        config, own = self.config, self.acquired.symmetric["own"]
        if by_puts and own.local.is_cuda and own.kind != NVSHMEM_KIND:
            raise UnsupportedError(
                "memory of NVSHMEM's heap, with internode_transport 'nvshmem'",
                own.kind,
                "Get the op from a manager, or give the arena allocate=ep_a2a.memory.nvshmem.allocate_symmetric.",
            )
        nodes = torch.arange(config.world_size, device="cpu") // config.gpu_per_node
        is_far = nodes != nodes[config.rank]
        for memory in self.acquired.symmetric.values():
            unreachable = [r for r, address in enumerate(memory.peer_addresses) if not address and not is_far[r]]
            if unreachable:
                raise PeerAccessError("memory of this node's ranks to be mapped", f"none of ranks {unreachable}")
        table[:, is_far] = 0
        for region, mirror in REMOTE_MIRRORS.items():
            table[region, is_far] = table[mirror, config.rank]
        table[Region.ELEMENTS] = torch.tensor(own.elements, device="cpu")

    @outside_modes()
    def view(
        self, region: Region, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A tensor at the start of this rank's region; by default all of it, in the layout's dtype and shape."""
        field, tensor = self._fields[region]
        shape = field.shape if shape is None else shape
        dtype = field.dtype if dtype is None else dtype
        num_bytes = math.prod(shape) * dtype.itemsize
        return tensor[field.offset_bytes : field.offset_bytes + num_bytes].view(dtype).view(shape)

    def combine_input(self) -> torch.Tensor:
        """The registered combine buffer: a row for each row that the experts can make. The first call allocates it.

        Raises:
            StateError: it does not exist yet and a graph is being captured.
        """
        config = self.config
        return self._local("combine_input", (config.max_num_expert_rows, config.hidden_dim), config.combined_dtype)

    def copy_target(self, role: str, tensor: torch.Tensor, most_rows: int) -> torch.Tensor:
        """Memory of this rank to copy an argument of combine to, in its shape. The first call of a role allocates it.

        Raises:
            StateError: it does not exist yet and a graph is being captured.
        """
        return self._local(role, (most_rows * tensor.shape[-1],), tensor.dtype)[: tensor.numel()].view(tensor.shape)

    def _local(self, role: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # to leave torch's modes takes longer than the rest of the call
        return self._locals[role] if role in self._locals else self._new_local(role, shape, dtype)

    @outside_modes()
    def _new_local(self, role: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if is_capturing(self.acquired.local_own.device):
            raise StateError(
                f"memory for {role} to exist before a graph captures it",
                "the first need of it",
                "Make the same calls once before the capture.",
            )
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = self._arena.shared_local(self.index, role, num_bytes)[:num_bytes].view(dtype).view(shape)
        self._locals[role] = memory
        return memory

    def initialize(self, *, refill: bool) -> None:
        """Bring the memory into the state before the first step. The ranks meet before and after.

        Args:
            refill: whether to refill the blocks that ops share; no op may be in a step then.
        """
        self.failure_key = f"step behind meeting {self._arena.rendezvous.last_meeting}"
        self.acquired.symmetric["own"].local.zero_()
        self.view(Region.LOW_LATENCY_ROWS).view(torch.uint8).fill_(EMPTY_BYTE)
        self.view(Region.INDICES).fill_(FIRST_PAD_ID)
        self.acquired.local_own.zero_()
        self.view(Region.STATE)[State.LAST_PAD_ID] = FIRST_PAD_ID
        self.poison.forget()
        self.peers.forgive()
        self.set_timeouts(self.timeouts)
        self.steps.zero_()
        self.record.zero_()
        if refill or self.acquired.shared_blocks.spoilt:
            self.acquired.shared_blocks.refill()
        if self.acquired.local_own.is_cuda:
            torch.cuda.synchronize(self.acquired.local_own.device)

    def set_timeouts(self, timeouts: Timeouts) -> None:
        """Bound the waits of launches from now on, also of captured graphs."""
        self.timeouts = timeouts
        limits = self.view(Region.LIMITS)
        for place, nanoseconds in enumerate(timeouts.in_nanoseconds()):
            limits[place].fill_(nanoseconds)

    @property
    def poisoned(self) -> bool:
        """Whether a kernel of this rank or of a peer has failed; False while a graph is captured."""
        return not is_capturing(self.acquired.local_own.device) and bool(self.poison.word.any())

    def epochs_seen(self, phase: int) -> dict[str, tuple[int, ...]]:
        """Each rank's epoch in the flags of a phase (1 dispatch, 2 combine), by kind, as uint32 in rank order.

        Empty while a graph is captured. Synchronise the device before.
        """
        if is_capturing(self.acquired.local_own.device):
            return {}
        if phase == COMBINE_PHASE:
            found = {"flags": self._flagged_steps(Region.COMBINE_FLAGS)}
        else:
            # a word that is its own flag has the epoch in its upper half
            found = {
                "counts": self.view(Region.COUNTS)[:, -1] >> 32,
                "flags": self._flagged_steps(Region.DISPATCH_FLAGS),
            }
        return {kind: tuple(epoch & UINT32_MASK for epoch in epochs.tolist()) for kind, epochs in found.items()}

    def _flagged_steps(self, region: Region) -> torch.Tensor:
        """By rank, the step in its flag, as uint32; words that count arrivals hold the lowest bits of its number."""
        flags = self.view(region).long()
        if region is Region.COMBINE_FLAGS and not adds_arrived(self.config):
            return flags & UINT32_MASK
        modulus = 1 << 32 - ARRIVAL_SHIFT
        ended = self.steps[Stage.COMBINE_RECEIVE] >> STEP_SHIFT
        beyond = (flags >> ARRIVAL_SHIFT) - ended
        return ended + (beyond + modulus // 2) % modulus - modulus // 2

    def choices_of_step(self, code: int) -> tuple[int, ...]:
        """The choices that ranks must share, as each rank sent them in its last step. Synchronise the device before.

        Args:
            code: STEP_TOKENS_MISMATCH for the ranks' wire words; WEIGHTS_MISSING for 1 of each rank that gave combine
                no weights, else 0.

        Returns:
            By rank; () while a graph is captured, and if a rank has not sent its choice of this rank's last step.
        """
        if is_capturing(self.acquired.local_own.device):
            return ()
        rank = self.config.rank
        if code == FailureCode.WEIGHTS_MISSING:
            epochs = self._flagged_steps(Region.COMBINE_FLAGS)
            choices = (self.view(Region.WEIGHT_EPOCHS).long() & UINT32_MASK != epochs[rank]).int()
        else:
            words = self.view(Region.COUNTS)[:, -1]
            epochs, choices = words >> 32, words & UINT32_MASK
        return tuple(choices.tolist()) if bool((epochs == epochs[rank]).all()) else ()

    def synchronized_record(self) -> list[int]:
        """The whole error record, after synchronising the device; while a graph is captured, without."""
        device = self.acquired.local_own.device
        if device.type == "cuda" and not is_capturing(device):
            torch.cuda.synchronize(device)
        return [int(word) for word in self.record_words]
