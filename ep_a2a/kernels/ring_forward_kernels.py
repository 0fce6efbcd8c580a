"""Device helpers that forward a chunk of tokens to the ranks of this node."""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels import ring_kernels as ring
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import address, address_at, dispatch_flag, full_like, pick
from ep_a2a.kernels.receive_kernels import rows_before
from ep_a2a.kernels.ring_shape import HEADER_WORDS, ChunkWord
from ep_a2a.kernels.routing_kernels import ids_at, weights_at
from ep_a2a.kernels.target import barrier


class Places(NamedTuple):
    """Bounds of a step's received rows: those that a rank may receive, and W * M, by which source positions count."""

    row_limit: tl.tensor
    positions_per_rank: tl.tensor


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
    op, region: tl.constexpr, blocks, rows, first_rank, WIDTH: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Writes those elements to the row that each rank of the node has for them; -1 for none."""
    for local in tl.static_range(R.GPUS):
        if rows[local] >= 0:
            base = address_at(op, region, first_rank + local, DTYPE)
            target = ring.row_at(base, rows[local], WIDTH, DTYPE)
            for block in tl.static_range((WIDTH + LANES - 1) // LANES):
                at = block * LANES + tl.arange(0, LANES)
                tl.store(target + at, blocks[block], mask=at < WIDTH)


@portable
def copy_line(op, line, recorded, bases, source, places, R: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr):
    """Copies a token to the ranks of this node that it goes to, and records its rows there at `recorded`."""
    first_rank = (op.rank // R.GPUS) * R.GPUS
    line_ids = ring.words_at(line, LINE.IDS_AT, tl.int32)
    # all of a line is asked for before the first store, which would wait for it
    words = load_blocks(ring.words_at(line, 0, tl.int32), ROW.ROW_WORDS, ROW.BLOCK_WORDS)
    scales = load_blocks(ring.words_at(line, ROW.ROW_WORDS, LINE.SCALE_DTYPE), LINE.SCALE_WIDTH, LINE.SCALE_LANES)
    slots = tl.arange(0, op.TOPK_LANES)
    ids = tl.load(line_ids + slots, mask=slots < op.TOPK)
    weights = tl.load(line_ids + op.TOPK + slots, mask=slots < op.TOPK) if LINE.HAS_WEIGHTS else ids
    position = source * places.positions_per_rank + tl.load(ring.words_at(line, LINE.TOKEN_AT, tl.int32))
    # the line's row at each rank of the node, -1 for none
    rows = ()
    for local in tl.static_range(R.GPUS):
        index = tl.load(ring.words_at(line, LINE.ROWS_AT + local, tl.int32))
        row = pick(bases, first_rank + local) + index
        rows = rows + (tl.where((index >= 0) & (row < places.row_limit), row, -1),)
    for local in tl.static_range(R.GPUS):
        tl.store(recorded + local, rows[local])
    store_to_rows(op, Region.TOKENS, words, rows, first_rank, ROW.ROW_WORDS, ROW.BLOCK_WORDS, tl.int32, R)
    if LINE.SCALE_WIDTH > 0:
        store_to_rows(
            op, Region.SCALES, scales, rows, first_rank, LINE.SCALE_WIDTH, LINE.SCALE_LANES, LINE.SCALE_DTYPE, R
        )
    for local in tl.static_range(R.GPUS):
        if rows[local] >= 0:
            peer = first_rank + local
            target = ring.row_at(address_at(op, Region.INDICES, peer, tl.int32), rows[local], op.TOPK, tl.int32)
            tl.store(target + slots, ids_at(ids, peer, op), mask=slots < op.TOPK)
            if LINE.HAS_WEIGHTS:
                target = ring.row_at(address_at(op, Region.WEIGHTS, peer, tl.int32), rows[local], op.TOPK, tl.int32)
                tl.store(target + slots, weights_at(weights, ids, peer, op), mask=slots < op.TOPK)
            positions = address_at(op, Region.SOURCE_POSITIONS, peer, tl.int32)
            tl.store(positions + rows[local], position)


@portable
def copy_lines(op, slot, source_node, chunk, places, R: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr):
    """Copies a chunk's tokens to the ranks of this node that they go to, and records where, for combine."""
    source = source_node * R.GPUS + op.rank % R.GPUS
    # where the source's rows begin at every rank
    bases = full_like(tl.arange(0, op.WORLD_LANES), tl.load(ring.words_at(slot, ChunkWord.FIRST_ROW, tl.int32)))
    if op.COMPACT:
        bases = rows_before(op, source)
    record = address(op, Region.FORWARDED_ROWS, tl.int32)
    num_lines = tl.load(ring.words_at(slot, ChunkWord.NUM_LINES, tl.int32))
    for number in range(num_lines):
        line = slot + HEADER_WORDS * 4 + tl.cast(number, tl.int64) * (R.LINE_WORDS * 4)
        place = tl.cast((source_node * R.NUM_CHUNKS + chunk) * R.CHUNK_TOKENS + number, tl.int64)
        copy_line(op, line, record + place * R.GPUS, bases, source, places, R, ROW, LINE)
    lines = address(op, Region.FORWARDED_LINES, tl.int32)
    tl.store(lines + source_node * R.NUM_CHUNKS + chunk, num_lines)


@portable
def end_stream(op, source_node, channel, num_chunks, R: tl.constexpr):
    """Notes that a channel has forwarded all of a source; the last channel raises the source's flags at this node."""
    chunks = address(op, Region.FORWARDED_CHUNKS, tl.int32) + channel * R.NODES
    tl.store(chunks + source_node, num_chunks)
    counter = address(op, Region.FORWARDED_CHANNELS, tl.int32) + source_node
    barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="sys") == R.CHANNELS - 1:
        tl.store(counter, 0)
        local_ranks = tl.arange(0, R.GPU_LANES)
        present = local_ranks < R.GPUS
        members = (op.rank // R.GPUS) * R.GPUS + tl.where(present, local_ranks, 0)
        flags = address_at(op, Region.DISPATCH_FLAGS, members, tl.int32) + source_node * R.GPUS + op.rank % R.GPUS
        barrier()
        tl.atomic_xchg(flags, full_like(local_ranks, dispatch_flag(op)), mask=present, sem="release", scope="sys")


@portable
def forward_chunk(op, channel, peer, count, before, places, R: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr):
    """Forwards a channel's next chunk from node `peer` if it has come.

    Args:
        count, before: chunks of the channel that came from there in this step, and before it.

    Returns:
        (whether it had, whether it was the last one of the step).
    """
    arrived = ring.counter_of(op, Region.CHUNKS_ARRIVED, op.rank, peer, channel, R)
    has_come = ring.has_reached(arrived, before + count + 1)
    is_last = tl.full((), 0, tl.int32)
    if has_come:
        ring.before_reading(arrived, R)
        slot = ring.slot_of(op, op.rank, peer, channel, before + count, R)
        is_last += tl.load(ring.words_at(slot, ChunkWord.IS_LAST, tl.int32))
        copy_lines(op, slot, peer, channel + count * R.CHANNELS, places, R, ROW, LINE)
        ring.give_room(op, peer, channel, before + count + 1, R)
        if is_last > 0:
            end_stream(op, peer, channel, count + 1, R)
    return has_come, is_last > 0
