"""Byte layout of an op's memory: pure arithmetic, the one place that knows where anything lies.

An op uses five blocks of memory:

control  symmetric, the op's own: flags, counts and the expert ids that other ranks write.
dispatch symmetric, shared by sequential ops: the rows that other ranks write.
combine  symmetric, shared by sequential ops: the rows that other ranks read.
local    this rank's only: epochs and the routing record.
result   this rank's only, shared by sequential ops: what combine returns.

A kernel receives one table of addresses, `[number of regions, W]`: entry (region, rank) is where `rank` holds the
region; for regions of the local and result blocks only this rank's own column is set.
"""

import enum
from dataclasses import dataclass

import torch

from ep_a2a.config import EpDispatchCombineConfig

REGION_ALIGNMENT_BYTES = 256


class Region(enum.IntEnum):
    """Rows of the address table. Device code uses the same numbers (kernels/primitives.py)."""

    POISON = 0
    COUNT_FLAGS = 1
    DISPATCH_FLAGS = 2
    COMBINE_FLAGS = 3
    COUNTS = 4
    INDICES = 5
    SOURCE_POSITIONS = 6
    TOKENS = 7
    SCALES = 8
    WEIGHTS = 9
    COMBINE_ROWS = 10
    COMBINE_WEIGHTS = 11
    STATE = 12
    LIMITS = 13
    ROUTES = 14
    SENT_INDICES = 15
    RECV_COUNTS = 16
    TOTAL_RECV = 17
    RESULT = 18
    RESULT_WEIGHTS = 19
    ERROR_RECORD = 20
    EXPERT_COUNTS = 21
    WEIGHT_EPOCHS = 22


class State(enum.IntEnum):
    """Words of the STATE region (int32)."""

    DISPATCH_EPOCH = 0
    COMBINE_EPOCH = 1
    ARRIVED = 2
    PHASE = 3
    ERROR_CLAIMED = 4
    LAST_PAD_ID = 5
    LAST_STRIDE = 6


STATE_WORDS = 16
RECORD_HEADER_WORDS = 8


@dataclass(frozen=True)
class Field:
    """One region inside a block.

    Attributes:
        region: which region.
        offset_bytes: from the start of the block, a multiple of REGION_ALIGNMENT_BYTES.
        dtype, shape: what lies there.
    """

    region: Region
    offset_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the region."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Block:
    """The regions of one block, in order."""

    fields: tuple[Field, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the block, a multiple of REGION_ALIGNMENT_BYTES."""
        return max((_aligned(field.offset_bytes + field.num_bytes) for field in self.fields), default=0)

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

    @classmethod
    def of(cls, config: EpDispatchCombineConfig) -> "OpLayout":
        """The layout of an op; equal on all ranks that agree on the config, but for the size of `local`."""
        world_size, topk, max_tokens = config.world_size, config.topk, config.max_num_inp_token_per_rank
        rows, hidden_dim = config.max_num_recv_tokens, config.hidden_dim
        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        return cls(
            control=_block(
                (Region.POISON, i32, (1,)),
                (Region.COUNT_FLAGS, i32, (world_size,)),
                (Region.DISPATCH_FLAGS, i32, (world_size,)),
                (Region.COMBINE_FLAGS, i32, (world_size,)),
                (Region.COUNTS, i32, (2, world_size, world_size + 1)),
                (Region.WEIGHT_EPOCHS, i32, (world_size,)),
                (Region.INDICES, i32, (rows, topk)),
                (Region.SOURCE_POSITIONS, i32, (rows,)),
            ),
            dispatch=_block(
                (Region.TOKENS, config.wire_dtype, (rows, hidden_dim)),
                (Region.SCALES, torch.uint8, (rows, config.num_scales * config.scale_bytes)),
                (Region.WEIGHTS, f32, (rows, topk)),
            ),
            combine=_block(
                (Region.COMBINE_ROWS, config.combined_dtype, (rows, hidden_dim)),
                (Region.COMBINE_WEIGHTS, f32, (rows, topk)),
            ),
            local=_block(
                (Region.STATE, i32, (STATE_WORDS,)),
                (Region.LIMITS, i64, (1,)),
                (Region.ROUTES, i32, (max_tokens, world_size)),
                (Region.SENT_INDICES, i32, (max_tokens, topk)),
                (Region.RECV_COUNTS, i32, (world_size,)),
                (Region.TOTAL_RECV, i32, (1,)),
                (Region.EXPERT_COUNTS, i32, (max(1, config.num_local_experts),)),
            ),
            result=_block(
                (Region.RESULT, config.combined_dtype, (max_tokens, hidden_dim)),
                (Region.RESULT_WEIGHTS, f32, (max_tokens, topk)),
            ),
        )


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
