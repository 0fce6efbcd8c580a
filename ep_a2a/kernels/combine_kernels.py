"""IntraNode combine: expert ranks push rows to where their tokens came from, which adds them in ascending rank order.

A row is its own flag: an element of it has arrived when it is not EMPTY, and the reader leaves EMPTY behind. So there
is no fence, rows are added while later ones are still on the wire, and a step costs one hop. One flag per peer tells
beside it that the peer has begun its combine, which bounds how far ranks can run ahead of each other.
"""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import round_to, widened
from ep_a2a.kernels.combine_send_kernels import block_offsets, push_results
from ep_a2a.kernels.layout import Region, Stage
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    EMPTY,
    ERROR_CLAIMED,
    ERROR_RECORD,
    FOREIGN_INDICES,
    NOBODY,
    NUM_TOKENS,
    POLLS_PER_CLOCK,
    STATE,
    WEIGHTS_MISSING,
    address,
    after_previous_launch,
    ask_poison,
    begin_stage,
    fail,
    finish_stage,
    lanes_behind,
    may_go_on,
    overdue,
    pause,
    post_all,
    reduce_max,
    reduce_min,
    reduce_sum,
    wait_all,
)

COMBINE_FLAGS = tl.constexpr(Region.COMBINE_FLAGS.value)
COMBINE_ROWS = tl.constexpr(Region.COMBINE_ROWS.value)
COMBINE_SCALES = tl.constexpr(Region.COMBINE_SCALES.value)
COMBINE_WEIGHTS = tl.constexpr(Region.COMBINE_WEIGHTS.value)
ROUTES = tl.constexpr(Region.ROUTES.value)
SENT_INDICES = tl.constexpr(Region.SENT_INDICES.value)
RECV_COUNTS = tl.constexpr(Region.RECV_COUNTS.value)
RESULT_WEIGHTS = tl.constexpr(Region.RESULT_WEIGHTS.value)
WEIGHT_EPOCHS = tl.constexpr(Region.WEIGHT_EPOCHS.value)
COMBINE_SEND = tl.constexpr(Stage.COMBINE_SEND.value)
COMBINE_RECEIVE = tl.constexpr(Stage.COMBINE_RECEIVE.value)

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
def look_at_block(
    rows, scales, slots, own_line, first, rank, WIDTH: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, SCALED: tl.constexpr,
    OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """(lowest rank with an element that has not arrived, or W; the sum of what has, in ascending rank order, float32).

    Each element is read by one thread, so that a reduction over them is one verdict for all; the tile must have at
    least as many lanes as a program has threads.
    """
    offsets = block_offsets(first, GROUPS_LANES, GROUP)
    groups = first // GROUP + tl.arange(0, GROUPS_LANES)
    total = tl.full((GROUPS_LANES, GROUP), 0.0, tl.float32)
    missing = tl.full((GROUPS_LANES, GROUP), WORLD_SIZE, tl.int32)
    lines = lines_of(rows, slots, WIDTH, ELEMENT, WORLD_SIZE)
    aligned: tl.constexpr = 16 if WIDTH * ELEMENT.primitive_bitwidth % 128 == 0 else 1
    for peer in tl.static_range(WORLD_SIZE):
        # vectors of the slot number: the interpreter mistypes a scalar condition that meets a vector
        present = (offsets < WIDTH) & (slots[peer] + offsets * 0 >= 0)
        line = lines[peer]
        if OWN_IN_PLACE:
            line = tl.multiple_of(tl.where(rank == peer, own_line, line), aligned)
        bits = tl.load(line + offsets, mask=present, other=0, volatile=True)
        values = widened(bits, DTYPE)
        late = bits == (EMPTY_BYTE if ELEMENT == tl.uint8 else EMPTY)
        if OWN_IN_PLACE:
            late = late & (offsets * 0 + rank != peer)
        if SCALED:
            there = (groups < WIDTH // GROUP) & (slots[peer] + groups * 0 >= 0)
            scale_line = scales + tl.cast(slots[peer], tl.int64) * (WIDTH // GROUP)
            scale_bits = tl.load(scale_line + groups, mask=there, other=0, volatile=True)
            late = late | ((scale_bits == EMPTY)[:, None] & present)
            values = values * scale_bits.to(tl.float32, bitcast=True)[:, None]
        missing = tl.where(late & (missing == WORLD_SIZE), peer, missing)
        total += tl.where(present, values, 0.0)
    return reduce_min(reduce_min(missing, 1), 0), total


@portable
def take_block(
    table, rows, scales, slots, own_line, first, rank, pause_ns,
    WIDTH: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, SCALED: tl.constexpr,
    OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Waits for a block of a token's rows and empties it: (sum float32, poison word).

    With OWN_IN_PLACE this rank's own row lies at `own_line`, was never sent and stays as it is.
    """
    missing, total = look_at_block(
        rows, scales, slots, own_line, first, rank, WIDTH, GROUPS_LANES, GROUP, WORLD_SIZE, DTYPE, ELEMENT, SCALED,
        OWN_IN_PLACE,
    )  # fmt: skip
    poison = tl.full((), 0, tl.int32)
    polls = tl.full((), 0, tl.int32)
    deadline = tl.full((), 0, tl.int64)
    while (missing < WORLD_SIZE) & (poison == 0):
        pause(pause_ns)
        missing, total = look_at_block(
            rows, scales, slots, own_line, first, rank, WIDTH, GROUPS_LANES, GROUP, WORLD_SIZE, DTYPE, ELEMENT, SCALED,
            OWN_IN_PLACE,
        )  # fmt: skip
        polls += 1
        if (polls % POLLS_PER_CLOCK == 0) & (missing < WORLD_SIZE):
            poison, deadline = overdue(table, polls, deadline, missing, rank, WORLD_SIZE)
    if SCALED:
        # The compiler loads the small vector of scales several times, volatile or not, and may check one copy and
        # multiply by another. All has arrived now, so any copy is right.
        _, total = look_at_block(
            rows, scales, slots, own_line, first, rank, WIDTH, GROUPS_LANES, GROUP, WORLD_SIZE, DTYPE, ELEMENT, SCALED,
            OWN_IN_PLACE,
        )  # fmt: skip
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
def add_results(
    rows_in, weights_in, result, ids, table, num_tokens, first_own_row, slots_per_rank, rank, epoch, receiver,
    num_receivers, pause_ns,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WEIGHT_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr,
    HIDDEN: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr,
    WIRE_DTYPE: tl.constexpr, ELEMENT: tl.constexpr, SCALED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    CHECK_INDICES: tl.constexpr, OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """This program's share of the tokens: waits for their rows, adds and stores them. Returns the poison word.

    Args:
        first_own_row: where this rank's own rows begin in rows_in and weights_in, used with OWN_IN_PLACE.
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
    for unit in range(receiver, num_units, num_receivers):
        token = unit // num_blocks
        # in flight while this unit's rows are waited for
        following = slots_of_token(routes, (unit + num_receivers) // num_blocks, num_tokens, slots_per_rank, WORLD_SIZE)
        if poison == 0:
            own_line, own_weights = rows, weight_rows
            if OWN_IN_PLACE:
                own_row = first_own_row + own_slot(slots, rank, WORLD_SIZE) - rank * slots_per_rank
                own_line = rows_in + tl.cast(own_row, tl.int64) * HIDDEN
                own_weights = weights_in + tl.cast(own_row, tl.int64) * TOPK
            first = (unit % num_blocks) * block
            total, poison = take_block(
                table, rows, scales, slots, own_line, first, rank, pause_ns,
                HIDDEN, GROUPS_LANES, GROUP, WORLD_SIZE, WIRE_DTYPE, ELEMENT, SCALED, OWN_IN_PLACE,
            )  # fmt: skip
            offsets = block_offsets(first, GROUPS_LANES, GROUP)
            target = tl.multiple_of(result + tl.cast(token, tl.int64) * HIDDEN, 16)
            tl.store(target + offsets, round_to(total, DTYPE), mask=offsets < HIDDEN)
            if unit % num_blocks == 0:
                if HAS_WEIGHTS:
                    if poison == 0:
                        sums, poison = take_block(
                            table, weight_rows, scales, slots, own_weights, 0, rank, pause_ns,
                            TOPK, 1, WEIGHT_LANES, WORLD_SIZE, tl.float32, tl.int32, False, OWN_IN_PLACE,
                        )  # fmt: skip
                        sums_out = address(table, RESULT_WEIGHTS, rank, WORLD_SIZE, tl.float32)
                        sums_out += tl.cast(token, tl.int64) * TOPK
                        tl.store(sums_out + weights_at, sums, mask=weights_at < TOPK)
                if CHECK_INDICES:
                    note_foreign_indices(table, ids, token, epoch, rank, WORLD_SIZE, TOPK, TOPK_LANES)
        slots = following
    return poison


@portable
def tell_peers(table, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, HAS_WEIGHTS: tl.constexpr):
    """Tells every peer that this rank has begun this combine, and whether it brings weights."""
    if HAS_WEIGHTS:
        lanes = tl.arange(0, WORLD_LANES)
        present = lanes < WORLD_SIZE
        told = address(table, WEIGHT_EPOCHS, tl.where(present, lanes, rank), WORLD_SIZE, tl.int32) + rank
        tl.store(told, lanes * 0 + epoch, mask=present)
    post_all(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)


@portable
def hear_peers(table, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, HAS_WEIGHTS: tl.constexpr):
    """Waits until every peer has begun this combine; the poison word, also when a peer brings no weights."""
    poison = wait_all(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
    if HAS_WEIGHTS:
        if poison == 0:
            lanes = tl.arange(0, WORLD_LANES)
            told = address(table, WEIGHT_EPOCHS, rank, WORLD_SIZE, tl.int32) + lanes
            brought = tl.load(told, mask=lanes < WORLD_SIZE, other=0, volatile=True)
            missing = ((brought != epoch) & (lanes < WORLD_SIZE)).to(tl.int32)
            if reduce_max(missing, 0) > 0:
                poison = tl.full((), (WEIGHTS_MISSING << 16) | NOBODY, tl.int32)
                fail(table, poison, 2, epoch, 1, missing, rank, WORLD_SIZE, WORLD_LANES)
    return poison


@portable(
    do_not_specialize=["num_tokens", "stride", "slots_per_rank", "rank", "num_senders", "num_receivers", "pause_ns"],
    do_not_specialize_on_alignment=["ids", "weights_in"],
)  # fmt: skip
def combine_kernel(
    rows_in, weights_in, result, ids, table, num_tokens, stride, slots_per_rank, rank, num_senders, num_receivers,
    pause_ns,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WEIGHT_LANES: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    HIDDEN: tl.constexpr, SEND_GROUPS_LANES: tl.constexpr, SEND_GROUP: tl.constexpr,
    GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr,
    DTYPE: tl.constexpr, WIRE_DTYPE: tl.constexpr, ELEMENT: tl.constexpr, QUANTIZED: tl.constexpr,
    SCALED: tl.constexpr, HAS_WEIGHTS: tl.constexpr, CHECK_INDICES: tl.constexpr, COMPACT: tl.constexpr,
    OWN_IN_PLACE: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Combine of one step: result [num_tokens, HIDDEN] of DTYPE; a token that went nowhere becomes zeros.

    Args:
        rows_in: the received rows' results, in the order in which dispatch left the rows; integer elements of the
            wire's width, or DTYPE when QUANTIZED asks for the cast to fp8 (SCALED: one scale per GROUP elements).
        weights_in: [rows, TOPK] float32 as int32, in the same order, when HAS_WEIGHTS.
        ids: this rank's own ids [num_tokens, TOPK], when CHECK_INDICES.
        stride: rows per source in layout rank_major. slots_per_rank: M, rows that each peer may send back.
        num_senders: the programs after the first, which send blocks of SEND_GROUPS_LANES * SEND_GROUP elements.
        num_receivers: the last programs of the grid, which add blocks of GROUPS_LANES * GROUP elements. Program 0
            speaks with the peers.
        pause_ns: how long a receiver sleeps between two looks at rows that have not arrived.
        OWN_IN_PLACE: this rank's own rows are added where they lie, instead of being sent.
        SEND, RECEIVE: what this launch does. The interpreter, which runs programs in turn, needs two launches.
    """
    if DEPENDENT_LAUNCH:
        after_previous_launch()
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    is_keeper = program == 0
    lanes = tl.arange(0, WORLD_LANES)
    counts = tl.load(address(table, RECV_COUNTS, rank, WORLD_SIZE, tl.int32) + lanes, mask=lanes < WORLD_SIZE, other=0)
    epoch, out_of_order = begin_stage(table, COMBINE_SEND if SEND else COMBINE_RECEIVE, WORLD_SIZE)
    # a graph of another number of tokens would leave rows behind that nobody takes
    sent_tokens = tl.load(address(table, STATE, rank, WORLD_SIZE, tl.int32) + NUM_TOKENS)
    out_of_order = out_of_order | tl.cast(sent_tokens - num_tokens, tl.int64)
    answer = ask_poison(table, rank, WORLD_SIZE, WEIGHT_LANES)
    poison = may_go_on(table, answer, 2, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    if SEND:
        if is_keeper & (poison == 0):
            tell_peers(table, epoch, rank, WORLD_SIZE, WORLD_LANES, HAS_WEIGHTS)
        sender = program - 1
        if (sender >= 0) & (sender < num_senders) & (poison == 0):
            push_results(
                rows_in, weights_in, table, counts, stride, slots_per_rank, rank, sender, num_senders,
                TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, HIDDEN, SEND_GROUPS_LANES, SEND_GROUP, ELEMENT, QUANTIZED,
                SCALED, HAS_WEIGHTS, COMPACT, OWN_IN_PLACE,
            )  # fmt: skip
    if RECEIVE:
        receiver = program - (num_programs - num_receivers)
        if is_keeper:
            if poison == 0:
                # also tells that every peer's experts have read what this rank will write next
                poison = hear_peers(table, epoch, rank, WORLD_SIZE, WORLD_LANES, HAS_WEIGHTS)
        elif (receiver >= 0) & (poison == 0):
            first_own_row = rank * stride
            if COMPACT:
                first_own_row = reduce_sum(tl.where(lanes < rank, counts, 0), 0)
            poison = add_results(
                rows_in, weights_in, result, ids, table, num_tokens, first_own_row, slots_per_rank, rank, epoch,
                receiver, num_receivers, pause_ns,
                TOPK, TOPK_LANES, WEIGHT_LANES, WORLD_SIZE, HIDDEN, GROUPS_LANES, GROUP, DTYPE, WIRE_DTYPE, ELEMENT,
                SCALED, HAS_WEIGHTS, CHECK_INDICES, OWN_IN_PLACE,
            )  # fmt: skip
        if poison != 0:
            late = lanes_behind(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
            fail(table, poison, 2, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
        finish_stage(table, COMBINE_RECEIVE, program, num_programs, WORLD_SIZE)
    if SEND:
        finish_stage(table, COMBINE_SEND, program, num_programs, WORLD_SIZE)
