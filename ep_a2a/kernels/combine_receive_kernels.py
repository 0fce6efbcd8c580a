"""Device helpers of combine that take what experts' ranks send back and add it, in ascending rank order."""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import plus_biases, round_to, widened
from ep_a2a.kernels.combine_send_kernels import block_offsets
from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region, Span
from ep_a2a.kernels.primitives import (
    EMPTY,
    ERROR_CLAIMED,
    ERROR_RECORD,
    FOREIGN_INDICES,
    POLLS_PER_CLOCK,
    STATE,
    address,
    overdue,
    pause,
    record_span_edge,
    reduce_max,
    reduce_min,
    reduce_sum,
)

COMBINE_ROWS = tl.constexpr(Region.COMBINE_ROWS.value)
COMBINE_SCALES = tl.constexpr(Region.COMBINE_SCALES.value)
COMBINE_WEIGHTS = tl.constexpr(Region.COMBINE_WEIGHTS.value)
ROUTES = tl.constexpr(Region.ROUTES.value)
SENT_INDICES = tl.constexpr(Region.SENT_INDICES.value)
RESULT_WEIGHTS = tl.constexpr(Region.RESULT_WEIGHTS.value)
RECV_WAIT = tl.constexpr(Span.RECV_WAIT.value)
TOPK_REDUCE = tl.constexpr(Span.TOPK_REDUCE.value)

# EMPTY as an unsigned byte.
EMPTY_BYTE = tl.constexpr(0xFF)


@portable
def note_foreign_indices(table, ids, token, epoch, rank, WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr,
                         TOPK_LANES: tl.constexpr):  # fmt: skip
    """Tells the host when a token's ids are not those that dispatch sent. The result does not depend on them."""
    slots = tl.arange(0, TOPK_LANES)
    where = tl.cast(token, tl.int64) * TOPK + slots
    sent = tl.load(address(table, SENT_INDICES, rank, WORLD_SIZE, tl.int32) + where, mask=slots < TOPK, other=0)
    given = tl.load(ids + where, mask=slots < TOPK, other=0)
    if reduce_max((sent != given).to(tl.int32), 0) > 0:
        state = address(table, STATE, rank, WORLD_SIZE, tl.int32)
        if tl.atomic_cas(state + ERROR_CLAIMED, 0, 1, sem="relaxed", scope="gpu") == 0:
            record = address(table, ERROR_RECORD, rank, WORLD_SIZE, tl.int32)
            tl.store(record + 2, 2)
            tl.store(record + 3, epoch)
            tl.store(record + 4, token)
            tl.store(record, FOREIGN_INDICES)


@portable
def slots_of_token(routes, token, num_tokens, slots_per_rank, WORLD_SIZE: tl.constexpr):
    """Where the rows of a token arrive, by expert rank, -1 for none; none from token `num_tokens` on."""
    slots = ()
    for peer in tl.static_range(WORLD_SIZE):
        route = routes + tl.cast(token, tl.int64) * WORLD_SIZE + peer
        index = tl.load(route, mask=token < num_tokens, other=-1)
        slots = slots + (tl.where(index >= 0, peer * slots_per_rank + index, -1),)
    return slots


@portable
def own_slot(slots, rank, WORLD_SIZE: tl.constexpr):
    """The slot of this rank's own row; -1 when the token did not go to an expert here."""
    own = slots[0]
    for peer in tl.static_range(1, WORLD_SIZE):
        own = tl.where(rank == peer, slots[peer], own)
    return own


@portable
def lines_of(rows, slots, WIDTH: tl.constexpr, ELEMENT: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Where the rows in those slots begin, in a region with WIDTH elements per row."""
    lines = ()
    # the hint must be given here: on the result of a call it would be lost
    aligned: tl.constexpr = 16 if WIDTH * ELEMENT.primitive_bitwidth % 128 == 0 else 1
    for peer in tl.static_range(WORLD_SIZE):
        lines = lines + (tl.multiple_of(rows + tl.cast(slots[peer], tl.int64) * WIDTH, aligned),)
    return lines


@portable
def own_lines_of(
    rows_in, weights_in, slots, first_own_row, slots_per_rank, rank, HIDDEN: tl.constexpr, TOPK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Where this rank's own row and weights of a token lie; anywhere when its slot is -1."""
    own_row = first_own_row + own_slot(slots, rank, WORLD_SIZE) - rank * slots_per_rank
    return rows_in + tl.cast(own_row, tl.int64) * HIDDEN, weights_in + tl.cast(own_row, tl.int64) * TOPK


@portable
def read_block(
    rows, scales, slots, own_line, first, rank, WIDTH: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr,
    WORLD_SIZE: tl.constexpr, ELEMENT: tl.constexpr, SCALED: tl.constexpr, OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """A block of a token's rows as it lies there now: a tile for each rank, and if SCALED another with its scales.

    Each element is read by one thread, so that a reduction over them is one verdict for all; the tile must have at
    least as many lanes as a program has threads. Scales are a tile with one lane of each group read: as a vector of
    groups, the compiler would load them several times, and might check one copy and multiply by another.
    """
    offsets = block_offsets(first, GROUPS_LANES, GROUP)
    lines = lines_of(rows, slots, WIDTH, ELEMENT, WORLD_SIZE)
    aligned: tl.constexpr = 16 if WIDTH * ELEMENT.primitive_bitwidth % 128 == 0 else 1
    seen = ()
    for peer in tl.static_range(WORLD_SIZE):
        # vectors of the slot number: the interpreter mistypes a scalar condition that meets a vector
        present = (offsets < WIDTH) & (slots[peer] + offsets * 0 >= 0)
        line = lines[peer]
        if OWN_IN_PLACE:
            line = tl.multiple_of(tl.where(rank == peer, own_line, line), aligned)
        seen = seen + (tl.load(line + offsets, mask=present, other=0, volatile=True),)
        if SCALED:
            elements = offsets % GROUP
            scale_line = scales + tl.cast(slots[peer], tl.int64) * (WIDTH // GROUP)
            where = scale_line + offsets // GROUP + elements
            seen = seen + (tl.load(where, mask=present & (elements == 0), other=0, volatile=True),)
    return seen


@portable
def judge_block(
    seen, slots, first, rank, WIDTH: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, SCALED: tl.constexpr,
    OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """(lowest rank with an element that has not arrived, or W; the sum of what has, in ascending rank order, float32).

    Args:
        seen: from read_block.
    """
    offsets = block_offsets(first, GROUPS_LANES, GROUP)
    total = tl.full((GROUPS_LANES, GROUP), 0.0, tl.float32)
    missing = tl.full((GROUPS_LANES, GROUP), WORLD_SIZE, tl.int32)
    per_peer: tl.constexpr = 2 if SCALED else 1
    for peer in tl.static_range(WORLD_SIZE):
        present = (offsets < WIDTH) & (slots[peer] + offsets * 0 >= 0)
        bits = seen[peer * per_peer]
        values = widened(bits, DTYPE)
        late = bits == (EMPTY_BYTE if ELEMENT == tl.uint8 else EMPTY)
        if OWN_IN_PLACE:
            late = late & (offsets * 0 + rank != peer)
        if SCALED:
            scale_bits = reduce_sum(seen[peer * per_peer + 1], 1)
            late = late | ((scale_bits == EMPTY)[:, None] & present)
            values = values * scale_bits.to(tl.float32, bitcast=True)[:, None]
        missing = tl.where(late & (missing == WORLD_SIZE), peer, missing)
        total += tl.where(present, values, 0.0)
    return reduce_min(reduce_min(missing, 1), 0), total


@portable
def take_block(
    table, seen, rows, scales, slots, own_line, first, rank, pause_ns,
    WIDTH: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, SCALED: tl.constexpr,
    OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Waits for a block of a token's rows and empties it: (sum float32, poison word).

    With OWN_IN_PLACE this rank's own row lies at `own_line`, was never sent and stays as it is.

    Args:
        seen: what read_block has found in this launch.
    """
    missing, total = judge_block(
        seen, slots, first, rank, WIDTH, GROUPS_LANES, GROUP, WORLD_SIZE, DTYPE, ELEMENT, SCALED, OWN_IN_PLACE
    )
    poison = tl.full((), 0, tl.int32)
    polls = tl.full((), 0, tl.int32)
    deadline = tl.full((), 0, tl.int64)
    while (missing < WORLD_SIZE) & (poison == 0):
        pause(pause_ns)
        now_seen = read_block(
            rows, scales, slots, own_line, first, rank, WIDTH, GROUPS_LANES, GROUP, WORLD_SIZE, ELEMENT, SCALED,
            OWN_IN_PLACE,
        )  # fmt: skip
        missing, total = judge_block(
            now_seen, slots, first, rank, WIDTH, GROUPS_LANES, GROUP, WORLD_SIZE, DTYPE, ELEMENT, SCALED, OWN_IN_PLACE
        )
        polls += 1
        if (polls % POLLS_PER_CLOCK == 0) & (missing < WORLD_SIZE):
            poison, deadline = overdue(table, polls, deadline, missing, rank, WORLD_SIZE, 1)
    offsets = block_offsets(first, GROUPS_LANES, GROUP)
    groups = first // GROUP + tl.arange(0, GROUPS_LANES)
    empty = tl.full((GROUPS_LANES, GROUP), EMPTY_BYTE if ELEMENT == tl.uint8 else EMPTY, ELEMENT)
    lines = lines_of(rows, slots, WIDTH, ELEMENT, WORLD_SIZE)
    for peer in tl.static_range(WORLD_SIZE):
        arrived = (offsets < WIDTH) & (slots[peer] + offsets * 0 >= 0)
        if OWN_IN_PLACE:
            arrived = arrived & (offsets * 0 + rank != peer)
        tl.store(lines[peer] + offsets, empty, mask=arrived)
        if SCALED:
            there = (groups < WIDTH // GROUP) & (slots[peer] + groups * 0 >= 0)
            scale_line = scales + tl.cast(slots[peer], tl.int64) * (WIDTH // GROUP)
            tl.store(scale_line + groups, groups * 0 + EMPTY, mask=there)
    return total, poison


@portable
def clear_results(
    result, num_tokens, receiver, num_receivers, HIDDEN: tl.constexpr, GROUPS_LANES: tl.constexpr,
    GROUP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Zeros in place of what add_results stores: a step that failed shows neither parts of sums nor older ones."""
    block: tl.constexpr = GROUPS_LANES * GROUP
    num_blocks: tl.constexpr = (HIDDEN + block - 1) // block
    for unit in range(receiver, num_tokens * num_blocks, num_receivers):
        offsets = block_offsets((unit % num_blocks) * block, GROUPS_LANES, GROUP)
        target = result + tl.cast(unit // num_blocks, tl.int64) * HIDDEN + offsets
        tl.store(target, round_to(offsets * 0.0, DTYPE), mask=offsets < HIDDEN)


@portable
def add_results(
    rows_in, weights_in, result, ids, bias_0, bias_1, table, num_tokens, first_own_row, slots_per_rank, rank, epoch,
    receiver, num_receivers, pause_ns,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WEIGHT_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr,
    HIDDEN: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr,
    WIRE_DTYPE: tl.constexpr, ELEMENT: tl.constexpr, SCALED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    CHECK_INDICES: tl.constexpr, OWN_IN_PLACE: tl.constexpr, READ_AHEAD: tl.constexpr, SPANS: tl.constexpr = False,
):  # fmt: skip
    """This program's share of the tokens: waits for their rows, adds and stores them. Returns the poison word.

    Args:
        first_own_row: where this rank's own rows begin in rows_in and weights_in, used with OWN_IN_PLACE.
        READ_AHEAD: a unit is read for the first time while the one before it is added, which takes registers.
        SPANS: the end of the wait for the first block is noted, and with it the start of the sums.
    """
    block: tl.constexpr = GROUPS_LANES * GROUP
    num_blocks: tl.constexpr = (HIDDEN + block - 1) // block
    routes = address(table, ROUTES, rank, WORLD_SIZE, tl.int32)
    rows = address(table, COMBINE_ROWS, rank, WORLD_SIZE, ELEMENT)
    scales = address(table, COMBINE_SCALES, rank, WORLD_SIZE, tl.int32)
    weight_rows = address(table, COMBINE_WEIGHTS, rank, WORLD_SIZE, tl.int32)
    weights_at = block_offsets(0, 1, WEIGHT_LANES)
    poison = tl.full((), 0, tl.int32)
    num_units = num_tokens * num_blocks
    slots = slots_of_token(routes, receiver // num_blocks, num_tokens, slots_per_rank, WORLD_SIZE)
    if READ_AHEAD:
        following = slots_of_token(
            routes, (receiver + num_receivers) // num_blocks, num_tokens, slots_per_rank, WORLD_SIZE
        )
        own_line, own_weights = own_lines_of(
            rows_in, weights_in, slots, first_own_row, slots_per_rank, rank, HIDDEN, TOPK, WORLD_SIZE
        )
        seen = read_block(
            rows, scales, slots, own_line, (receiver % num_blocks) * block, rank, HIDDEN, GROUPS_LANES, GROUP,
            WORLD_SIZE, ELEMENT, SCALED, OWN_IN_PLACE,
        )  # fmt: skip
    for unit in range(receiver, num_units, num_receivers):
        token = unit // num_blocks
        first = (unit % num_blocks) * block
        # in flight while this unit's rows are waited for
        if READ_AHEAD:
            later = slots_of_token(
                routes, (unit + 2 * num_receivers) // num_blocks, num_tokens, slots_per_rank, WORLD_SIZE
            )
            next_own_line, next_own_weights = own_lines_of(
                rows_in, weights_in, following, first_own_row, slots_per_rank, rank, HIDDEN, TOPK, WORLD_SIZE
            )
            taken = seen
            seen = read_block(
                rows, scales, following, next_own_line, ((unit + num_receivers) % num_blocks) * block, rank, HIDDEN,
                GROUPS_LANES, GROUP, WORLD_SIZE, ELEMENT, SCALED, OWN_IN_PLACE,
            )  # fmt: skip
        else:
            later = slots_of_token(routes, (unit + num_receivers) // num_blocks, num_tokens, slots_per_rank, WORLD_SIZE)
            own_line, own_weights = own_lines_of(
                rows_in, weights_in, slots, first_own_row, slots_per_rank, rank, HIDDEN, TOPK, WORLD_SIZE
            )
            taken = read_block(
                rows, scales, slots, own_line, first, rank, HIDDEN, GROUPS_LANES, GROUP, WORLD_SIZE, ELEMENT, SCALED,
                OWN_IN_PLACE,
            )  # fmt: skip
        if poison == 0:
            total, poison = take_block(
                table, taken, rows, scales, slots, own_line, first, rank, pause_ns,
                HIDDEN, GROUPS_LANES, GROUP, WORLD_SIZE, WIRE_DTYPE, ELEMENT, SCALED, OWN_IN_PLACE,
            )  # fmt: skip
            if SPANS:
                if unit == receiver:
                    record_span_edge(table, RECV_WAIT, True, WORLD_SIZE)
                    record_span_edge(table, TOPK_REDUCE, False, WORLD_SIZE)
            offsets = block_offsets(first, GROUPS_LANES, GROUP)
            target = tl.multiple_of(result + tl.cast(token, tl.int64) * HIDDEN, 16)
            total = plus_biases(total, bias_0, bias_1, token, offsets, HIDDEN)
            tl.store(target + offsets, round_to(total, DTYPE), mask=offsets < HIDDEN)
            if unit % num_blocks == 0:
                if HAS_WEIGHTS:
                    if poison == 0:
                        weights_seen = read_block(
                            weight_rows, scales, slots, own_weights, 0, rank, TOPK, 1, WEIGHT_LANES, WORLD_SIZE,
                            tl.int32, False, OWN_IN_PLACE,
                        )  # fmt: skip
                        sums, poison = take_block(
                            table, weights_seen, weight_rows, scales, slots, own_weights, 0, rank, pause_ns,
                            TOPK, 1, WEIGHT_LANES, WORLD_SIZE, tl.float32, tl.int32, False, OWN_IN_PLACE,
                        )  # fmt: skip
                        sums_out = address(table, RESULT_WEIGHTS, rank, WORLD_SIZE, tl.float32)
                        sums_out += tl.cast(token, tl.int64) * TOPK
                        tl.store(sums_out + weights_at, sums, mask=weights_at < TOPK)
                if CHECK_INDICES:
                    note_foreign_indices(table, ids, token, epoch, rank, WORLD_SIZE, TOPK, TOPK_LANES)
        if READ_AHEAD:
            slots, following, own_line, own_weights = following, later, next_own_line, next_own_weights
        else:
            slots = later
    return poison
