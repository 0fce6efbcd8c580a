"""Byte layout of an op's memory: pure arithmetic, the one place that knows where anything lies.

An op uses six blocks of memory:

control  symmetric, the op's own: flags, counts, expert ids and low-latency rows that other ranks write.
dispatch symmetric, shared by sequential ops: the rows that other ranks write.
combine  symmetric, shared by sequential ops: the result rows that other ranks write. Between steps every bit in it is
         set, which is how a reader knows what has not arrived (kernels/primitives.py, EMPTY). Of an op with rings
         (kernels/ring_shape.py): the result rows that other ranks of the node read, and rings; they hold anything.
         So do the rows where policy.adds_arrived.
local    this rank's only: step counters and the routing record.
result   this rank's only, shared by sequential ops: the tensors that combine returns.
expert   this rank's only, shared by sequential ops: rows by expert, in layout expert_major; else empty.

A kernel receives one table of addresses, `[number of regions, W]`: entry (region, rank) is where `rank` holds the
region; for regions of the local, result and expert blocks only this rank's own column is set. Where kernels cannot
store to ranks of other nodes, their columns lead to mirrors in this rank's memory (REMOTE_MIRRORS), or nowhere. Row
ELEMENTS has the ranks' numbers in NVSHMEM. The op's step counters (Stage) follow the table, and then the address of
where spans are noted (Span), 0 for nowhere.
"""

import math
from dataclasses import dataclass

import torch

from ep_a2a.config import EpDispatchCombineConfig, Layout
from ep_a2a.kernels.device_enum import DeviceEnum, DeviceNumber
from ep_a2a.kernels.ring_shape import Rings
from ep_a2a.policy import MAX_DISPATCH_PROGRAMS

REGION_ALIGNMENT_BYTES = 256
WORD_BYTES = 4


class Region(DeviceEnum):
    """Rows of the address table."""

    POISON = 0
    DISPATCH_FLAGS = 1
    COMBINE_FLAGS = 2
    COUNTS = 3
    INDICES = 4
    SOURCE_POSITIONS = 5
    TOKENS = 6
    SCALES = 7
    WEIGHTS = 8
    COMBINE_ROWS = 9
    COMBINE_WEIGHTS = 10
    STATE = 11
    LIMITS = 12
    ROUTES = 13
    SENT_INDICES = 14
    RECV_COUNTS = 15
    TOTAL_RECV = 16
    RESULT = 17
    RESULT_WEIGHTS = 18
    ERROR_RECORD = 19
    EXPERT_COUNTS = 20
    WEIGHT_EPOCHS = 21
    CHUNK_COUNTS = 22
    LOW_LATENCY_ROWS = 23
    LOW_LATENCY_SIDES = 24
    COMBINE_SCALES = 25
    EXPERT_RECV_COUNT = 26
    EXPERT_ROWS = 27
    EXPERT_SCALES = 28
    EXPERT_WEIGHTS = 29
    EXPERT_SLOTS = 30
    REDUCED_ROWS = 31
    CHUNKS_ARRIVED = 32
    CHUNKS_TAKEN = 33
    CHUNKS = 34
    CHUNKS_BACK = 35
    CHANNEL_STATE = 36
    OWN_LINES = 37
    FORWARDED_CHANNELS = 38
    FORWARDED_CHUNKS = 39
    FORWARDED_LINES = 40
    FORWARDED_ROWS = 41
    STAGED_CHUNKS = 42
    MIRROR_POISON = 43
    MIRROR_COMBINE_FLAGS = 44
    MIRROR_COUNTS = 45
    MIRROR_WEIGHT_EPOCHS = 46
    UNREAD = 47
    ELEMENTS = 48
    CHUNKS_SENT_BACK = 49
    DESTINATIONS = 50


REMOTE_MIRRORS = {
    Region.POISON: Region.MIRROR_POISON,
    Region.COMBINE_FLAGS: Region.MIRROR_COMBINE_FLAGS,
    Region.COUNTS: Region.MIRROR_COUNTS,
    Region.WEIGHT_EPOCHS: Region.MIRROR_WEIGHT_EPOCHS,
}
"""By region: where in this rank's own memory kernels leave the words for ranks that no store reaches."""


class State(DeviceEnum):
    """Words of the STATE region (int32)."""

    ARRIVED = 0
    ERROR_CLAIMED = 1
    LAST_PAD_ID = 2
    LAST_STEP_TOKENS = 3
    NUM_TOKENS = 4


class Poison(DeviceEnum):
    """Words of the POISON region (int32). Kernels read the first two at once.

    WORD: 0, or why this rank's kernels send and wait no more. MASKED: bit r is set where rank r is masked. REPORTED:
    the bits of which the caller knows.
    """

    WORD = 0
    MASKED = 1
    REPORTED = 2


class StepPhase(DeviceEnum):
    """The calls of a step, as the record of a failure names them."""

    DISPATCH = 1
    COMBINE = 2


class FailureCode(DeviceEnum):
    """Kinds of failures: the first word of a failure's record, of which ops/failures.py makes an exception."""

    TIMEOUT = 1
    ALTERNATION = 2
    STEP_TOKENS_MISMATCH = 3
    CAPACITY = 4
    FOREIGN_INDICES = 5
    WEIGHTS_MISSING = 6


class Record(DeviceEnum):
    """Words of the ERROR_RECORD region (int32); from RANKS on there are two for each rank, first one of each.

    WAITS and the second words are no failure, and the host clears them. WAITS: 1 + a number that grows from wait to
    wait, by two in a step, where one takes time; 0 for none. The second word of a rank: 1 where it is awaited.
    DETAIL; words of ranks, by code. TIMEOUT: 0; 1 for ranks whose flag had not come. ALTERNATION: 0; 0.
    STEP_TOKENS_MISMATCH: 1; the wire words of all ranks. CAPACITY: the rows that came; rows by source.
    WEIGHTS_MISSING: 1; 1 for ranks without weights. FOREIGN_INDICES: the token; not written.
    On a rank that learned of the failure from a peer both are those of TIMEOUT.
    """

    CODE = 0
    ACCUSED = 1
    PHASE = 2
    EPOCH = 3
    DETAIL = 4
    WAITS = 5
    RANKS = 8


class Stage(DeviceEnum):
    """The four stages of a step, in order; one launch may do two of them.

    Their counters (int64) lie right behind the address table, so that kernels find them without looking them up.
    """

    DISPATCH_SEND = 0
    DISPATCH_RECEIVE = 1
    COMBINE_SEND = 2
    COMBINE_RECEIVE = 3


class Span(DeviceEnum):
    """Parts of a step whose times programs note when asked: one line of SPAN_WORDS words (int64) each."""

    QUANT_AND_PUT = 0
    COUNT_PUT = 1
    WAIT = 2
    NUMBER_ROWS = 3
    COPY_ROWS = 4
    EXCHANGE_WEIGHTS = 5
    WEIGH_ROWS = 6
    COPY_AND_PUT = 7
    RECV_WAIT = 8
    TOPK_REDUCE = 9
    PREPARE = 10
    POST = 11
    ACCEPT_ROWS = 12
    FINISH = 13


class FlagProgram(DeviceEnum):
    """Programs of a low-latency dispatch that exchange counts and post flags; those behind them move rows."""

    COUNT_PUBLISHER = 0
    FLAG_POSTER = 1


class Checksum(DeviceEnum):
    """Numbers of the checksum that stands for bounds that differ between ranks (ops/bounds.py)."""

    FACTOR = 0x2C1B3C6D
    SHIFT = 15
    MASK = (1 << 31) - 1


STEP_SHIFT = DeviceNumber(16)
"""Bits of a stage's counter below the number of steps. They count the programs of a launch that have ended."""
ARRIVAL_SHIFT = DeviceNumber(11)
"""The same of a word of DISPATCH_FLAGS, and of COMBINE_FLAGS where policy.adds_arrived, for programs that have sent:
policy.MAX_DISPATCH_PROGRAMS at most."""
BOUND_SHIFT = DeviceNumber(3)
"""Bits of a wire word (ops/wire_word.py) below the sender's bound."""
SPAN_STEPS = DeviceNumber(32)
"""Latest steps whose spans are kept, a power of 2."""
SPAN_PROGRAMS = DeviceNumber(512)
"""Programs of a launch whose spans are kept, the first ones."""
SPAN_WORDS = DeviceNumber(4)
"""Start and end, in nanoseconds, and the step that they belong to, counted from 1; the last one is unused."""

STATE_WORDS = 16
RECORD_HEADER_WORDS = int(Record.RANKS)


@dataclass(frozen=True)
class Field:
    """One region inside a block.

    Attributes:
        region: which region.
        offset_bytes: from the start of the block, a multiple of REGION_ALIGNMENT_BYTES.
        dtype, shape: of the tensor there.
    """

    region: Region
    offset_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of the region, in lower case."""
        return self.region.name.lower()

    @property
    def num_bytes(self) -> int:
        """Bytes of the region."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes up to where the next region begins."""
        return _aligned(self.num_bytes)


@dataclass(frozen=True)
class Block:
    """The regions of one block, in order."""

    fields: tuple[Field, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the block, a multiple of REGION_ALIGNMENT_BYTES."""
        return sum(field.padded_bytes for field in self.fields)

    def __getitem__(self, region: Region) -> Field:
        return next(field for field in self.fields if field.region == region)


@dataclass(frozen=True)
class OpLayout:
    """Where everything of one op lies; see the module's docstring for the blocks."""

    control: Block
    dispatch: Block
    combine: Block
    local: Block
    result: Block
    expert: Block

    @classmethod
    def of(cls, config: EpDispatchCombineConfig) -> "OpLayout":
        """The layout of an op; equal on all ranks that agree on the config, but for `local` and `expert`."""
        rings = Rings.of(config)
        return cls(
            control=_control_block(config, rings),
            dispatch=_dispatch_block(config, rings),
            combine=_combine_block(config, rings),
            local=_local_block(config, rings),
            result=_result_block(config),
            expert=_expert_block(config),
        )


I32, I64, F32, U8 = torch.int32, torch.int64, torch.float32, torch.uint8


def _control_block(config: EpDispatchCombineConfig, rings: Rings) -> Block:
    world_size, rows = config.world_size, config.max_num_recv_tokens
    mirrored = world_size if rings.by_puts or rings.by_host else 0
    channels, counted = rings.num_channels, _counted_nodes(rings)
    return _block(
        (Region.POISON, I32, (len(Poison),)),
        (Region.DISPATCH_FLAGS, I32, (world_size,)),
        (Region.COMBINE_FLAGS, I32, (world_size,)),
        (Region.COUNTS, I64, (world_size, world_size + 2)),
        (Region.WEIGHT_EPOCHS, I32, (world_size,)),
        (Region.INDICES, I32, (rows, config.topk)),
        (Region.SOURCE_POSITIONS, I32, (rows,)),
        (Region.LOW_LATENCY_ROWS, config.wire_dtype, (world_size * config.low_latency_tokens, config.hidden_dim)),
        (Region.LOW_LATENCY_SIDES, I64, (world_size * config.low_latency_tokens, side_words(config))),
        (Region.CHUNKS_ARRIVED, I64, (2, counted, channels)),
        (Region.CHUNKS_TAKEN, I64, (2, counted, channels)),
        (Region.MIRROR_POISON, I32, (mirrored and 1,)),
        (Region.MIRROR_COMBINE_FLAGS, I32, (mirrored,)),
        (Region.MIRROR_COUNTS, I64, (mirrored, world_size + 2)),
        (Region.MIRROR_WEIGHT_EPOCHS, I32, (mirrored,)),
        (Region.UNREAD, I64, (int(rings.by_puts),)),
    )


def _dispatch_block(config: EpDispatchCombineConfig, rings: Rings) -> Block:
    rows = config.max_num_recv_tokens
    chunks: tuple[int, ...] = (rings.num_nodes, rings.num_channels, rings.num_slots, rings.slot_words)
    staged: tuple[int, ...] = (rings.num_channels, rings.staged_words)
    if rings.by_host:
        # chunks that the host moves are packed for all nodes at once
        chunks = staged = (rings.num_nodes, rings.node_words(config.max_num_inp_token_per_rank, back=False))
    return _block(
        (Region.TOKENS, config.wire_dtype, (rows, config.hidden_dim)),
        (Region.SCALES, U8, (rows, config.num_scales * config.scale_bytes)),
        (Region.WEIGHTS, F32, (rows, config.topk)),
        (Region.CHUNKS, I32, chunks),
        (Region.STAGED_CHUNKS, I32, staged),
    )


def _combine_block(config: EpDispatchCombineConfig, rings: Rings) -> Block:
    max_tokens = config.max_num_inp_token_per_rank
    # with rings the ranks of a token's node take results from where its experts' ranks keep them
    rows = config.max_num_recv_tokens if config.uses_rings else config.world_size * max_tokens
    chunks: tuple[int, ...] = (rings.num_nodes, rings.num_channels, rings.num_slots, rings.back_slot_words)
    staged: tuple[int, ...] = (0,)
    if rings.by_host:
        chunks = staged = (rings.num_nodes, rings.node_words(max_tokens, back=True))
    return _block(
        (Region.COMBINE_ROWS, config.combine_wire_dtype, (rows, config.hidden_dim)),
        (Region.COMBINE_SCALES, F32, (rows, config.num_combine_scales)),
        (Region.COMBINE_WEIGHTS, F32, (rows, config.topk)),
        (Region.CHUNKS_BACK, I32, chunks),
        (Region.CHUNKS_SENT_BACK, I32, staged),
    )


def _local_block(config: EpDispatchCombineConfig, rings: Rings) -> Block:
    world_size, max_tokens = config.world_size, config.max_num_inp_token_per_rank
    local_experts = max(1, config.num_local_experts)
    num_nodes, channels, num_chunks = rings.num_nodes, rings.num_channels, rings.num_chunks
    return _block(
        (Region.STATE, I32, (STATE_WORDS,)),
        (Region.CHUNK_COUNTS, I64, (MAX_DISPATCH_PROGRAMS, world_size)),
        (Region.LIMITS, I64, (2,)),
        (Region.ROUTES, I32, (max_tokens, world_size)),
        (Region.SENT_INDICES, I32, (max_tokens, config.topk)),
        (Region.DESTINATIONS, I64, (max_tokens, min(world_size, config.topk))),
        (Region.RECV_COUNTS, I32, (2, world_size)),
        (Region.TOTAL_RECV, I32, (1,)),
        (Region.EXPERT_COUNTS, I32, (local_experts,)),
        (Region.EXPERT_RECV_COUNT, I32, (local_experts,)),
        (Region.CHANNEL_STATE, I32, (2, channels, 2, _counted_nodes(rings))),
        (Region.OWN_LINES, I32, (max_tokens if num_nodes else 0, num_nodes)),
        (Region.FORWARDED_CHANNELS, I32, (num_nodes,)),
        (Region.FORWARDED_CHUNKS, I32, (channels, num_nodes)),
        (Region.FORWARDED_LINES, I32, (num_nodes, num_chunks)),
        (Region.FORWARDED_ROWS, I32, (num_nodes, num_chunks * rings.chunk_tokens, rings.gpus_per_node)),
    )


def _result_block(config: EpDispatchCombineConfig) -> Block:
    max_tokens = config.max_num_inp_token_per_rank
    return _block(
        (Region.RESULT, config.combined_dtype, (max_tokens, config.hidden_dim)),
        (Region.RESULT_WEIGHTS, F32, (max_tokens, config.topk)),
    )


def _expert_block(config: EpDispatchCombineConfig) -> Block:
    by_expert = config.layout == Layout.EXPERT_MAJOR
    received_rows = config.world_size * config.max_num_inp_token_per_rank if by_expert else 0
    rows = config.num_local_experts * received_rows
    scale_rows = rows
    if config.column_major_scales:
        scale_rows = config.num_local_experts * config.column_rows(received_rows)
    return _block(
        (Region.EXPERT_ROWS, config.wire_dtype, (rows, config.hidden_dim)),
        (Region.EXPERT_SCALES, U8, (scale_rows, config.num_scales * config.scale_bytes)),
        (Region.EXPERT_WEIGHTS, F32, (rows,)),
        (Region.EXPERT_SLOTS, I32, (received_rows, config.topk)),
        (Region.REDUCED_ROWS, config.combined_dtype, (received_rows, config.hidden_dim)),
    )


def _counted_nodes(rings: Rings) -> int:
    """Nodes whose chunks are counted as they come and go: none where the host moves chunks."""
    return 0 if rings.by_host else rings.num_nodes


def side_words(config: EpDispatchCombineConfig) -> int:
    """Words that travel beside a low-latency row: a word for each scale, id and weight, and the source position."""
    return config.num_scales + 2 * config.topk + 1


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES


def _block(*regions: tuple[Region, torch.dtype, tuple[int, ...]]) -> Block:
    fields: list[Field] = []
    offset_bytes = 0
    for region, dtype, shape in regions:
        fields.append(Field(region, offset_bytes, dtype, shape))
        offset_bytes = _aligned(offset_bytes + fields[-1].num_bytes)
    return Block(tuple(fields))


def padded(count: int) -> int:
    """The smallest power of two that holds `count` lanes; Triton's ranges want powers of two."""
    return 1 << max(0, count - 1).bit_length()
