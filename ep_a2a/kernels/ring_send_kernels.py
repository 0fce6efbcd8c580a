"""Device helpers that write a chunk of tokens into the ring of a rank on another node."""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels import ring_kernels as ring
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import address, full_like, reduce_max
from ep_a2a.kernels.ring_shape import HEADER_WORDS, ChunkWord
from ep_a2a.kernels.send_kernels import cast_row, load_choices, load_line, load_row


class Source(NamedTuple):
    """This rank's tokens of a step, num_tokens of them, as exchange_kernel takes them; first_row as in DispatchStep."""

    x: tl.tensor
    scales: tl.tensor
    weights: tl.tensor
    ids: tl.tensor
    num_tokens: tl.tensor
    first_row: tl.tensor


@portable
def write_row(source, line, token, end, ROW: tl.constexpr, LINE: tl.constexpr):
    """Writes a token's row and scales at an address, cast to fp8 if asked."""
    target, at = ring.words_at(line, 0, tl.int32), tl.arange(0, LINE.SCALE_LANES)
    if ROW.GROUP > 0:
        tiles = load_row(source.x, token, end, 0, ROW)
        words, scales = cast_row(tiles, source.scales, source.x.dtype.element_ty, ROW)
        offsets = tl.arange(0, words.shape[0])
        tl.store(target + offsets, words, mask=offsets < ROW.ROW_WORDS)
    else:
        for first_word in tl.static_range(0, ROW.ROW_WORDS, ROW.BLOCK_WORDS):
            offsets = first_word + tl.arange(0, ROW.BLOCK_WORDS)
            words = load_row(source.x, token, end, first_word, ROW)[0]
            tl.store(target + offsets, words, mask=offsets < ROW.ROW_WORDS)
        if LINE.SCALE_WIDTH > 0:
            scales = load_line(source.scales, token, end, LINE.SCALE_WIDTH, LINE.SCALE_LANES)
    if LINE.SCALE_WIDTH > 0:
        scales_at = ring.words_at(line, ROW.ROW_WORDS, LINE.SCALE_DTYPE) + at
        tl.store(scales_at, scales.to(LINE.SCALE_DTYPE), mask=at < LINE.SCALE_WIDTH)


@portable
def write_line(source, line, token, end, rows, goes, op, R: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr):
    """Writes one token's line (ring_shape.py) at an address; of a token that does not go there, only its rows."""
    choices, local_ranks = tl.arange(0, op.TOPK_LANES), tl.arange(0, R.GPU_LANES)
    if goes:
        # asked for before the row's first store, which would wait for them
        ids, weights = load_choices(source.ids, source.weights, token, end, op, LINE.HAS_WEIGHTS)
        write_row(source, line, token, end, ROW, LINE)
        tl.store(ring.words_at(line, LINE.IDS_AT, tl.int32) + choices, ids, mask=choices < op.TOPK)
        if LINE.HAS_WEIGHTS:
            tl.store(ring.words_at(line, LINE.WEIGHTS_AT, tl.int32) + choices, weights, mask=choices < op.TOPK)
        tl.store(ring.words_at(line, LINE.TOKEN_AT, tl.int32), token)
    tl.store(ring.words_at(line, LINE.ROWS_AT, tl.int32) + local_ranks, rows, mask=local_ranks < R.GPUS)


@portable
def load_rows(routes, token, end, op, R: tl.constexpr):
    """[GPU_LANES] a token's row index at each rank of a node, -1 for none; none from token `end` on."""
    local_ranks = tl.arange(0, R.GPU_LANES)
    is_there = (local_ranks < R.GPUS) & (full_like(local_ranks, token) < end)
    return tl.load(routes + tl.cast(token, tl.int64) * op.WORLD_SIZE + local_ranks, mask=is_there, other=-1)


@portable
def write_chunk(source, op, slot, first, end, peer, is_last, R: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr):
    """Writes tokens first ... end - 1 that go to node `peer` at an address, and which line each has taken.

    Returns:
        The words written.
    """
    routes = address(op, Region.ROUTES, tl.int32) + peer * R.GPUS
    own_lines = address(op, Region.OWN_LINES, tl.int32) + peer
    num_lines = tl.full((), 0, tl.int32)
    rows = load_rows(routes, first, end, op, R)
    for token in range(first, end):
        # on its way while this token's line is written
        following = load_rows(routes, token + 1, end, op, R)
        goes = reduce_max(rows, 0) >= 0
        if goes | LINE.OWN_LINE_EACH:
            line = slot + HEADER_WORDS * 4 + tl.cast(num_lines, tl.int64) * (R.LINE_WORDS * 4)
            write_line(source, line, token, end, rows, goes, op, R, ROW, LINE)
        tl.store(own_lines + tl.cast(token, tl.int64) * R.NODES, tl.where(goes, num_lines, -1))
        num_lines += tl.where(goes | LINE.OWN_LINE_EACH, 1, 0)
        rows = following
    header = ring.words_at(slot, 0, tl.int32)
    tl.store(header + ChunkWord.NUM_LINES, num_lines)
    tl.store(header + ChunkWord.IS_LAST, is_last.to(tl.int32))
    tl.store(header + ChunkWord.FIRST_ROW, source.first_row)
    return HEADER_WORDS + num_lines * R.LINE_WORDS


@portable
def send_chunk(
    source, op, channel, peer, count, before, num_own, R: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr
):
    """Sends a channel's next chunk to node `peer` if the ring has room; returns whether it had.

    Args:
        count, before: chunks of the channel that went there in this step, and before it; num_own: of this step in all.
    """
    room = ring.counter_of(op, Region.CHUNKS_TAKEN, op.rank, peer, channel, R)
    has_room = ring.has_reached(room, before + count + 1 - R.SLOTS)
    if has_room:
        first, end = ring.tokens_of_chunk(source.num_tokens, channel, count, R)
        slot, written = ring.slot_to_fill(op, peer, channel, before + count, R)
        is_last = count + 1 == num_own
        num_words = write_chunk(source, op, written, first, end, peer, is_last, R, ROW, LINE)
        ring.hand_over(op, slot, written, num_words, peer, channel, before + count + 1, R)
    return has_room
