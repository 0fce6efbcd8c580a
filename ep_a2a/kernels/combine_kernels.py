"""IntraNode combine: each rank pulls the rows of the ranks it had sent to and adds them in ascending rank order.

The expert side only has to leave its rows in the combine region. `stage_kernel` copies them there when they are
elsewhere; with zero copy the experts wrote them there and one launch does everything.
"""

import triton.language as tl

from ep_a2a.kernels.layout import Region, State
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    ALTERNATION,
    DISPATCHED,
    ERROR_CLAIMED,
    ERROR_RECORD,
    FOREIGN_INDICES,
    IDLE,
    NOBODY,
    STATE,
    WEIGHTS_MISSING,
    address,
    arrive_last,
    fail,
    lanes_behind,
    next_epoch,
    poison_of,
    post_all,
    reduce_max,
    wait_all,
)

COMBINE_FLAGS = tl.constexpr(Region.COMBINE_FLAGS.value)
COMBINE_ROWS = tl.constexpr(Region.COMBINE_ROWS.value)
COMBINE_WEIGHTS = tl.constexpr(Region.COMBINE_WEIGHTS.value)
ROUTES = tl.constexpr(Region.ROUTES.value)
SENT_INDICES = tl.constexpr(Region.SENT_INDICES.value)
RECV_COUNTS = tl.constexpr(Region.RECV_COUNTS.value)
RESULT_WEIGHTS = tl.constexpr(Region.RESULT_WEIGHTS.value)
WEIGHT_EPOCHS = tl.constexpr(Region.WEIGHT_EPOCHS.value)
COMBINE_EPOCH = tl.constexpr(State.COMBINE_EPOCH.value)
PHASE = tl.constexpr(State.PHASE.value)


@portable(do_not_specialize=["stride", "rank"], do_not_specialize_on_alignment=["weights_in"])
def stage_kernel(
    rows_in, weights_in, table, stride, rank,
    WORLD_SIZE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    COPY_ROWS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """Copies the received rows' results (as 4-byte words) and weights into this rank's combine regions.

    Peers read them only after this rank's combine flag, which the next launch posts.
    """
    counts = address(table, RECV_COUNTS, rank, WORLD_SIZE, tl.int32)
    rows_out = address(table, COMBINE_ROWS, rank, WORLD_SIZE, tl.int32)
    weights_out = address(table, COMBINE_WEIGHTS, rank, WORLD_SIZE, tl.float32)
    slots = tl.arange(0, TOPK_LANES)
    start = tl.full((), 0, tl.int32)
    for source in range(WORLD_SIZE):
        count = tl.load(counts + source)
        if not COMPACT:
            start = source * stride
        for index in range(tl.program_id(0), count, tl.num_programs(0)):
            row = tl.cast(start + index, tl.int64)
            if COPY_ROWS:
                for first_word in tl.static_range(0, ROW_WORDS, BLOCK_WORDS):
                    words = first_word + tl.arange(0, BLOCK_WORDS)
                    line = tl.multiple_of(rows_in + row * ROW_WORDS, 16)
                    data = tl.load(line + words, mask=words < ROW_WORDS)
                    tl.store(tl.multiple_of(rows_out + row * ROW_WORDS, 16) + words, data, mask=words < ROW_WORDS)
            if HAS_WEIGHTS:
                values = tl.load(weights_in + row * TOPK + slots, mask=slots < TOPK)
                tl.store(weights_out + row * TOPK + slots, values, mask=slots < TOPK)
        start += count


def _interpreted_round_to(values, DTYPE):
    # the interpreter truncates float32 to bf16
    if DTYPE != tl.bfloat16:
        return values.to(DTYPE)
    bits = values.to(tl.int32, bitcast=True)
    rounded = tl.where(values != values, 0x7FC0, round_half_even(bits))
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@portable
def round_half_even(bits):
    """The upper 16 bits of float32 bit patterns, rounded to nearest even: bf16."""
    # unsigned, since the carry may reach the sign bit of a large negative pattern
    low = tl.add(bits.to(tl.int64) & 0xFFFFFFFF, 0x7FFF)
    return (tl.add(low, (bits >> 16) & 1) >> 16) & 0xFFFF


@portable(interpreted=_interpreted_round_to)
def round_to(values, DTYPE: tl.constexpr):
    """float32 values rounded to DTYPE, nearest even."""
    return values.to(DTYPE)


@portable
def pull_row(
    result, table, routes, token, first_element, rank, WORLD_SIZE: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Adds one block of a token's rows over the ranks it went to, in ascending rank order in float32, and stores it."""
    elements = first_element + tl.arange(0, BLOCK)
    inside = elements < HIDDEN
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for peer in tl.static_range(WORLD_SIZE):
        row = tl.load(routes + tl.cast(token, tl.int64) * WORLD_SIZE + peer)
        line = address(table, COMBINE_ROWS, peer, WORLD_SIZE, DTYPE) + tl.cast(row, tl.int64) * HIDDEN
        # a vector of the row number: the interpreter mistypes a scalar condition that meets a vector
        present = inside & (row + elements * 0 >= 0)
        total += tl.load(tl.multiple_of(line, 16) + elements, mask=present, other=0.0).to(tl.float32)
    target = tl.multiple_of(result + tl.cast(token, tl.int64) * HIDDEN, 16)
    tl.store(target + elements, round_to(total, DTYPE), mask=inside)


@portable
def pull_weights(table, routes, token, rank, WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr):
    """Adds a token's weight rows over the ranks it went to."""
    slots = tl.arange(0, TOPK_LANES)
    total = tl.full((TOPK_LANES,), 0.0, tl.float32)
    for peer in tl.static_range(WORLD_SIZE):
        row = tl.load(routes + tl.cast(token, tl.int64) * WORLD_SIZE + peer)
        line = address(table, COMBINE_WEIGHTS, peer, WORLD_SIZE, tl.float32) + tl.cast(row, tl.int64) * TOPK
        total += tl.load(line + slots, mask=(slots < TOPK) & (row + slots * 0 >= 0), other=0.0)
    target = address(table, RESULT_WEIGHTS, rank, WORLD_SIZE, tl.float32) + tl.cast(token, tl.int64) * TOPK
    tl.store(target + slots, total, mask=slots < TOPK)


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


@portable(do_not_specialize=["num_tokens", "rank"], do_not_specialize_on_alignment=["ids"])
def combine_kernel(
    result, ids, table, num_tokens, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, CHECK_INDICES: tl.constexpr,
):  # fmt: skip
    """Combine of one step: result [num_tokens, HIDDEN] of DTYPE; a token that went nowhere becomes zeros.

    Program 0 posts this rank's flag before anything waits: what the peers read was written by earlier launches.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    state = address(table, STATE, rank, WORLD_SIZE, tl.int32)
    epoch = next_epoch(state + COMBINE_EPOCH)
    routes = address(table, ROUTES, rank, WORLD_SIZE, tl.int32)
    # loaded before the atomic, so that the two are in flight together
    phase = tl.load(state + PHASE)
    poison = poison_of(table, rank, WORLD_SIZE)
    if (poison == 0) & (phase != DISPATCHED):
        poison = (ALTERNATION << 16) | rank
        fail(table, poison, 2, epoch, 0, tl.arange(0, WORLD_LANES) * 0, rank, WORLD_SIZE, WORLD_LANES)
    lanes = tl.arange(0, WORLD_LANES)
    present = lanes < WORLD_SIZE
    if poison == 0:
        if program == 0:
            if HAS_WEIGHTS:
                # ordered by the flags: a peer that sums weights finds out whether this rank brought any
                told = address(table, WEIGHT_EPOCHS, tl.where(present, lanes, rank), WORLD_SIZE, tl.int32) + rank
                tl.store(told, lanes * 0 + epoch, mask=present)
            post_all(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
        poison = wait_all(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
    if HAS_WEIGHTS:
        if poison == 0:
            brought = tl.load(
                address(table, WEIGHT_EPOCHS, rank, WORLD_SIZE, tl.int32) + lanes, mask=present, other=0, volatile=True
            )
            missing = ((brought != epoch) & present).to(tl.int32)
            if reduce_max(missing, 0) > 0:
                poison = tl.full((), (WEIGHTS_MISSING << 16) | NOBODY, tl.int32)
                fail(table, poison, 2, epoch, 1, missing, rank, WORLD_SIZE, WORLD_LANES)
    if poison == 0:
        num_blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
        for unit in range(program, num_tokens * num_blocks, num_programs):
            token = unit // num_blocks
            block = unit % num_blocks
            pull_row(result, table, routes, token, block * BLOCK, rank, WORLD_SIZE, HIDDEN, BLOCK, DTYPE)
            if block == 0:
                if HAS_WEIGHTS:
                    pull_weights(table, routes, token, rank, WORLD_SIZE, TOPK, TOPK_LANES)
                if CHECK_INDICES:
                    note_foreign_indices(table, ids, token, epoch, rank, WORLD_SIZE, TOPK, TOPK_LANES)
    else:
        late = lanes_behind(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
        fail(table, poison, 2, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
    last, _ = arrive_last(table, rank, num_programs, poison, WORLD_SIZE)
    if last:
        tl.store(state + COMBINE_EPOCH, epoch)
        tl.store(state + PHASE, IDLE)
