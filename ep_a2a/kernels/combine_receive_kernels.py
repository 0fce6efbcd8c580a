"""Device helpers of combine that take what experts' ranks send back and add it, in ascending rank order."""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import plus_biases, round_to, widened
from ep_a2a.kernels.combine_send_kernels import ReturnPlaces, block_offsets, return_places
from ep_a2a.kernels.layout import Region, Span
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    COMBINE_PHASE,
    EMPTY,
    ERROR_CLAIMED,
    ERROR_RECORD,
    FOREIGN_INDICES,
    POLLS_PER_CLOCK,
    RECORD_CODE,
    RECORD_DETAIL,
    RECORD_EPOCH,
    RECORD_PHASE,
    STATE,
    address,
    full_like,
    next_poll,
    overdue,
    pause,
    reduce_max,
    reduce_min,
    reduce_sum,
)
from ep_a2a.kernels.span_kernels import begin_span, end_span

ROUTES = tl.constexpr(Region.ROUTES.value)
SENT_INDICES = tl.constexpr(Region.SENT_INDICES.value)
RESULT_WEIGHTS = tl.constexpr(Region.RESULT_WEIGHTS.value)
RECV_WAIT = tl.constexpr(Span.RECV_WAIT.value)
TOPK_REDUCE = tl.constexpr(Span.TOPK_REDUCE.value)

# EMPTY as an unsigned byte.
EMPTY_BYTE = tl.constexpr(0xFF)


@portable
def note_foreign_indices(table, ids, token, epoch, rank, S: tl.constexpr):
    """Record a failure for the host when a token's ids differ from those of dispatch; the result stays the same."""
    slots = tl.arange(0, S.TOPK_LANES)
    where = tl.cast(token, tl.int64) * S.TOPK + slots
    sent = tl.load(address(table, SENT_INDICES, rank, S.WORLD_SIZE, tl.int32) + where, mask=slots < S.TOPK, other=0)
    given = tl.load(ids + where, mask=slots < S.TOPK, other=0)
    if reduce_max((sent != given).to(tl.int32), 0) > 0:
        state = address(table, STATE, rank, S.WORLD_SIZE, tl.int32)
        if tl.atomic_cas(state + ERROR_CLAIMED, 0, 1, sem="relaxed", scope="gpu") == 0:
            record = address(table, ERROR_RECORD, rank, S.WORLD_SIZE, tl.int32)
            tl.store(record + RECORD_PHASE, COMBINE_PHASE)
            tl.store(record + RECORD_EPOCH, epoch)
            tl.store(record + RECORD_DETAIL, token)
            tl.store(record + RECORD_CODE, FOREIGN_INDICES)


@portable
def slots_of_token(routes, token, step, WORLD_SIZE: tl.constexpr):
    """Return where the rows of a token arrive, by expert rank, -1 for none; none from token `num_tokens` on."""
    slots = ()
    for peer in tl.static_range(WORLD_SIZE):
        route = routes + tl.cast(token, tl.int64) * WORLD_SIZE + peer
        index = tl.load(route, mask=token < step.num_tokens, other=-1)
        slots = slots + (tl.where(index >= 0, peer * step.M + index, -1),)
    return slots


@portable
def own_slot(slots, rank, WORLD_SIZE: tl.constexpr):
    """Return the slot of this rank's own row; -1 when the token did not go to an expert here."""
    own = slots[0]
    for peer in tl.static_range(1, WORLD_SIZE):
        own = tl.where(rank == peer, slots[peer], own)
    return own


@portable
def lines_of(rows, slots, B: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Return where the rows in those slots begin, in a region of rows like those of block B."""
    lines = ()
    # the hint must be given here: on the result of a call it would be lost
    aligned: tl.constexpr = 16 if B.WIDTH * B.ELEMENT.primitive_bitwidth % 128 == 0 else 1
    for peer in tl.static_range(WORLD_SIZE):
        lines = lines + (tl.multiple_of(rows + tl.cast(slots[peer], tl.int64) * B.WIDTH, aligned),)
    return lines


@portable
def own_lines_of(given, slots, own_row, step, HIDDEN: tl.constexpr, TOPK: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Return where this rank's own row and weights of a token lie; anywhere when its slot is -1."""
    row = own_row + own_slot(slots, step.rank, WORLD_SIZE) - step.rank * step.M
    return given.rows + tl.cast(row, tl.int64) * HIDDEN, given.weights + tl.cast(row, tl.int64) * TOPK


@portable
def read_block(places, slots, own_line, first, rank, S: tl.constexpr, B: tl.constexpr, OWN_IN_PLACE: tl.constexpr):
    """Read a block of a token's rows once, arrived or not: a tile per rank, if SCALED followed by one with its scales.

    One thread reads each element, so a reduction over the elements gives all threads the same verdict. For that a tile
    needs at least as many lanes as a program has threads. The scales' tile reads one lane of each group. A vector of
    groups would not do: the compiler would load it several times, and might check one copy and multiply by another.
    """
    offsets = block_offsets(first, B.GROUPS_LANES, B.GROUP)
    lines = lines_of(places.rows, slots, B, S.WORLD_SIZE)
    aligned: tl.constexpr = 16 if B.WIDTH * B.ELEMENT.primitive_bitwidth % 128 == 0 else 1
    seen = ()
    for peer in tl.static_range(S.WORLD_SIZE):
        present = (offsets < B.WIDTH) & (full_like(offsets, slots[peer]) >= 0)
        line = lines[peer]
        if OWN_IN_PLACE:
            line = tl.multiple_of(tl.where(rank == peer, own_line, line), aligned)
        seen = seen + (tl.load(line + offsets, mask=present, other=0, volatile=True),)
        if B.SCALED:
            elements = offsets % B.GROUP
            scale_line = places.scales + tl.cast(slots[peer], tl.int64) * (B.WIDTH // B.GROUP)
            where = scale_line + offsets // B.GROUP + elements
            seen = seen + (tl.load(where, mask=present & (elements == 0), other=0, volatile=True),)
    return seen


@portable
def values_of(words, DTYPE: tl.constexpr):
    """Return (float32 values of words; of their upper halves, where a word holds two elements)."""
    if words.dtype.primitive_bitwidth == DTYPE.primitive_bitwidth:
        lower = widened(words, DTYPE)
        upper = lower
    else:
        lower = widened((words & 0xFFFF).to(tl.int16), DTYPE)
        upper = widened((words >> 16).to(tl.int16), DTYPE)
    return lower, upper


@portable
def judge_block(seen, slots, first, rank, S: tl.constexpr, B: tl.constexpr, OWN_IN_PLACE: tl.constexpr):
    """Return (lowest rank with a word that has not arrived, or W; sum of the others in rank order, float32).

    Args:
        seen: from read_block, zeros where there is no row.

    Returns:
        The sum has a line of B.GROUP words' elements for each of B.GROUPS_LANES.
    """
    sums = tl.full((B.GROUPS_LANES, B.GROUP), 0.0, tl.float32)
    upper_sums = sums
    missing = tl.full((B.GROUPS_LANES, B.GROUP), S.WORLD_SIZE, tl.int32)
    per_peer: tl.constexpr = 2 if B.SCALED else 1
    for peer in tl.static_range(S.WORLD_SIZE):
        words = seen[peer * per_peer]
        values, upper_values = values_of(words, B.DTYPE)
        late = words == (EMPTY_BYTE if B.ELEMENT == tl.uint8 else EMPTY)
        if OWN_IN_PLACE:
            late = late & (full_like(words, rank) != peer)
        if B.SCALED:
            scale_bits = reduce_sum(seen[peer * per_peer + 1], 1)
            inside = block_offsets(first, B.GROUPS_LANES, B.GROUP) < B.WIDTH
            late = late | ((scale_bits == EMPTY)[:, None] & inside)
            values = values * scale_bits.to(tl.float32, bitcast=True)[:, None]
        missing = tl.minimum(missing, tl.where(late, peer, S.WORLD_SIZE))
        sums += values
        upper_sums += upper_values
    if B.ELEMENT.primitive_bitwidth != B.DTYPE.primitive_bitwidth:
        sums = tl.reshape(tl.join(sums, upper_sums), (B.GROUPS_LANES, 2 * B.GROUP))
    return reduce_min(reduce_min(missing, 1), 0), sums


@portable
def empty_block(places, slots, first, rank, S: tl.constexpr, B: tl.constexpr, OWN_IN_PLACE: tl.constexpr):
    """Leave EMPTY in a block of a token's rows; this rank's own row stays as it is with OWN_IN_PLACE."""
    offsets = block_offsets(first, B.GROUPS_LANES, B.GROUP)
    groups = first // B.GROUP + tl.arange(0, B.GROUPS_LANES)
    empty = tl.full((B.GROUPS_LANES, B.GROUP), EMPTY_BYTE if B.ELEMENT == tl.uint8 else EMPTY, B.ELEMENT)
    lines = lines_of(places.rows, slots, B, S.WORLD_SIZE)
    for peer in tl.static_range(S.WORLD_SIZE):
        arrived = (offsets < B.WIDTH) & (full_like(offsets, slots[peer]) >= 0)
        if OWN_IN_PLACE:
            arrived = arrived & (full_like(offsets, rank) != peer)
        tl.store(lines[peer] + offsets, empty, mask=arrived)
        if B.SCALED:
            there = (groups < B.WIDTH // B.GROUP) & (full_like(groups, slots[peer]) >= 0)
            scale_line = places.scales + tl.cast(slots[peer], tl.int64) * (B.WIDTH // B.GROUP)
            tl.store(scale_line + groups, full_like(groups, EMPTY), mask=there)


@portable
def take_block(
    seen, step, places, slots, own_line, first, S: tl.constexpr, B: tl.constexpr, OWN_IN_PLACE: tl.constexpr
):
    """Wait for a block of a token's rows and empty it. Returns (sum float32, poison word).

    With OWN_IN_PLACE this rank's own row lies at `own_line`, was never sent and stays as it is.

    Args:
        seen: what read_block has found in this launch.
    """
    rank = step.rank
    missing, total = judge_block(seen, slots, first, rank, S, B, OWN_IN_PLACE)
    poison = tl.full((), 0, tl.int32)
    polls = tl.full((), 0, tl.int32)
    deadline = tl.full((), 0, tl.int64)
    while (missing < S.WORLD_SIZE) & (poison == 0):
        pause(step.pause_ns)
        now_seen = read_block(places, slots, own_line, first, rank, S, B, OWN_IN_PLACE)
        missing, total = judge_block(now_seen, slots, first, rank, S, B, OWN_IN_PLACE)
        polls = next_poll(polls)
        if (polls % POLLS_PER_CLOCK == 0) & (missing < S.WORLD_SIZE):
            poison, deadline = overdue(step.table, polls, deadline, missing, rank, S.WORLD_SIZE, 1)
    empty_block(places, slots, first, rank, S, B, OWN_IN_PLACE)
    return total, poison


@portable
def clear_results(result, num_tokens, share, B: tl.constexpr, DTYPE: tl.constexpr):
    """Store zeros in place of what add_results stores: a failed step shows neither parts of sums nor older ones."""
    block: tl.constexpr = B.GROUPS_LANES * B.GROUP
    num_blocks: tl.constexpr = (B.WIDTH + block - 1) // block
    per_word: tl.constexpr = B.ELEMENT.primitive_bitwidth // B.DTYPE.primitive_bitwidth
    hidden: tl.constexpr = B.WIDTH * per_word
    for unit in range(share.program, num_tokens * num_blocks, share.num_programs):
        offsets = block_offsets((unit % num_blocks) * block * per_word, B.GROUPS_LANES, B.GROUP * per_word)
        target = result + tl.cast(unit // num_blocks, tl.int64) * hidden + offsets
        tl.store(target, round_to(offsets * 0.0, DTYPE), mask=offsets < hidden)


@portable
def add_weights(
    step, places, slots, own_weights, token, S: tl.constexpr, WEIGHTS: tl.constexpr, OWN_IN_PLACE: tl.constexpr
):
    """Wait for a token's weights, add and store them. Returns the poison word."""
    lines = ReturnPlaces(places.weights, places.scales, places.weights)
    seen = read_block(lines, slots, own_weights, 0, step.rank, S, WEIGHTS, OWN_IN_PLACE)
    sums, poison = take_block(seen, step, lines, slots, own_weights, 0, S, WEIGHTS, OWN_IN_PLACE)
    sums_out = address(step.table, RESULT_WEIGHTS, step.rank, S.WORLD_SIZE, tl.float32)
    sums_out += tl.cast(token, tl.int64) * S.TOPK
    weights_at = block_offsets(0, 1, WEIGHTS.GROUP)
    tl.store(sums_out + weights_at, sums, mask=weights_at < S.TOPK)
    return poison


@portable
def slots_of_unit(step, routes, unit, S: tl.constexpr, B: tl.constexpr):
    """slots_of_token of the token that a unit of work, one block of its rows, belongs to."""
    block: tl.constexpr = B.GROUPS_LANES * B.GROUP
    num_blocks: tl.constexpr = (B.WIDTH + block - 1) // block
    return slots_of_token(routes, unit // num_blocks, step, S.WORLD_SIZE)


@portable
def read_unit(given, step, places, slots, own_row, unit, S: tl.constexpr, B: tl.constexpr, OWN_IN_PLACE: tl.constexpr):
    """Return (pointers to this rank's own row and weights of the unit's token, the unit's block from read_block)."""
    block: tl.constexpr = B.GROUPS_LANES * B.GROUP
    num_blocks: tl.constexpr = (B.WIDTH + block - 1) // block
    own_line, own_weights = own_lines_of(given, slots, own_row, step, B.WIDTH, S.TOPK, S.WORLD_SIZE)
    found = read_block(places, slots, own_line, (unit % num_blocks) * block, step.rank, S, B, OWN_IN_PLACE)
    return own_line, own_weights, found


@portable
def add_results(
    given, step, share, own_row, S: tl.constexpr, B: tl.constexpr, WEIGHTS: tl.constexpr, COMBINE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, SPANS: tl.constexpr = False,
):  # fmt: skip
    """Wait for the rows of this program's share of the tokens, add and store them. Returns the poison word.

    With READ_AHEAD a unit is read for the first time while the one before it is added, which takes registers.

    Args:
        given: Operands. step: CombineStep. share: Share.
        own_row: where this rank's own rows begin in the given rows and weights, used with OWN_IN_PLACE.
        B, WEIGHTS: Block of rows and of weights. COMBINE: Combine.
        SPANS: the end of the wait for the first block is noted, and with it the start of the sums.
    """
    table, rank, first_unit, num_programs = step.table, step.rank, share.program, share.num_programs
    block: tl.constexpr = B.GROUPS_LANES * B.GROUP
    num_blocks: tl.constexpr = (B.WIDTH + block - 1) // block
    in_place: tl.constexpr = COMBINE.OWN_IN_PLACE
    routes = address(table, ROUTES, rank, S.WORLD_SIZE, tl.int32)
    places = return_places(table, rank, S.WORLD_SIZE, B.ELEMENT)
    poison = tl.full((), 0, tl.int32)
    num_units = step.num_tokens * num_blocks
    slots = slots_of_unit(step, routes, first_unit, S, B)
    if COMBINE.READ_AHEAD:
        following = slots_of_unit(step, routes, first_unit + num_programs, S, B)
        own_line, own_weights, seen = read_unit(given, step, places, slots, own_row, first_unit, S, B, in_place)
    for unit in range(first_unit, num_units, num_programs):
        token, first = unit // num_blocks, (unit % num_blocks) * block
        # in flight while this unit's rows are waited for
        if COMBINE.READ_AHEAD:
            later = slots_of_unit(step, routes, unit + 2 * num_programs, S, B)
            taken = seen
            next_own_line, next_own_weights, seen = read_unit(
                given, step, places, following, own_row, unit + num_programs, S, B, in_place
            )
        else:
            later = slots_of_unit(step, routes, unit + num_programs, S, B)
            own_line, own_weights, taken = read_unit(given, step, places, slots, own_row, unit, S, B, in_place)
        if poison == 0:
            total, poison = take_block(taken, step, places, slots, own_line, first, S, B, in_place)
            if unit == first_unit:
                end_span(SPANS, table, RECV_WAIT, S.WORLD_SIZE)
                begin_span(SPANS, table, TOPK_REDUCE, S.WORLD_SIZE)
            store_sum(given, total, token, first, B, COMBINE.DTYPE)
            if unit % num_blocks == 0:
                if HAS_WEIGHTS:
                    if poison == 0:
                        poison = add_weights(step, places, slots, own_weights, token, S, WEIGHTS, in_place)
                if COMBINE.CHECK_INDICES:
                    note_foreign_indices(table, given.ids, token, step.epoch, rank, S)
        if COMBINE.READ_AHEAD:
            slots, following, own_line, own_weights = following, later, next_own_line, next_own_weights
        else:
            slots = later
    return poison


@portable
def store_sum(given, total, token, first, B: tl.constexpr, DTYPE: tl.constexpr):
    """Store a block of a token's sums, with the biases that are not None, rounded to DTYPE."""
    per_word: tl.constexpr = B.ELEMENT.primitive_bitwidth // B.DTYPE.primitive_bitwidth
    hidden: tl.constexpr = B.WIDTH * per_word
    offsets = block_offsets(first * per_word, B.GROUPS_LANES, B.GROUP * per_word)
    target = tl.multiple_of(given.result + tl.cast(token, tl.int64) * hidden, 16)
    total = plus_biases(total, given.bias_0, given.bias_1, token, offsets, hidden)
    tl.store(target + offsets, round_to(total, DTYPE), mask=offsets < hidden)
