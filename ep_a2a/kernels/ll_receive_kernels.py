"""Device helpers that receive flagged rows: they wait for the words themselves and move them to where experts read."""

import triton.language as tl

from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region
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
from ep_a2a.kernels.receive_kernels import COUNTS, wait_counts

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
# Above any number of words of a row, in a sum with such a number.
NO_ROW = tl.constexpr(1 << 24)


@portable
def read_beside(sides, count_word, sides_at, sent, SIDE_WORDS: tl.constexpr):
    """The words beside a row, and in lane SIDE_WORDS the flagged word that tells how many rows the source sends.

    Each lane is read by one thread, so that a reduction over the lanes is one verdict for all threads.

    Args:
        sides_at: lanes; at least as many as a program has threads, and more than SIDE_WORDS.
        sent: which of the lanes below SIDE_WORDS are sent.
    """
    is_count = sides_at == SIDE_WORDS
    where = tl.where(is_count, count_word + sides_at * 0, sides + sides_at)
    return tl.load(where, mask=sent | is_count, other=0, volatile=True)


@portable
def judge_beside(side, epoch, index, sides_at, sent, SIDE_WORDS: tl.constexpr):
    """(number of words beside the row that have not arrived, non-zero when the source sends no row `index`)."""
    told = epoch_of(side) == epoch
    absent = (sides_at == SIDE_WORDS) & told & (payload_of(side) <= index)
    late = tl.where(absent, NO_ROW, (sent & (told == 0)).to(tl.int32))
    num_late = reduce_sum(late, 0)
    return num_late & (NO_ROW - 1), num_late & NO_ROW


@portable
def judge_row(
    words, side, sides_at, num_late_sides, SIDE_WORDS: tl.constexpr, ALWAYS_FLAGGED: tl.constexpr
):  # fmt: skip
    """How many words of a row have not arrived."""
    if ALWAYS_FLAGGED:
        # no byte of a cast row is 0xFF, and the sender writes bytes: a word is there when none of its bytes is missing
        late = tl.sub(~words, 0x01010101, sanitize_overflow=False) & words & BYTE_SIGNS
        num_late = reduce_sum((late != 0).to(tl.int32), 0)
    else:
        num_late = reduce_sum((words == EMPTY).to(tl.int32), 0)
        position = reduce_sum(tl.where(sides_at == SIDE_WORDS - 1, payload_of(side), 0), 0)
        num_late = tl.where((position < 0) & (num_late_sides == 0), 0, num_late)
    return num_late


@portable
def take_row_block(
    table, rows, sides, count_word, epoch, source, index, words_at, sides_at, sent, rank, WORLD_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr, SIDE_WORDS: tl.constexpr, ALWAYS_FLAGGED: tl.constexpr, SPARSE_POLLS: tl.constexpr,
):  # fmt: skip
    """Waits for a block of a row and for what travels beside it, or for the word that there is no such row.

    Args:
        words_at: lanes of the block; at least as many as a program has threads.
        SPARSE_POLLS: looks at the row when all beside it has come, which leaves more of the memory's bandwidth to
            others but takes one more read. Else both are read at once.

    Returns:
        (words, words beside, whether there is such a row, poison word).
    """
    inside = words_at < ROW_WORDS
    side = read_beside(sides, count_word, sides_at, sent, SIDE_WORDS)
    words = tl.load(rows + words_at, mask=inside, other=0, volatile=True)
    num_late_sides, no_row = judge_beside(side, epoch, index, sides_at, sent, SIDE_WORDS)
    num_late = num_late_sides + judge_row(words, side, sides_at, num_late_sides, SIDE_WORDS, ALWAYS_FLAGGED)
    poison = tl.full((), 0, tl.int32)
    polls = tl.full((), 0, tl.int32)
    deadline = tl.full((), 0, tl.int64)
    while (num_late > 0) & (no_row == 0) & (poison == 0):
        pause(0)
        side = read_beside(sides, count_word, sides_at, sent, SIDE_WORDS)
        if not SPARSE_POLLS:
            words = tl.load(rows + words_at, mask=inside, other=0, volatile=True)
        num_late_sides, no_row = judge_beside(side, epoch, index, sides_at, sent, SIDE_WORDS)
        num_late = num_late_sides + 0
        if num_late == 0:
            if SPARSE_POLLS:
                words = tl.load(rows + words_at, mask=inside, other=0, volatile=True)
            num_late = judge_row(words, side, sides_at, num_late_sides, SIDE_WORDS, ALWAYS_FLAGGED)
        polls += 1
        if (polls % POLLS_PER_CLOCK == 0) & (num_late > 0) & (no_row == 0):
            poison, deadline = overdue(table, polls, deadline, source, rank, WORLD_SIZE, 1)
    if not ALWAYS_FLAGGED:
        # a row written in full may have been read before its last word came: read it behind the fence
        position = reduce_sum(tl.where(sides_at == SIDE_WORDS - 1, payload_of(side), 0), 0)
        if (position < 0) & (poison == 0) & (no_row == 0):
            tl.atomic_add(sides + SIDE_WORDS - 1, tl.cast(0, tl.int64), sem="acquire", scope="sys")
            words = tl.load(rows + words_at, mask=inside, other=0, volatile=True)
            # all threads have read before the caller empties the row
            tl.debug_barrier()
    return words, side, no_row == 0, poison


@portable
def received_places(table, rank, WORLD_SIZE: tl.constexpr, SCALE_DTYPE: tl.constexpr):
    """Where the experts of this rank read: (rows as words, scales, weights as words, ids, positions)."""
    return (
        address(table, TOKENS, rank, WORLD_SIZE, tl.int32),
        address(table, SCALES, rank, WORLD_SIZE, SCALE_DTYPE),
        address(table, WEIGHTS, rank, WORLD_SIZE, tl.int32),
        address(table, INDICES, rank, WORLD_SIZE, tl.int32),
        address(table, SOURCE_POSITIONS, rank, WORLD_SIZE, tl.int32),
    )


@portable
def place_side(
    places, side, sides_at, row, TOPK: tl.constexpr, SCALE_WORDS: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Writes what travelled beside a row where the experts read it; places: from received_places."""
    _rows, scales, weights, ids, positions = places
    values = payload_of(side)
    line = tl.cast(row, tl.int64)
    if HAS_SCALES:
        scale_values = values.to(scales.dtype.element_ty)
        tl.store(scales + line * SCALE_WORDS + sides_at, scale_values, mask=sides_at < SCALE_WORDS)
    slots = sides_at - SCALE_WORDS
    tl.store(ids + line * TOPK + slots, values, mask=(slots >= 0) & (slots < TOPK))
    slots = slots - TOPK
    if HAS_WEIGHTS:
        tl.store(weights + line * TOPK + slots, values, mask=(slots >= 0) & (slots < TOPK))
    tl.store(positions + line + (slots - TOPK), values & POSITION_MASK, mask=slots == TOPK)


@portable
def receive_flagged_rows(
    table, places, epoch, stride, row_limit, rank, receiver, num_receivers,
    TOPK: tl.constexpr, WORLD_SIZE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    COMPACT: tl.constexpr, SLOTS: tl.constexpr, COUNT_LANES: tl.constexpr, SIDE_LANES: tl.constexpr,
    ALWAYS_FLAGGED: tl.constexpr, SPARSE_POLLS: tl.constexpr,
):  # fmt: skip
    """Moves this program's share of the rows from where peers push them to where the experts read them.

    Rows are taken in the order in which they are sent, one from each source in turn. Where a row goes follows from its
    source, but for layout compact, which needs all counts first. Returns the poison word.

    Args:
        places: from received_places.
    """
    side_words: tl.constexpr = SCALE_WORDS + 2 * TOPK + 1
    # this rank's own rows are straight where they belong, unless that takes counts
    first_source: tl.constexpr = 0 if COMPACT else 1
    num_sources: tl.constexpr = WORLD_SIZE - first_source
    sides_at = tl.arange(0, SIDE_LANES)
    sent = sides_at < side_words
    if not HAS_SCALES:
        sent = sent & (sides_at >= SCALE_WORDS)
    if not HAS_WEIGHTS:
        sent = sent & ((sides_at < SCALE_WORDS + TOPK) | (sides_at == side_words - 1))
    poison = tl.full((), 0, tl.int32)
    num_units = stride * num_sources
    if COMPACT:
        all_counts, poison = wait_counts(table, epoch, rank, WORLD_SIZE, COUNT_LANES)
        lanes = tl.arange(0, COUNT_LANES)
        sources = lanes // (WORLD_SIZE + 1)
        counts = tl.where((lanes % (WORLD_SIZE + 1) == rank) & (sources < WORLD_SIZE), all_counts, 0)
        num_units = tl.where(poison == 0, reduce_max(counts, 0) * num_sources, 0)
    count_words = address(table, COUNTS, rank, WORLD_SIZE, tl.int64) + rank
    flagged_rows = address(table, FLAGGED_ROWS, rank, WORLD_SIZE, tl.int32)
    flagged_sides = address(table, FLAGGED_SIDES, rank, WORLD_SIZE, tl.int64)
    for unit in range(receiver, num_units, num_receivers):
        index = unit // max(1, num_sources)
        source = (rank + first_source + unit % max(1, num_sources)) % WORLD_SIZE
        if poison == 0:
            row = source * stride + index
            if COMPACT:
                row = reduce_sum(tl.where(sources < source, counts, 0), 0) + index
            slot = tl.cast(source * SLOTS + index, tl.int64)
            rows = tl.multiple_of(flagged_rows + slot * ROW_WORDS, 16)
            sides = flagged_sides + slot * side_words
            target = places[0] + tl.cast(row, tl.int64) * ROW_WORDS
            for first_word in tl.static_range(0, ROW_WORDS, BLOCK_WORDS):
                words_at = first_word + tl.arange(0, BLOCK_WORDS)
                words, side, exists, late = take_row_block(
                    table, rows, sides, count_words + source * (WORLD_SIZE + 1), epoch, source, index, words_at,
                    sides_at, sent, rank, WORLD_SIZE, ROW_WORDS, side_words, ALWAYS_FLAGGED, SPARSE_POLLS,
                )  # fmt: skip
                poison = tl.where(poison == 0, late, poison)
                if exists:
                    wanted = (words_at < ROW_WORDS) & (words_at * 0 + row < row_limit) & (words_at * 0 + poison == 0)
                    tl.store(tl.multiple_of(target, 16) + words_at, words, mask=wanted)
                    tl.store(rows + words_at, words * 0 + EMPTY, mask=words_at < ROW_WORDS)
                    if first_word == 0:
                        if (row < row_limit) & (poison == 0):
                            place_side(places, side, sides_at, row, TOPK, SCALE_WORDS, HAS_SCALES, HAS_WEIGHTS)
    return poison
