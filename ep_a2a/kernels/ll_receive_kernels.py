"""Device helpers that receive low-latency rows: they poll the words of a row and move them to where experts read."""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import EMPTY, POLLS_PER_CLOCK
from ep_a2a.kernels.receive_kernels import absent_ranks
from ep_a2a.kernels.target import barrier, volatile_load

POSITION_MASK = tl.constexpr(0x7FFFFFFF)
# Above any number of words of a row, in a sum with such a number.
NO_ROW = tl.constexpr(1 << 24)


@portable
def read_beside(sides, count_word, sides_at, sent, SIDE_WORDS: tl.constexpr):
    """The words beside a row, and in lane SIDE_WORDS the flagged word with the number of rows that the source sends.

    Each lane is read by one thread, so that a reduction over the lanes is one verdict for all threads.

    Args:
        sides_at: lanes; at least as many as a program has threads, and more than SIDE_WORDS.
        sent: which of the lanes below SIDE_WORDS are sent.
    """
    is_count = sides_at == SIDE_WORDS
    where = tl.where(is_count, count_word + prim.full_like(sides_at, 0), sides + sides_at)
    return volatile_load(where, mask=sent | is_count, other=0)


@portable
def judge_beside(side, epoch, index, sides_at, sent, SIDE_WORDS: tl.constexpr):
    """(number of words beside the row that have not arrived, non-zero when the source sends no row `index`)."""
    has_epoch = prim.epoch_of(side) == epoch
    absent = (sides_at == SIDE_WORDS) & has_epoch & (prim.payload_of(side) <= index)
    late = tl.where(absent, NO_ROW, (sent & (has_epoch == 0)).to(tl.int32))
    num_late = prim.reduce_sum(late, 0)
    return num_late & (NO_ROW - 1), num_late & NO_ROW


@portable
def judge_row(words, side, sides_at, num_late_sides, SIDE_WORDS: tl.constexpr, IS_CAST: tl.constexpr):
    """The number of words of a row that have not arrived. No word of a cast row is EMPTY."""
    num_late = prim.reduce_sum((words == EMPTY).to(tl.int32), 0)
    if not IS_CAST:
        position = prim.reduce_sum(tl.where(sides_at == SIDE_WORDS - 1, prim.payload_of(side), 0), 0)
        num_late = tl.where((position < 0) & (num_late_sides == 0), 0, num_late)
    return num_late


class ArrivingRow(NamedTuple):
    """A row on its way to this rank.

    words, beside: where it and the words beside it arrive. count_word: where its source says how many rows it sends.
    source: the rank that sends it, as row `index` of those for this rank. number: the row's, for the experts.
    """

    words: tl.tensor
    beside: tl.tensor
    count_word: tl.tensor
    source: tl.tensor
    index: tl.tensor
    number: tl.tensor


@portable
def take_row_block(step, row, words_at, sides_at, sent, masked):
    """Wait for a block of a row and for what travels beside it, or for the word that there is no such row.

    With LL.SPARSE_POLLS the row is read when all beside it has come, which leaves more of the memory's bandwidth to
    others but takes one more read. Else both are read at once.

    Args:
        step: DispatchStep. row: ArrivingRow. sent: from sent_sides. masked: from masked_of.
        words_at: lanes of the block; at least as many as a program has threads.

    Returns:
        (words, words beside, whether there is such a row, poison word, masked as it is now).
    """
    op = step.op
    side_words: tl.constexpr = op.LL.SCALE_WORDS + 2 * op.TOPK + 1
    is_cast: tl.constexpr = op.ROW.GROUP > 0
    inside = words_at < op.ROW.ROW_WORDS
    side = read_beside(row.beside, row.count_word, sides_at, sent, side_words)
    words = volatile_load(row.words + words_at, mask=inside, other=0)
    num_late_sides, no_row = judge_beside(side, step.epoch, row.index, sides_at, sent, side_words)
    num_late = num_late_sides + judge_row(words, side, sides_at, num_late_sides, side_words, is_cast)
    poison, polls, deadline = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    while (num_late > 0) & (no_row == 0) & (poison == 0):
        prim.pause(0)
        side = read_beside(row.beside, row.count_word, sides_at, sent, side_words)
        if not op.LL.SPARSE_POLLS:
            words = volatile_load(row.words + words_at, mask=inside, other=0)
        num_late_sides, no_row = judge_beside(side, step.epoch, row.index, sides_at, sent, side_words)
        num_late = num_late_sides + 0
        if num_late == 0:
            if op.LL.SPARSE_POLLS:
                words = volatile_load(row.words + words_at, mask=inside, other=0)
            num_late = judge_row(words, side, sides_at, num_late_sides, side_words, is_cast)
        polls = prim.next_poll(polls)
        if (polls % POLLS_PER_CLOCK == 0) & (num_late > 0) & (no_row == 0):
            absent = -1
            if op.MASKS:
                masked = prim.masked_now(op)
                no_row = tl.where(prim.is_live(masked, row.source), no_row, NO_ROW)
                absent = absent_ranks(op, step.epoch, -1)
            poison, deadline = prim.overdue(op, polls, deadline, row.source, 1, absent)
    if not is_cast:
        # a row written in full may have been read before its last word came: read it behind the fence
        position = prim.reduce_sum(tl.where(sides_at == side_words - 1, prim.payload_of(side), 0), 0)
        if (position < 0) & (poison == 0) & (no_row == 0):
            tl.atomic_add(row.beside + side_words - 1, tl.cast(0, tl.int64), sem="acquire", scope="sys")
            words = volatile_load(row.words + words_at, mask=inside, other=0)
            # all threads have read before the caller empties the row
            barrier()
    return words, side, no_row == 0, poison, masked


class OwnPlaces(NamedTuple):
    """Where the experts of this rank read, rows and weights as words; and this rank's record of what it sends."""

    rows: tl.tensor
    scales: tl.tensor
    weights: tl.tensor
    ids: tl.tensor
    positions: tl.tensor
    routes: tl.tensor
    sent_ids: tl.tensor


@portable
def own_places(op):
    """Return OwnPlaces."""
    return OwnPlaces(
        prim.address(op, Region.TOKENS, tl.int32),
        prim.address(op, Region.SCALES, tl.uint8 if op.ROW.BYTE_SCALES else tl.int32),
        prim.address(op, Region.WEIGHTS, tl.int32),
        prim.address(op, Region.INDICES, tl.int32),
        prim.address(op, Region.SOURCE_POSITIONS, tl.int32),
        prim.address(op, Region.ROUTES, tl.int32),
        prim.address(op, Region.SENT_INDICES, tl.int32),
    )


@portable
def place_side(places, side, sides_at, row, op):
    """Writes what travelled beside a row where the experts read it; places: OwnPlaces."""
    values = prim.payload_of(side)
    line = tl.cast(row, tl.int64)
    if op.LL.HAS_SCALES:
        scale_values = values.to(places.scales.dtype.element_ty)
        tl.store(places.scales + line * op.LL.SCALE_WORDS + sides_at, scale_values, mask=sides_at < op.LL.SCALE_WORDS)
    slots = sides_at - op.LL.SCALE_WORDS
    tl.store(places.ids + line * op.TOPK + slots, values, mask=(slots >= 0) & (slots < op.TOPK))
    slots = slots - op.TOPK
    if op.FORM.HAS_WEIGHTS:
        tl.store(places.weights + line * op.TOPK + slots, values, mask=(slots >= 0) & (slots < op.TOPK))
    tl.store(places.positions + line + (slots - op.TOPK), values & POSITION_MASK, mask=slots == op.TOPK)


@portable
def sent_sides(sides_at, op):
    """Which of the words beside a row are sent."""
    side_words: tl.constexpr = op.LL.SCALE_WORDS + 2 * op.TOPK + 1
    sent = sides_at < side_words
    if not op.LL.HAS_SCALES:
        sent = sent & (sides_at >= op.LL.SCALE_WORDS)
    if not op.FORM.HAS_WEIGHTS:
        sent = sent & ((sides_at < op.LL.SCALE_WORDS + op.TOPK) | (sides_at == side_words - 1))
    return sent


@portable
def receive_row(step, places, row, sides_at, sent, poison, masked):
    """Wait for one row and move it to where the experts read it; leave EMPTY behind. Returns (poison word, masked).

    Args:
        step: DispatchStep. places: OwnPlaces. row: ArrivingRow. sent: from sent_sides.
    """
    op = step.op
    target = places.rows + tl.cast(row.number, tl.int64) * op.ROW.ROW_WORDS
    for first_word in tl.static_range(0, op.ROW.ROW_WORDS, op.ROW.BLOCK_WORDS):
        words_at = first_word + tl.arange(0, op.ROW.BLOCK_WORDS)
        words, side, exists, late, masked = take_row_block(step, row, words_at, sides_at, sent, masked)
        poison = tl.where(poison == 0, late, poison)
        if exists:
            has_room = prim.full_like(words_at, row.number) < step.row_limit
            wanted = (words_at < op.ROW.ROW_WORDS) & has_room & (prim.full_like(words_at, poison) == 0)
            tl.store(tl.multiple_of(target, 16) + words_at, words, mask=wanted)
            tl.store(row.words + words_at, prim.full_like(words, EMPTY), mask=words_at < op.ROW.ROW_WORDS)
            if first_word == 0:
                if (row.number < step.row_limit) & (poison == 0):
                    place_side(places, side, sides_at, row.number, op)
    return poison, masked


@portable
def receive_low_latency_rows(step, places, told, receiver, num_receivers, masked):
    """Moves this program's share of the rows from where peers push them to where the experts read them.

    Rows are taken in the order in which they are sent, one from each source in turn. Where a row goes follows from its
    source if all ranks have one bound. Layout compact needs all counts first, other bounds the words beside these.
    Returns the poison word.

    Args:
        step: DispatchStep. places: OwnPlaces.
        told: from wait_counts; not read if places follow from a common bound. masked: from masked_of.
    """
    op = step.op
    # this rank's own rows are straight where they belong, unless that takes counts
    first_source: tl.constexpr = 0 if op.COMPACT else 1
    num_sources: tl.constexpr = op.WORLD_SIZE - first_source
    sides_at = tl.arange(0, op.LL.SIDE_LANES)
    sent = sent_sides(sides_at, op)
    poison = tl.full((), 0, tl.int32)
    num_units = step.step_tokens * num_sources
    lanes = tl.arange(0, op.LL.COUNT_LANES)
    counts = tl.where(lanes < op.WORLD_SIZE, told, 0)
    if op.COMPACT or step.step_tokens < 0:
        num_units = prim.reduce_max(counts, 0) * num_sources
    count_words = prim.address(op, Region.COUNTS, tl.int64) + op.rank
    all_rows = prim.address(op, Region.LOW_LATENCY_ROWS, tl.int32)
    all_sides = prim.address(op, Region.LOW_LATENCY_SIDES, tl.int64)
    for unit in range(receiver, num_units, num_receivers):
        index = unit // max(1, num_sources)
        source = (op.rank + first_source + unit % max(1, num_sources)) % op.WORLD_SIZE
        goes_on = poison == 0
        if op.MASKS:
            goes_on = goes_on & prim.is_live(masked, source)
        if goes_on:
            number = source * step.step_tokens + index
            if op.COMPACT:
                number = prim.reduce_sum(tl.where(lanes < source, counts, 0), 0) + index
            elif step.step_tokens < 0:
                number = prim.reduce_sum(tl.where(lanes == op.WORLD_SIZE + source, told, 0), 0) + index
            slot = tl.cast(source * op.LL.SLOTS + index, tl.int64)
            words = tl.multiple_of(all_rows + slot * op.ROW.ROW_WORDS, 16)
            beside = all_sides + slot * (op.LL.SCALE_WORDS + 2 * op.TOPK + 1)
            row = ArrivingRow(words, beside, count_words + source * (op.WORLD_SIZE + 2), source, index, number)
            poison, masked = receive_row(step, places, row, sides_at, sent, poison, masked)
    return poison
