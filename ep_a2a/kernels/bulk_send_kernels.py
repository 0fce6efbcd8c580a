"""Device helpers of bulk dispatch that send tokens one by one, each with all warps of a program.

A program keeps what it knows about ranks in vectors, and sends a row to a token's ranks in a loop: the code is the same
for any number of ranks.
"""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import address, address_at, full_like, pick
from ep_a2a.kernels.routing_kernels import destinations_of, ids_at, ranks_in_turn, weights_at
from ep_a2a.kernels.send_kernels import cast_row, load_choices, load_line, load_row

# Places whose addresses a program picks from a vector before it sends words to any of them.
MOST_PICKED = tl.constexpr(4)


class Beside(NamedTuple):
    """What belongs to a token's row, in registers: its given scales, its ids and weights."""

    scales: tl.tensor
    ids: tl.tensor
    weights: tl.tensor


class Places(NamedTuple):
    """Where a token goes: vectors with a place for each of the most ranks that it may go to (destinations_of).

    peers: ranks. goes: whether a row goes there. The others: where the row and what belongs to it begin there.
    """

    peers: tl.tensor
    goes: tl.tensor
    words: tl.tensor
    scales: tl.tensor
    weights: tl.tensor
    ids: tl.tensor
    positions: tl.tensor


@portable
def load_beside(given, token, end, op):
    """Load what belongs to a token's row (Beside); nothing is read from token `end` on."""
    ids, weights = load_choices(given.ids, given.weights, token, end, op, op.FORM.HAS_WEIGHTS)
    scales = ids
    if op.ROW.GROUP == 0 and op.LINE.SCALE_WIDTH > 0:
        scales = load_line(given.scales, token, end, op.LINE.SCALE_WIDTH, op.LINE.SCALE_LANES)
    return Beside(scales, ids, weights)


@portable
def targets_of(op, region: tl.constexpr, peers, rows, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """Return where those rows of a region with WIDTH elements per row begin at those ranks."""
    return address_at(op, region, peers, DTYPE) + tl.cast(rows, tl.int64) * WIDTH


@portable
def places_of(step, peers, rows):
    """Return Places. peers, rows: from destinations_of."""
    op = step.op
    return Places(
        peers,
        (rows >= 0) & (rows < step.row_limit),
        targets_of(op, Region.TOKENS, peers, rows, op.ROW.ROW_WORDS, tl.int32),
        targets_of(op, Region.SCALES, peers[:, None], rows[:, None], op.LINE.SCALE_WIDTH, op.LINE.SCALE_DTYPE),
        targets_of(op, Region.WEIGHTS, peers[:, None], rows[:, None], op.TOPK, tl.int32),
        targets_of(op, Region.INDICES, peers[:, None], rows[:, None], op.TOPK, tl.int32),
        targets_of(op, Region.SOURCE_POSITIONS, peers, rows, 1, tl.int32),
    )


@portable
def send_words(words, first_word, places, op):
    """Send words of a token's row, from first_word on, to its Places."""
    num_places: tl.constexpr = places.peers.shape[0]
    picked: tl.constexpr = min(MOST_PICKED, num_places)
    offsets = first_word + tl.arange(0, words.shape[0])
    targets = tl.where(places.goes, places.words.to(tl.int64), 0)
    for first_place in range(0, num_places, picked):
        starts = ()
        for each in tl.static_range(picked):
            starts = starts + (pick(targets, first_place + each),)
        for each in tl.static_range(picked):
            if starts[each] != 0:
                line = tl.multiple_of(starts[each].to(tl.pointer_type(tl.int32)), 16)
                tl.store(line + offsets, words, mask=offsets < op.ROW.ROW_WORDS)


@portable
def send_beside(beside, scales, position, places, op):
    """Send what belongs to a token's row to all its Places at once. scales: given ones, or those of the cast."""
    choices, lanes = tl.arange(0, op.TOPK_LANES)[None, :], tl.arange(0, op.LINE.SCALE_LANES)[None, :]
    goes, peers, ids = places.goes[:, None], places.peers[:, None], beside.ids[None, :]
    if op.LINE.SCALE_WIDTH > 0:
        scales = scales.to(op.LINE.SCALE_DTYPE)[None, :]
        tl.store(places.scales + lanes, scales, mask=goes & (lanes < op.LINE.SCALE_WIDTH))
    if op.FORM.HAS_WEIGHTS:
        weights = weights_at(beside.weights[None, :], ids, peers, op)
        tl.store(places.weights + choices, weights, mask=goes & (choices < op.TOPK))
    tl.store(places.ids + choices, ids_at(ids, peers, op), mask=goes & (choices < op.TOPK))
    tl.store(places.positions, full_like(places.peers, position), mask=places.goes)


@portable
def send_token(given, step, token, last, tiles, beside, peers, rows):
    """Send a token. tiles: of its row, from load_row. beside: Beside. peers, rows: from destinations_of.

    Returns:
        (tiles, Beside) of the next token.
    """
    op = step.op
    # all addresses before the first store, which would wait for each in turn
    places = places_of(step, peers, rows)
    words, scales = tiles[0], beside.scales
    if op.ROW.GROUP > 0:
        words, scales = cast_row(tiles, given.scales, given.x.dtype.element_ty, op.ROW)
    # while this row leaves
    following = load_beside(given, token + 1, last, op)
    send_words(words, 0, places, op)
    send_beside(beside, scales, step.first_position + token, places, op)
    if op.ROW.GROUP == 0:
        for first_word in tl.static_range(op.ROW.BLOCK_WORDS, op.ROW.ROW_WORDS, op.ROW.BLOCK_WORDS):
            send_words(load_row(given.x, token, last, first_word, op.ROW)[0], first_word, places, op)
    # asked for before the stores, it would keep them back: the GPU waits for loads of addresses and of rows alike
    return load_row(given.x, token + 1, last, 0, op.ROW), following


@portable
def send_one_by_one(given, step, first, last, tiles, beside, index, bases, masked):
    """Send tokens first ... last - 1, each with all warps, and record where they went, for combine.

    routes[token, rank] is the row's index among the rows that this rank sends to that rank, or -1.

    Args:
        tiles, beside: of the first token. index: [WORLD_LANES], rows that tokens before it send to each rank.
        bases: [WORLD_LANES], where this rank's rows begin at each rank. masked: from masked_of.
    """
    op = step.op
    sent_ids = address(op, Region.SENT_INDICES, tl.int32)
    routes = address(op, Region.ROUTES, tl.int32)
    lanes, choices = tl.arange(0, op.WORLD_LANES), tl.arange(0, op.TOPK_LANES)
    ranks = ranks_in_turn(op)
    index = tl.gather(index, ranks, 0)
    if op.COMPACT:
        bases = tl.gather(bases, ranks, 0)
    for token in range(first, last):
        token_ids, number = beside.ids, tl.cast(token, tl.int64)
        peers, rows, sent = destinations_of(token_ids, bases + index, op, op.OWNERS, masked)
        tiles, beside = send_token(given, step, token, last, tiles, beside, peers, rows)
        tl.store(routes + number * op.WORLD_SIZE + ranks, tl.where(sent > 0, index, -1), mask=lanes < op.WORLD_SIZE)
        tl.store(sent_ids + number * op.TOPK + choices, token_ids, mask=choices < op.TOPK)
        index += sent
