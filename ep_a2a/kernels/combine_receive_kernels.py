"""Device helpers of combine that take what experts' ranks send back and add it, in ascending rank order."""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels.cast_kernels import elements_of, plus_biases, round_to
from ep_a2a.kernels.combine_route_kernels import NEVER, next_turn, routes_of, slots_of
from ep_a2a.kernels.combine_send_kernels import (
    SCALED_WORDS,
    ReturnPlaces,
    block_offsets,
    cast_block,
    load_block,
    return_places,
)
from ep_a2a.kernels.layout import FailureCode, Record, Region, Span, State, StepPhase
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import EMPTY, POLLS_PER_CLOCK
from ep_a2a.kernels.span_kernels import note_span
from ep_a2a.kernels.target import volatile_load

EMPTY_UNSIGNED = tl.constexpr(0xFFFFFFFF)

# Rows that have arrived which a program reads ahead; those of two turns at least.
ROWS_UNDER_WAY = tl.constexpr(6)


@portable
def note_foreign_indices(op, ids, token, epoch):
    """Record a failure for the host when a token's ids differ from those of dispatch; the result stays the same."""
    slots = tl.arange(0, op.TOPK_LANES)
    where = tl.cast(token, tl.int64) * op.TOPK + slots
    sent = tl.load(prim.address(op, Region.SENT_INDICES, tl.int32) + where, mask=slots < op.TOPK, other=0)
    given = tl.load(ids + where, mask=slots < op.TOPK, other=0)
    if prim.reduce_max((sent != given).to(tl.int32), 0) > 0:
        state = prim.address(op, Region.STATE, tl.int32)
        if tl.atomic_cas(state + State.ERROR_CLAIMED, 0, 1, sem="relaxed", scope="gpu") == 0:
            record = prim.address(op, Region.ERROR_RECORD, tl.int32)
            tl.store(record + Record.PHASE, StepPhase.COMBINE)
            tl.store(record + Record.EPOCH, epoch)
            tl.store(record + Record.DETAIL, token)
            tl.store(record + Record.CODE, FailureCode.FOREIGN_INDICES)


class OwnRows(NamedTuple):
    """This rank's own rows, which are added where they were made.

    base: one pointer, where slot 0 would be if their slots lay there, before a cast; none where they were sent, too.
    Triton 3.6 takes no None into a tuple.
    first, end: the first slot and the one behind.
    """

    base: tuple
    first: tl.tensor
    end: tl.tensor


@portable
def own_rows(rows, own_row, step, WIDTH: tl.constexpr):
    """Return OwnRows. rows: of WIDTH elements, this rank's from own_row on."""
    first, base = step.op.rank * step.M, ()
    if step.op.COMBINE.OWN_IN_PLACE:
        base = (rows + tl.cast(own_row - first, tl.int64) * WIDTH,)
    return OwnRows(base, first, first + step.M)


@portable
def is_own(slot, own):
    """Return whether a slot is that of one of OwnRows that were not sent."""
    found = tl.full((), 0, tl.int1)
    if len(own.base) > 0:
        found = (slot >= own.first) & (slot < own.end)
    return found


@portable
def line_of(base, slot, WIDTH: tl.constexpr):
    """Return where the row of a slot begins, of WIDTH words."""
    # the hint must be given here: on the result of a call it would be lost
    aligned: tl.constexpr = 16 if WIDTH % 4 == 0 else 1
    return tl.multiple_of(base + tl.cast(slot, tl.int64) * WIDTH, aligned)


@portable
def scales_of(first, B: tl.constexpr):
    """Return (each line's scale, by its place in the row; whether the line is the first with that scale)."""
    lines = first // B.GROUP + tl.arange(0, B.GROUPS_LANES)
    per_scale: tl.constexpr = SCALED_WORDS // B.GROUP
    return lines // per_scale, lines % per_scale == 0


@portable
def load_result(source, mask, MARKED: tl.constexpr):
    """Load words of results; those that are MARKED may not have arrived."""
    if MARKED:
        seen = volatile_load(source, mask=mask, other=0)
    else:
        seen = tl.load(source, mask=mask, other=0)
    return seen


@portable
def read_block(places, own, slots, first, B: tl.constexpr, MARKED: tl.constexpr):
    """Read a block of rows once, arrived or not: a tile per row, if SCALED followed by a vector with its lines' scales.

    This rank's own row of QUANTIZED ones is read before its cast: zeros are in its place, and the values of load_block
    behind all others, for with_own_row.

    One thread reads each word, so a reduction over the words gives all threads the same verdict. For that a tile needs
    at least as many lines as a program has threads. A scale is read for each line: were it read for each group, several
    threads would read it, and one might check its copy while another multiplies by a later one. MARKED: as in Combine.
    """
    offsets = block_offsets(first, B.GROUPS_LANES, B.GROUP)
    num_scales: tl.constexpr = B.WIDTH // SCALED_WORDS
    seen, own_slot = (), tl.full((), -1, tl.int32)
    for each in tl.static_range(len(slots)):
        slot, base = slots[each], places.rows
        if B.QUANTIZED:
            mine = is_own(slot, own)
            own_slot, slot = tl.where(mine, slot, own_slot), tl.where(mine, -1, slot)
        elif len(own.base) > 0:
            base = tl.where(is_own(slot, own), own.base[0], base)
        line = line_of(base, slot, B.WIDTH)
        present = (offsets < B.WIDTH) & (prim.full_like(offsets, slot) >= 0)
        seen = seen + (load_result(line + offsets, present, MARKED),)
        if B.SCALED:
            scales, _ = scales_of(first, B)
            scale_line = places.scales + tl.cast(slot, tl.int64) * num_scales
            there = (scales < num_scales) & (prim.full_like(scales, slot) >= 0)
            seen = seen + (load_result(scale_line + scales, there, MARKED),)
    if B.QUANTIZED and len(own.base) > 0:
        seen = seen + load_block(own.base[0], own_slot, (own_slot >= 0).to(tl.int32), first, B)
    return seen


@portable
def with_own_row(seen, own, slots, B: tl.constexpr):
    """Return what read_block has found with this rank's own row cast, as if it had been sent."""
    if B.QUANTIZED and len(own.base) > 0:
        per_row: tl.constexpr = 2 if B.SCALED else 1
        cast, filled = cast_block(seen[per_row * len(slots) :], B, own.base[0].dtype.element_ty), ()
        for each in tl.static_range(per_row * len(slots)):
            mine = is_own(slots[each // per_row], own)
            filled = filled + (tl.where(mine, cast[each % per_row], seen[each]),)
        seen = filled
    return seen


@portable
def no_sums(B: tl.constexpr):
    """Return the sums of no rows: float32 tiles, one for each element of a word."""
    sums = ()
    for _ in tl.static_range(B.ELEMENT.primitive_bitwidth // B.DTYPE.primitive_bitwidth):
        sums = sums + (tl.full((B.GROUPS_LANES, B.GROUP), 0.0, tl.float32),)
    return sums


@portable
def slot_missing(seen, own, slots, lost, B: tl.constexpr, HAS_LOST: tl.constexpr):
    """Return the lowest slot with a word that has not arrived, or NEVER.

    Args:
        seen: from read_block, zeros where there is no row. lost: from lost_rows.
    """
    missing = tl.full((B.GROUPS_LANES,), NEVER, tl.int32)
    per_row: tl.constexpr = 2 if B.SCALED else 1
    for each in tl.static_range(len(slots)):
        # this rank's own row lies where it was made
        nobody = is_own(slots[each], own)
        if HAS_LOST:
            nobody = nobody | (((lost >> each) & 1) > 0)
        awaited = prim.full_like(missing, tl.where(nobody, NEVER, slots[each]))
        # a line has arrived when none of its words is EMPTY, the largest
        late = prim.reduce_max(seen[each * per_row].to(tl.uint32, bitcast=True), 1) == EMPTY_UNSIGNED
        if B.SCALED:
            late = late | (seen[each * per_row + 1] == EMPTY)
        missing = tl.minimum(missing, tl.where(late, awaited, NEVER))
    return prim.reduce_min(missing, 0)


@portable
def lost_rows(step, slots, masked):
    """Return which rows are those of masked ranks: bits by the place of their slots."""
    lost = tl.full((), 0, tl.int32)
    for each in tl.static_range(len(slots)):
        source = tl.maximum(slots[each], 0) // step.M
        lost = lost | (tl.where(prim.is_live(masked, source), 0, 1) << each)
    return lost


@portable
def plus_rows(sums, seen, B: tl.constexpr):
    """Return sums (no_sums) with the rows that read_block has found added in their order."""
    per_row: tl.constexpr = 2 if B.SCALED else 1
    for each in tl.static_range(len(seen) // per_row):
        values, added = elements_of(seen[each * per_row], B.DTYPE), ()
        for part in tl.static_range(len(sums)):
            value = values[part]
            if B.SCALED:
                value = value * seen[each * per_row + 1].to(tl.float32, bitcast=True)[:, None]
            added = added + (sums[part] + value,)
        sums = added
    return sums


@portable
def empty_block(places, own, slots, first, B: tl.constexpr):
    """Leave EMPTY in a block of rows; this rank's own row, which was never sent, stays as it is."""
    offsets = block_offsets(first, B.GROUPS_LANES, B.GROUP)
    empty = prim.full_like(offsets, EMPTY)
    num_scales: tl.constexpr = B.WIDTH // SCALED_WORDS
    for each in tl.static_range(len(slots)):
        slot = slots[each]
        came = tl.where(is_own(slot, own), -1, slot)
        arrived = (offsets < B.WIDTH) & (prim.full_like(offsets, came) >= 0)
        tl.store(line_of(places.rows, slot, B.WIDTH) + offsets, empty, mask=arrived)
        if B.SCALED:
            scales, is_first = scales_of(first, B)
            there = is_first & (scales < num_scales) & (prim.full_like(scales, came) >= 0)
            scale_line = places.scales + tl.cast(slot, tl.int64) * num_scales
            tl.store(scale_line + scales, prim.full_like(scales, EMPTY), mask=there)


@portable
def take_block(seen, step, places, own, slots, first, sums, masked, B: tl.constexpr):
    """Wait for a block of rows, add it to the sums and empty it. Returns (sums, poison word).

    Args:
        seen: what read_block has found in this launch. masked: from masked_of. The other arguments are the same.
    """
    lost = tl.full((), 0, tl.int32)
    missing = slot_missing(seen, own, slots, lost, B, step.op.MASKS)
    poison, polls, deadline = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    while (missing < NEVER) & (poison == 0):
        prim.pause(step.pause_ns)
        seen = read_block(places, own, slots, first, B, True)
        if step.op.MASKS:
            lost = lost | lost_rows(step, slots, masked)
        missing = slot_missing(seen, own, slots, lost, B, step.op.MASKS)
        polls = prim.next_poll(polls)
        if (polls % POLLS_PER_CLOCK == 0) & (missing < NEVER):
            late = missing // step.M
            absent = -1
            if step.op.MASKS:
                lost = lost_rows(step, slots, prim.masked_now(step.op))
                lanes = tl.arange(0, step.op.WORLD_LANES)
                flags = prim.address(step.op, Region.COMBINE_FLAGS, tl.int32) + lanes
                behind = prim.late_lanes(flags, step.epoch, lanes < step.op.WORLD_SIZE, False)
                absent = tl.where(behind > 0, lanes, -1)
            poison, deadline = prim.overdue(step.op, polls, deadline, late, 1, absent)
    empty_block(places, own, slots, first, B)
    if step.op.MASKS:
        seen = without_lost(seen, lost, B)
    return plus_rows(sums, with_own_row(seen, own, slots, B), B), poison


@portable
def without_lost(seen, lost, B: tl.constexpr):
    """Return what read_block has found, with zeros in place of the rows that are lost."""
    kept = ()
    per_row: tl.constexpr = 2 if B.SCALED else 1
    for each in tl.static_range(len(seen)):
        kept = kept + (tl.where(((lost >> (each // per_row)) & 1) > 0, 0, seen[each]),)
    return kept


@portable
def clear_results(result, num_tokens, share, B: tl.constexpr, DTYPE: tl.constexpr):
    """Store zeros in place of what add_results stores: a failed step shows neither parts of sums nor older ones."""
    block: tl.constexpr = B.GROUPS_LANES * B.GROUP
    num_blocks: tl.constexpr = (B.WIDTH + block - 1) // block
    per_word: tl.constexpr = B.ELEMENT.primitive_bitwidth // B.DTYPE.primitive_bitwidth
    hidden: tl.constexpr = B.WIDTH * per_word
    unit = share.program
    while unit < num_tokens * num_blocks:
        offsets = block_offsets((unit % num_blocks) * block * per_word, B.GROUPS_LANES, B.GROUP * per_word)
        target = result + tl.cast(unit // num_blocks, tl.int64) * hidden + offsets
        tl.store(target, round_to(offsets * 0.0, DTYPE), mask=offsets < hidden)
        unit += share.num_programs


@portable
def add_weights(given, step, places, slots, own_row, token, sums, masked, WEIGHTS: tl.constexpr):
    """Take the weights of rows, add them to a token's and store those. Returns (sums, poison word)."""
    op = step.op
    lines = ReturnPlaces(places.weights, places.scales, places.weights)
    own = own_rows(given.weights, own_row, step, op.TOPK)
    seen, poison = read_block(lines, own, slots, 0, WEIGHTS, op.COMBINE.MARKED), tl.full((), 0, tl.int32)
    if op.COMBINE.MARKED:
        sums, poison = take_block(seen, step, lines, own, slots, 0, sums, masked, WEIGHTS)
    else:
        sums = plus_rows(sums, seen, WEIGHTS)
    sums_out = prim.address(op, Region.RESULT_WEIGHTS, tl.float32)
    sums_out += tl.cast(token, tl.int64) * op.TOPK
    weights_at = block_offsets(0, WEIGHTS.GROUPS_LANES, 1)
    tl.store(sums_out + weights_at, sums[0], mask=weights_at < op.TOPK)
    return sums, poison


@portable
def read_turn(places, own, turn, B: tl.constexpr, MARKED: tl.constexpr):
    """Read the block of a turn (next_turn) once, as read_block does."""
    block: tl.constexpr = B.GROUPS_LANES * B.GROUP
    num_blocks: tl.constexpr = (B.WIDTH + block - 1) // block
    return read_block(places, own, turn[1], (turn[0] % num_blocks) * block, B, MARKED)


@portable
def add_results(given, step, share, own_row, masked, B: tl.constexpr, WEIGHTS: tl.constexpr):
    """Add and store the rows of this program's share of the tokens. Returns the poison word.

    MARKED rows are waited for; others have arrived. A unit of work is a block of a token's rows. Where a token may have
    more than ROWS_AT_ONCE rows, a unit takes several turns. With READ_AHEAD rows of later turns are under way. None may
    be copied to other registers soon, which would wait for it: of MARKED rows the next turn's are read before this
    one's are awaited; others behind this turn, and as many turns as are under way follow each other in the loop.

    Args:
        given: Operands. step: CombineStep. share: Share of the units.
        own_row: where this rank's own rows begin in the given rows and weights, used with OWN_IN_PLACE.
        masked: from masked_now, behind the wait for rows that are not MARKED.
        B, WEIGHTS: Block of rows and of weights.
    """
    op, unit = step.op, share.program
    block: tl.constexpr = B.GROUPS_LANES * B.GROUP
    num_blocks: tl.constexpr = (B.WIDTH + block - 1) // block
    # whether the next turn's rows are read, or found, before this one's are awaited
    early: tl.constexpr = op.COMBINE.MARKED or not op.COMBINE.READ_AHEAD
    num_turns: tl.constexpr = 1 if early else max(2, ROWS_UNDER_WAY // min(op.WORLD_SIZE, op.TOPK))
    routes = prim.address(op, Region.ROUTES, tl.int32)
    places = return_places(op, op.rank, B.ELEMENT)
    hidden: tl.constexpr = B.WIDTH * (32 // B.DTYPE.primitive_bitwidth) if B.QUANTIZED else B.WIDTH
    own = own_rows(given.rows, own_row, step, hidden)
    poison = tl.full((), 0, tl.int32)
    others = slots_of(routes_of(routes, unit // num_blocks, step), step, masked)
    following = routes_of(routes, (unit + share.num_programs) // num_blocks, step)
    turns, seen = (), ()
    for _ in tl.static_range(num_turns):
        turn, unit, others, following = next_turn(unit, others, following, routes, step, share, masked, num_blocks)
        turns = turns + (turn,)
        if op.COMBINE.READ_AHEAD:
            seen = seen + (read_turn(places, own, turn, B, op.COMBINE.MARKED),)
    sums, weight_sums = no_sums(B), no_sums(WEIGHTS)
    while turns[0][0] < step.num_tokens * num_blocks:
        for _ in tl.static_range(num_turns):
            turn_unit, slots, ends = turns[0]
            token, first = turn_unit // num_blocks, (turn_unit % num_blocks) * block
            if op.COMBINE.READ_AHEAD:
                taken = seen[0]
            else:
                taken = read_turn(places, own, turns[0], B, op.COMBINE.MARKED)
            if early:
                turn, unit, others, following = next_turn(
                    unit, others, following, routes, step, share, masked, num_blocks
                )
                if op.COMBINE.READ_AHEAD:
                    seen = seen + (read_turn(places, own, turn, B, op.COMBINE.MARKED),)
            if (poison == 0) & (token < step.num_tokens):
                if op.COMBINE.MARKED:
                    sums, poison = take_block(taken, step, places, own, slots, first, sums, masked, B)
                else:
                    sums = plus_rows(sums, with_own_row(taken, own, slots, B), B)
                if turn_unit == share.program:
                    note_span(op.FORM.SPANS, op, Span.RECV_WAIT, Span.TOPK_REDUCE)
                if ends:
                    store_sums(given, sums, token, first, B, op.COMBINE.DTYPE)
                if first == 0:
                    if op.FORM.HAS_WEIGHTS:
                        if poison == 0:
                            weight_sums, poison = add_weights(
                                given, step, places, slots, own_row, token, weight_sums, masked, WEIGHTS
                            )
                    if op.COMBINE.CHECK_INDICES:
                        if ends:
                            note_foreign_indices(op, given.ids, token, step.epoch)
            sums, weight_sums = kept_unless(ends, sums), kept_unless(ends, weight_sums)
            if not early:
                turn, unit, others, following = next_turn(
                    unit, others, following, routes, step, share, masked, num_blocks
                )
                seen = seen + (read_turn(places, own, turn, B, op.COMBINE.MARKED),)
            turns, seen = turns[1:] + (turn,), seen[1:]
    return poison


@portable
def kept_unless(ends, sums):
    """Return the sums, or zeros where the token ends."""
    kept = ()
    for part in tl.static_range(len(sums)):
        kept = kept + (tl.where(ends, 0.0, sums[part]),)
    return kept


@portable
def store_sums(given, sums, token, first, B: tl.constexpr, DTYPE: tl.constexpr):
    """Store a block of a token's sums, with the biases that are not None, rounded to DTYPE."""
    per_word: tl.constexpr = len(sums)
    hidden: tl.constexpr = B.WIDTH * per_word
    target = tl.multiple_of(given.result + tl.cast(token, tl.int64) * hidden, 16)
    if per_word == 1:
        total = sums[0]
    elif per_word == 2:
        total = tl.reshape(tl.join(sums[0], sums[1]), (B.GROUPS_LANES, 2 * B.GROUP))
    else:
        pairs = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
        total = tl.reshape(pairs, (B.GROUPS_LANES, 4 * B.GROUP))
    line: tl.constexpr = B.GROUP * per_word
    offsets = block_offsets(first * per_word, B.GROUPS_LANES, line)
    if line * DTYPE.primitive_bitwidth <= 128:
        total = plus_biases(total, given.bias_0, given.bias_1, token, offsets, hidden)
        tl.store(target + offsets, round_to(total, DTYPE), mask=offsets < hidden)
    else:
        # in halves, so that a thread stores what it has added: at most 16 bytes at once
        halves = tl.split(tl.permute(tl.reshape(total, (B.GROUPS_LANES, 2, line // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            places = first * per_word + half * (line // 2)
            at = places + tl.arange(0, B.GROUPS_LANES)[:, None] * line + tl.arange(0, line // 2)[None, :]
            part = plus_biases(halves[half], given.bias_0, given.bias_1, token, at, hidden)
            tl.store(target + at, round_to(part, DTYPE), mask=at < hidden)
