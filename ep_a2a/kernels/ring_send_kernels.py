"""Device helpers that write a chunk of tokens into the ring of a rank on another node."""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import quantize_tile
from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.primitives import address, reduce_max
from ep_a2a.kernels.ring_kernels import (
    CHUNKS,
    CHUNKS_TAKEN,
    HEADER,
    TO_EXPERTS,
    counter_of,
    hand_over,
    has_reached,
    slot_to_fill,
    tokens_of_chunk,
    words_at,
)
from ep_a2a.kernels.send_kernels import copy_row, load_choices, load_for_cast, load_line

ROUTES = tl.constexpr(Region.ROUTES.value)
OWN_LINES = tl.constexpr(Region.OWN_LINES.value)


@portable
def write_row(x, scales, line, token, end, ROW: tl.constexpr, SCALE_DTYPE: tl.constexpr):
    """Writes a token's row and scales at an address, cast to fp8 if asked."""
    ROW_WORDS: tl.constexpr = ROW[0]
    BLOCK_WORDS: tl.constexpr = ROW[1]
    SCALE_WIDTH: tl.constexpr = ROW[3]
    SCALE_LANES: tl.constexpr = ROW[4]
    GROUP: tl.constexpr = ROW[5]
    GROUP_LANES: tl.constexpr = ROW[6]
    GROUPS_LANES: tl.constexpr = ROW[7]
    if GROUP > 0:
        groups, elements = tl.arange(0, GROUPS_LANES), tl.arange(0, GROUP_LANES)
        num_groups: tl.constexpr = ROW_WORDS * 4 // GROUP
        tile = load_for_cast(x, token, end, ROW_WORDS * 4, GROUP, GROUP_LANES, GROUPS_LANES)
        bits, scale_bits = quantize_tile(tile.to(tl.float32), ROW[8])
        inside = (groups < num_groups)[:, None] & (elements < GROUP)[None, :]
        tl.store(words_at(line, 0, tl.uint8) + groups[:, None] * GROUP + elements[None, :], bits, mask=inside)
        made = scale_bits if SCALE_DTYPE == tl.int32 else (scale_bits >> 23).to(tl.uint8)
        tl.store(words_at(line, ROW_WORDS, SCALE_DTYPE) + groups, made, mask=groups < num_groups)
    else:
        copy_row(x, token, words_at(line, 0, tl.int32), ROW_WORDS, BLOCK_WORDS)
        if SCALE_WIDTH > 0:
            at = tl.arange(0, SCALE_LANES)
            token_scales = load_line(scales, token, end, SCALE_WIDTH, SCALE_LANES)
            tl.store(words_at(line, ROW_WORDS, SCALE_DTYPE) + at, token_scales, mask=at < SCALE_WIDTH)


@portable
def write_line(
    x, scales, weights, ids, line, token, end, rows, goes, GPU_LANES: tl.constexpr, RINGS: tl.constexpr,
    ROW: tl.constexpr, SCALE_DTYPE: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Writes one token's line (ring_shape.py) at an address; of a token that does not go there, only its rows."""
    GPUS: tl.constexpr = RINGS[1]
    behind: tl.constexpr = ROW[0] + ROW[2]
    choices, local_ranks = tl.arange(0, TOPK_LANES), tl.arange(0, GPU_LANES)
    if goes:
        # asked for before the row's first store, which would wait for them
        token_ids, token_weights = load_choices(ids, weights, token, end, TOPK, TOPK_LANES, HAS_WEIGHTS)
        write_row(x, scales, line, token, end, ROW, SCALE_DTYPE)
        tl.store(words_at(line, behind, tl.int32) + choices, token_ids, mask=choices < TOPK)
        if HAS_WEIGHTS:
            tl.store(words_at(line, behind + TOPK, tl.int32) + choices, token_weights, mask=choices < TOPK)
        tl.store(words_at(line, behind + 2 * TOPK + GPUS, tl.int32), token)
    tl.store(words_at(line, behind + 2 * TOPK, tl.int32) + local_ranks, rows, mask=local_ranks < GPUS)


@portable
def load_rows(routes, token, end, GPU_LANES: tl.constexpr, GPUS: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """[GPU_LANES]: a token's row at each rank of a node, -1 for none, and for all if it is not below `end`."""
    local_ranks = tl.arange(0, GPU_LANES)
    is_there = (local_ranks < GPUS) & (local_ranks * 0 + token < end)
    return tl.load(routes + tl.cast(token, tl.int64) * WORLD_SIZE + local_ranks, mask=is_there, other=-1)


@portable
def write_chunk(
    x, scales, weights, ids, table, slot, first, end, peer, is_last, rank,
    GPU_LANES: tl.constexpr, RINGS: tl.constexpr, OWN_LINE_EACH: tl.constexpr, ROW: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes tokens first ... end - 1 that go to node `peer` at an address, and which line each has taken.

    OWN_LINE_EACH: every token has the line of its place in the chunk; else lines are dense. Returns the words written.
    """
    NODES: tl.constexpr = RINGS[0]
    GPUS: tl.constexpr = RINGS[1]
    LINE_WORDS: tl.constexpr = RINGS[6]
    routes = address(table, ROUTES, rank, WORLD_SIZE, tl.int32) + peer * GPUS
    own_lines = address(table, OWN_LINES, rank, WORLD_SIZE, tl.int32) + peer
    num_lines = tl.full((), 0, tl.int32)
    rows = load_rows(routes, first, end, GPU_LANES, GPUS, WORLD_SIZE)
    for token in range(first, end):
        # on its way while this token's line is written
        following = load_rows(routes, token + 1, end, GPU_LANES, GPUS, WORLD_SIZE)
        goes = reduce_max(rows, 0) >= 0
        if goes | OWN_LINE_EACH:
            line = slot + HEADER * 4 + tl.cast(num_lines, tl.int64) * (LINE_WORDS * 4)
            write_line(
                x, scales, weights, ids, line, token, end, rows, goes, GPU_LANES, RINGS, ROW, SCALE_DTYPE, TOPK,
                TOPK_LANES, HAS_WEIGHTS,
            )  # fmt: skip
        tl.store(own_lines + tl.cast(token, tl.int64) * NODES, tl.where(goes, num_lines, -1))
        num_lines += tl.where(goes | OWN_LINE_EACH, 1, 0)
        rows = following
    header = words_at(slot, 0, tl.int32)
    tl.store(header, num_lines)
    tl.store(header + 1, is_last.to(tl.int32))
    return HEADER + num_lines * LINE_WORDS


@portable
def send_chunk(
    x, scales, weights, ids, table, num_tokens, channel, peer, count, before, num_own, rank,
    GPU_LANES: tl.constexpr, RINGS: tl.constexpr, OWN_LINE_EACH: tl.constexpr, ROW: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Sends a channel's next chunk to node `peer` if the ring has room; returns whether it had.

    Args:
        count, before: chunks of the channel that went there in this step, and before it; num_own: of this step in all.
    """
    SLOTS: tl.constexpr = RINGS[3]
    room = counter_of(table, CHUNKS_TAKEN, rank, TO_EXPERTS, peer, channel, RINGS, WORLD_SIZE)
    has_room = has_reached(room, before + count + 1 - SLOTS)
    if has_room:
        first, end = tokens_of_chunk(num_tokens, channel, count, RINGS)
        slot, written = slot_to_fill(table, CHUNKS, peer, channel, before + count, rank, RINGS, WORLD_SIZE)
        num_words = write_chunk(
            x, scales, weights, ids, table, written, first, end, peer, count + 1 == num_own, rank, GPU_LANES, RINGS,
            OWN_LINE_EACH, ROW, SCALE_DTYPE, TOPK, TOPK_LANES, HAS_WEIGHTS, WORLD_SIZE,
        )  # fmt: skip
        hand_over(
            table, slot, written, num_words, TO_EXPERTS, peer, channel, before + count + 1, rank, RINGS, WORLD_SIZE
        )  # fmt: skip
    return has_room
