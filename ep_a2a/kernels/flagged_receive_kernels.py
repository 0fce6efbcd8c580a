"""Device helpers that receive flagged rows: they wait for the words themselves and move them to where experts read."""

import triton.language as tl

from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    EMPTY,
    POLLS_PER_CLOCK,
    address,
    epoch_of,
    overdue,
    pause,
    payload_of,
    reduce_max,
    reduce_sum,
)
from ep_a2a.kernels.receive_kernels import wait_counts

FLAGGED_ROWS = tl.constexpr(Region.FLAGGED_ROWS.value)
FLAGGED_SIDES = tl.constexpr(Region.FLAGGED_SIDES.value)
TOKENS = tl.constexpr(Region.TOKENS.value)
SCALES = tl.constexpr(Region.SCALES.value)
WEIGHTS = tl.constexpr(Region.WEIGHTS.value)
INDICES = tl.constexpr(Region.INDICES.value)
SOURCE_POSITIONS = tl.constexpr(Region.SOURCE_POSITIONS.value)

POSITION_MASK = tl.constexpr(0x7FFFFFFF)
# The highest bit of each byte, which marks the zero bytes of v in (v - 0x01010101) & ~v.
BYTE_SIGNS = tl.constexpr(-0x7F7F7F80)


@portable
def look_at_row(
    rows, sides, epoch, words_at, sides_at, sent, ROW_WORDS: tl.constexpr, SIDE_WORDS: tl.constexpr,
    ALWAYS_FLAGGED: tl.constexpr,
):  # fmt: skip
    """(number of words that have not arrived, words of the row, words beside it).

    Each lane is read by one thread, so that a reduction over the lanes is one verdict for all threads.

    Args:
        words_at, sides_at: lanes; at least as many as a program has threads.
        sent: which words beside the row are sent.
    """
    words = tl.load(rows + words_at, mask=words_at < ROW_WORDS, other=0, volatile=True)
    side = tl.load(sides + sides_at, mask=sent, other=0, volatile=True)
    late_sides = reduce_sum(((epoch_of(side) != epoch) & sent).to(tl.int32), 0)
    if ALWAYS_FLAGGED:
        # no byte of a cast row is 0xFF, and the sender writes bytes: a word is there when none of its bytes is missing
        late = tl.sub(~words, 0x01010101, sanitize_overflow=False) & words & BYTE_SIGNS
        late_words = reduce_sum((late != 0).to(tl.int32), 0)
    else:
        late_words = reduce_sum((words == EMPTY).to(tl.int32), 0)
    if not ALWAYS_FLAGGED:
        position = reduce_sum(tl.where(sides_at == SIDE_WORDS - 1, payload_of(side), 0), 0)
        late_words = tl.where((position < 0) & (late_sides == 0), 0, late_words)
    return late_words + late_sides, words, side


@portable
def take_row_block(
    table, rows, sides, epoch, source, words_at, sides_at, sent, rank, WORLD_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr, SIDE_WORDS: tl.constexpr, ALWAYS_FLAGGED: tl.constexpr,
):  # fmt: skip
    """Waits for a block of a row and for what travels beside it: (words, words beside, poison word)."""
    num_late, words, side = look_at_row(
        rows, sides, epoch, words_at, sides_at, sent, ROW_WORDS, SIDE_WORDS, ALWAYS_FLAGGED
    )
    poison = tl.full((), 0, tl.int32)
    polls = tl.full((), 0, tl.int32)
    deadline = tl.full((), 0, tl.int64)
    while (num_late > 0) & (poison == 0):
        pause(0)
        num_late, words, side = look_at_row(
            rows, sides, epoch, words_at, sides_at, sent, ROW_WORDS, SIDE_WORDS, ALWAYS_FLAGGED
        )
        polls += 1
        if (polls % POLLS_PER_CLOCK == 0) & (num_late > 0):
            poison, deadline = overdue(table, polls, deadline, source, rank, WORLD_SIZE)
    if not ALWAYS_FLAGGED:
        # a row written in full may have been read before its last word came: read it behind the fence
        position = reduce_sum(tl.where(sides_at == SIDE_WORDS - 1, payload_of(side), 0), 0)
        if (position < 0) & (poison == 0):
            tl.atomic_add(sides + SIDE_WORDS - 1, tl.cast(0, tl.int64), sem="acquire", scope="sys")
            words = tl.load(rows + words_at, mask=words_at < ROW_WORDS, other=0, volatile=True)
            # all threads have read before the caller empties the row
            tl.debug_barrier()
    return words, side, poison


@portable
def place_side(
    table, side, sides_at, row, rank, WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, SCALE_WORDS: tl.constexpr,
    BYTE_SCALES: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Writes what travelled beside a row where the experts read it."""
    values = payload_of(side)
    line = tl.cast(row, tl.int64)
    if HAS_SCALES:
        if BYTE_SCALES:
            scales = address(table, SCALES, rank, WORLD_SIZE, tl.uint8) + line * SCALE_WORDS
            tl.store(scales + sides_at, values.to(tl.uint8), mask=sides_at < SCALE_WORDS)
        else:
            scales = address(table, SCALES, rank, WORLD_SIZE, tl.int32) + line * SCALE_WORDS
            tl.store(scales + sides_at, values, mask=sides_at < SCALE_WORDS)
    slots = sides_at - SCALE_WORDS
    ids = address(table, INDICES, rank, WORLD_SIZE, tl.int32) + line * TOPK
    tl.store(ids + slots, values, mask=(slots >= 0) & (slots < TOPK))
    slots = slots - TOPK
    if HAS_WEIGHTS:
        weights = address(table, WEIGHTS, rank, WORLD_SIZE, tl.int32) + line * TOPK
        tl.store(weights + slots, values, mask=(slots >= 0) & (slots < TOPK))
    position = address(table, SOURCE_POSITIONS, rank, WORLD_SIZE, tl.int32) + line
    tl.store(position + (slots - TOPK), values & POSITION_MASK, mask=slots == TOPK)


@portable
def receive_flagged_rows(
    table, epoch, stride, row_limit, rank, receiver, num_receivers,
    TOPK: tl.constexpr, WORLD_SIZE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr, BYTE_SCALES: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    COMPACT: tl.constexpr, SLOTS: tl.constexpr, COUNT_LANES: tl.constexpr, SIDE_LANES: tl.constexpr,
    ALWAYS_FLAGGED: tl.constexpr,
):  # fmt: skip
    """Moves this program's share of the rows from where peers push them to where the experts read them.

    Rows are taken in the order in which they are sent, one from each source in turn. Returns the poison word.
    """
    side_words: tl.constexpr = SCALE_WORDS + 2 * TOPK + 1
    sides_at = tl.arange(0, SIDE_LANES)
    sent = sides_at < side_words
    if not HAS_SCALES:
        sent = sent & (sides_at >= SCALE_WORDS)
    if not HAS_WEIGHTS:
        sent = sent & ((sides_at < SCALE_WORDS + TOPK) | (sides_at == side_words - 1))
    counts, poison = wait_counts(table, epoch, rank, WORLD_SIZE, COUNT_LANES)
    lanes = tl.arange(0, COUNT_LANES)
    sources = lanes // (WORLD_SIZE + 1)
    counts = tl.where((lanes % (WORLD_SIZE + 1) == rank) & (sources < WORLD_SIZE), counts, 0)
    num_units = tl.where(poison == 0, reduce_max(counts, 0) * WORLD_SIZE, 0)
    for unit in range(receiver, num_units, num_receivers):
        index = unit // WORLD_SIZE
        source = (rank + unit) % WORLD_SIZE
        count = reduce_sum(tl.where(sources == source, counts, 0), 0)
        if (index < count) & (poison == 0):
            row = source * stride + index
            if COMPACT:
                row = reduce_sum(tl.where(sources < source, counts, 0), 0) + index
            slot = tl.cast(source * SLOTS + index, tl.int64)
            rows = tl.multiple_of(address(table, FLAGGED_ROWS, rank, WORLD_SIZE, tl.int32) + slot * ROW_WORDS, 16)
            sides = address(table, FLAGGED_SIDES, rank, WORLD_SIZE, tl.int64) + slot * side_words
            target = address(table, TOKENS, rank, WORLD_SIZE, tl.int32) + tl.cast(row, tl.int64) * ROW_WORDS
            for first_word in tl.static_range(0, ROW_WORDS, BLOCK_WORDS):
                words_at = first_word + tl.arange(0, BLOCK_WORDS)
                words, side, late = take_row_block(
                    table, rows, sides, epoch, source, words_at, sides_at, sent, rank, WORLD_SIZE, ROW_WORDS,
                    side_words, ALWAYS_FLAGGED,
                )  # fmt: skip
                poison = tl.where(poison == 0, late, poison)
                wanted = (words_at < ROW_WORDS) & (words_at * 0 + row < row_limit) & (words_at * 0 + poison == 0)
                tl.store(tl.multiple_of(target, 16) + words_at, words, mask=wanted)
                tl.store(rows + words_at, words * 0 + EMPTY, mask=words_at < ROW_WORDS)
                if first_word == 0:
                    if (row < row_limit) & (poison == 0):
                        place_side(
                            table, side, sides_at, row, rank, WORLD_SIZE, TOPK, SCALE_WORDS, BYTE_SCALES, HAS_SCALES,
                            HAS_WEIGHTS,
                        )  # fmt: skip
    return poison
