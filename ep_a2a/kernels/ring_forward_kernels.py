"""Device helpers that forward a chunk of tokens to the ranks of this node."""

import triton.language as tl

from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.primitives import address
from ep_a2a.kernels.receive_kernels import rows_before
from ep_a2a.kernels.ring_kernels import (
    CHUNKS,
    CHUNKS_ARRIVED,
    HEADER,
    TO_EXPERTS,
    before_reading,
    counter_of,
    give_room,
    has_reached,
    pick,
    row_at,
    slot_of,
    words_at,
)

DISPATCH_FLAGS = tl.constexpr(Region.DISPATCH_FLAGS.value)
INDICES = tl.constexpr(Region.INDICES.value)
SOURCE_POSITIONS = tl.constexpr(Region.SOURCE_POSITIONS.value)
TOKENS = tl.constexpr(Region.TOKENS.value)
SCALES = tl.constexpr(Region.SCALES.value)
WEIGHTS = tl.constexpr(Region.WEIGHTS.value)
FORWARDED_CHANNELS = tl.constexpr(Region.FORWARDED_CHANNELS.value)
FORWARDED_CHUNKS = tl.constexpr(Region.FORWARDED_CHUNKS.value)
FORWARDED_LINES = tl.constexpr(Region.FORWARDED_LINES.value)
FORWARDED_ROWS = tl.constexpr(Region.FORWARDED_ROWS.value)


@portable
def load_blocks(source, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """WIDTH elements as a tuple of blocks [LANES]."""
    blocks = ()
    for first in tl.static_range(0, WIDTH, LANES):
        at = first + tl.arange(0, LANES)
        blocks = blocks + (tl.load(source + at, mask=at < WIDTH),)
    return blocks


@portable
def store_to_rows(
    table, region: tl.constexpr, blocks, rows, first_rank, WIDTH: tl.constexpr, LANES: tl.constexpr,
    GPUS: tl.constexpr, DTYPE: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes those elements to the row that each rank of the node has for them; -1 for none."""
    for local in tl.static_range(GPUS):
        if rows[local] >= 0:
            base = address(table, region, first_rank + local, WORLD_SIZE, DTYPE)
            target = row_at(base, rows[local], WIDTH, DTYPE)
            for block in tl.static_range((WIDTH + LANES - 1) // LANES):
                at = block * LANES + tl.arange(0, LANES)
                tl.store(target + at, blocks[block], mask=at < WIDTH)


@portable
def copy_lines(
    table, slot, source_node, chunk, stride, row_limit, positions_per_rank, rank,
    RINGS: tl.constexpr, ROW: tl.constexpr, SCALE_DTYPE: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
):  # fmt: skip
    """Copies a chunk's tokens to the ranks of this node that they go to, and records where, for combine."""
    GPUS: tl.constexpr = RINGS[1]
    CHUNK_TOKENS: tl.constexpr = RINGS[4]
    NUM_CHUNKS: tl.constexpr = RINGS[5]
    LINE_WORDS: tl.constexpr = RINGS[6]
    behind: tl.constexpr = ROW[0] + ROW[2]
    first_rank = (rank // GPUS) * GPUS
    source = source_node * GPUS + rank % GPUS
    bases = tl.arange(0, WORLD_LANES) * 0 + source * stride
    if COMPACT:
        bases = rows_before(table, rank, source, WORLD_SIZE, WORLD_LANES)
    record = address(table, FORWARDED_ROWS, rank, WORLD_SIZE, tl.int32)
    num_lines = tl.load(words_at(slot, 0, tl.int32))
    for number in range(num_lines):
        line = slot + HEADER * 4 + tl.cast(number, tl.int64) * (LINE_WORDS * 4)
        recorded = record + tl.cast((source_node * NUM_CHUNKS + chunk) * CHUNK_TOKENS + number, tl.int64) * GPUS
        line_ids = words_at(line, behind, tl.int32)
        # all of a line is asked for before the first store, which would wait for it
        words = load_blocks(words_at(line, 0, tl.int32), ROW[0], ROW[1])
        line_scales = load_blocks(words_at(line, ROW[0], SCALE_DTYPE), ROW[3], ROW[4])
        ids = load_blocks(line_ids, TOPK, TOPK_LANES)
        weights = load_blocks(line_ids + TOPK, TOPK, TOPK_LANES) if HAS_WEIGHTS else ids
        position = source * positions_per_rank + tl.load(words_at(line, behind + 2 * TOPK + GPUS, tl.int32))
        rows = ()
        for local in tl.static_range(GPUS):
            index = tl.load(words_at(line, behind + 2 * TOPK + local, tl.int32))
            row = pick(bases, first_rank + local, WORLD_LANES) + index
            rows = rows + (tl.where((index >= 0) & (row < row_limit), row, -1),)
        for local in tl.static_range(GPUS):
            tl.store(recorded + local, rows[local])
        store_to_rows(table, TOKENS, words, rows, first_rank, ROW[0], ROW[1], GPUS, tl.int32, WORLD_SIZE)
        if ROW[3] > 0:
            store_to_rows(table, SCALES, line_scales, rows, first_rank, ROW[3], ROW[4], GPUS, SCALE_DTYPE, WORLD_SIZE)
        store_to_rows(table, INDICES, ids, rows, first_rank, TOPK, TOPK_LANES, GPUS, tl.int32, WORLD_SIZE)
        if HAS_WEIGHTS:
            store_to_rows(table, WEIGHTS, weights, rows, first_rank, TOPK, TOPK_LANES, GPUS, tl.int32, WORLD_SIZE)
        for local in tl.static_range(GPUS):
            if rows[local] >= 0:
                positions = address(table, SOURCE_POSITIONS, first_rank + local, WORLD_SIZE, tl.int32)
                tl.store(positions + rows[local], position)
    lines = address(table, FORWARDED_LINES, rank, WORLD_SIZE, tl.int32)
    tl.store(lines + source_node * NUM_CHUNKS + chunk, num_lines)


@portable
def end_stream(
    table, source_node, channel, num_chunks, epoch, rank, GPU_LANES: tl.constexpr, RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Notes that a channel has forwarded all of a source; the last channel to do so tells the ranks of this node."""
    NODES: tl.constexpr = RINGS[0]
    GPUS: tl.constexpr = RINGS[1]
    CHANNELS: tl.constexpr = RINGS[2]
    chunks = address(table, FORWARDED_CHUNKS, rank, WORLD_SIZE, tl.int32) + channel * NODES
    tl.store(chunks + source_node, num_chunks)
    counter = address(table, FORWARDED_CHANNELS, rank, WORLD_SIZE, tl.int32) + source_node
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="sys") == CHANNELS - 1:
        tl.store(counter, 0)
        local_ranks = tl.arange(0, GPU_LANES)
        present = local_ranks < GPUS
        members = (rank // GPUS) * GPUS + tl.where(present, local_ranks, 0)
        flags = address(table, DISPATCH_FLAGS, members, WORLD_SIZE, tl.int32) + source_node * GPUS + rank % GPUS
        tl.debug_barrier()
        tl.atomic_xchg(flags, local_ranks * 0 + epoch, mask=present, sem="release", scope="sys")


@portable
def forward_chunk(
    table, channel, peer, count, before, stride, row_limit, positions_per_rank, epoch, rank,
    GPU_LANES: tl.constexpr, RINGS: tl.constexpr, ROW: tl.constexpr, SCALE_DTYPE: tl.constexpr, TOPK: tl.constexpr,
    TOPK_LANES: tl.constexpr, HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr, WORLD_SIZE: tl.constexpr,
    WORLD_LANES: tl.constexpr,
):  # fmt: skip
    """Forwards a channel's next chunk from node `peer` if it has come.

    Returns:
        (whether it had, whether it was the last one of the step).
    """
    CHANNELS: tl.constexpr = RINGS[2]
    arrived = counter_of(table, CHUNKS_ARRIVED, rank, TO_EXPERTS, peer, channel, RINGS, WORLD_SIZE)
    has_come = has_reached(arrived, before + count + 1)
    is_last = tl.full((), 0, tl.int32)
    if has_come:
        before_reading(arrived, RINGS)
        slot = slot_of(table, CHUNKS, rank, peer, channel, before + count, RINGS, WORLD_SIZE)
        is_last += tl.load(words_at(slot, 1, tl.int32))
        copy_lines(
            table, slot, peer, channel + count * CHANNELS, stride, row_limit, positions_per_rank, rank, RINGS, ROW,
            SCALE_DTYPE, TOPK, TOPK_LANES, HAS_WEIGHTS, COMPACT, WORLD_SIZE, WORLD_LANES,
        )  # fmt: skip
        give_room(table, TO_EXPERTS, peer, channel, before + count + 1, rank, RINGS, WORLD_SIZE)
        if is_last > 0:
            end_stream(table, peer, channel, count + 1, epoch, rank, GPU_LANES, RINGS, WORLD_SIZE)
    return has_come, is_last > 0
