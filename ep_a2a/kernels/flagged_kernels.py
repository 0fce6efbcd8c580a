"""IntraNode dispatch of few tokens: words that are their own flags, so that a row takes one hop and no fence.

A sender writes a row into a region of its own at the receiver, and the receiver's programs wait for the words
themselves and move them to where the experts read. What travels beside the row (scales, ids, weights, position) are
words that carry the epoch. The row itself costs no extra bytes: a word of it is there when it is not EMPTY, and the
reader leaves EMPTY behind. Rows of a fused cast never contain EMPTY; a row that does is written in full first, and then
announced by a released position word with the highest bit set.
"""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import quantize_tile
from ep_a2a.kernels.flagged_receive_kernels import receive_flagged_rows
from ep_a2a.kernels.layout import Region, Stage
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    EMPTY,
    NUM_TOKENS,
    STATE,
    address,
    after_previous_launch,
    ask_poison,
    begin_stage,
    fail,
    finish_stage,
    flagged,
    lanes_behind,
    may_go_on,
    post_all,
    reduce_sum,
    wait_all,
)
from ep_a2a.kernels.receive_kernels import accept_rows, last_received, post_counts, receive_nothing, wait_counts
from ep_a2a.kernels.routing_kernels import byte_counts, byte_of
from ep_a2a.kernels.send_kernels import load_for_cast

DISPATCH_FLAGS = tl.constexpr(Region.DISPATCH_FLAGS.value)
FLAGGED_ROWS = tl.constexpr(Region.FLAGGED_ROWS.value)
FLAGGED_SIDES = tl.constexpr(Region.FLAGGED_SIDES.value)
ROUTES = tl.constexpr(Region.ROUTES.value)
SENT_INDICES = tl.constexpr(Region.SENT_INDICES.value)
DISPATCH_SEND = tl.constexpr(Stage.DISPATCH_SEND.value)
DISPATCH_RECEIVE = tl.constexpr(Stage.DISPATCH_RECEIVE.value)

WRITTEN_IN_FULL = tl.constexpr(-(1 << 31))


@portable
def slots_of(before, own, healthy, rank, SLOTS: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """The slot of a token's row in the flagged regions of every rank, -1 for none; a tuple that begins with this rank.

    Args:
        before, own: from byte_counts. healthy: nothing is sent without it.
        SLOTS: slots that the regions keep per source.
    """
    slots = ()
    for step in tl.static_range(WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        goes = (byte_of(own, peer, WORLD_SIZE) > 0) & healthy
        slots = slots + (tl.where(goes, rank * SLOTS + byte_of(before, peer, WORLD_SIZE), -1),)
    return slots


@portable
def bases_of(table, region: tl.constexpr, rank, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Where a region begins at every rank, as a tuple that begins with this rank."""
    bases = ()
    for step in tl.static_range(WORLD_SIZE):
        bases = bases + (address(table, region, (rank + step) % WORLD_SIZE, WORLD_SIZE, DTYPE),)
    return bases


@portable
def line_starts(bases, slots, WIDTH: tl.constexpr, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Where the lines of WIDTH elements of those slots begin, in the same order."""
    starts = ()
    # the hint must be given here: on the result of a call it would be lost
    aligned: tl.constexpr = 16 if WIDTH * DTYPE.primitive_bitwidth % 128 == 0 else 8
    for step in tl.static_range(WORLD_SIZE):
        starts = starts + (tl.multiple_of(bases[step] + tl.cast(slots[step], tl.int64) * WIDTH, aligned),)
    return starts


@portable
def push(starts, slots, offsets, words, mask, WORLD_SIZE: tl.constexpr):
    """Writes words to every rank that the token goes to, past all caches of this GPU."""
    for step in tl.static_range(WORLD_SIZE):
        if slots[step] >= 0:
            tl.store(starts[step] + offsets, words, mask=mask, cache_modifier=".wt")


@portable
def push_cast_row(
    values, starts, slots, sides, epoch, WORLD_SIZE: tl.constexpr, HIDDEN: tl.constexpr,
    GROUP: tl.constexpr, GROUP_LANES: tl.constexpr, GROUPS_LANES: tl.constexpr, POWERS_OF_TWO: tl.constexpr,
    BYTE_SCALES: tl.constexpr,
):  # fmt: skip
    """Casts a row's tile to fp8 and pushes it, and its scales beside it."""
    groups = tl.arange(0, GROUPS_LANES)
    num_groups: tl.constexpr = HIDDEN // GROUP
    elements = tl.arange(0, GROUP_LANES)
    mask = (groups < num_groups)[:, None] & (elements < GROUP)[None, :]
    bits, scale_bits = quantize_tile(values.to(tl.float32), POWERS_OF_TWO)
    push(starts, slots, groups[:, None] * GROUP + elements[None, :], bits, mask, WORLD_SIZE)
    if BYTE_SCALES:
        scale_bits = scale_bits >> 23
    push(sides, slots, groups, flagged(scale_bits, epoch), groups < num_groups, WORLD_SIZE)


@portable
def push_row(x, starts, token, slots, WORLD_SIZE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr):
    """Pushes a token's row as it is. Returns whether it contains EMPTY."""
    source = tl.multiple_of(x + tl.cast(token, tl.int64) * ROW_WORDS, 16)
    num_empty = tl.full((), 0, tl.int32)
    for first_word in tl.static_range(0, ROW_WORDS, BLOCK_WORDS):
        offsets = first_word + tl.arange(0, BLOCK_WORDS)
        words = tl.load(source + offsets, mask=offsets < ROW_WORDS, other=0)
        push(starts, slots, offsets, words, offsets < ROW_WORDS, WORLD_SIZE)
        num_empty += reduce_sum((words == EMPTY).to(tl.int32), 0)
    return num_empty > 0


@portable
def push_position(sides, slots, position, written_in_full, epoch, POSITION: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Pushes the word that says where a row comes from, behind a fence when the row could not be its own flag."""
    if written_in_full:
        word = flagged(position | WRITTEN_IN_FULL, epoch)
        tl.debug_barrier()
        for step in tl.static_range(WORLD_SIZE):
            if slots[step] >= 0:
                tl.atomic_xchg(sides[step] + POSITION, word, sem="release", scope="sys")
    else:
        word = flagged(position, epoch)
        for step in tl.static_range(WORLD_SIZE):
            if slots[step] >= 0:
                tl.store(sides[step] + POSITION, word, cache_modifier=".wt")


@portable
def push_side(
    ids, weights, sides, slots, token, position, written_in_full, epoch, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    SCALE_WORDS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Pushes what travels beside a row, but for its scales."""
    at = tl.arange(0, TOPK_LANES)
    own_ids = tl.load(ids + token * TOPK + at, mask=at < TOPK, other=-1)
    push(sides, slots, SCALE_WORDS + at, flagged(own_ids, epoch), at < TOPK, WORLD_SIZE)
    if HAS_WEIGHTS:
        values = tl.load(weights + token * TOPK + at, mask=at < TOPK, other=0)
        push(sides, slots, SCALE_WORDS + TOPK + at, flagged(values, epoch), at < TOPK, WORLD_SIZE)
    push_position(sides, slots, position, written_in_full, epoch, SCALE_WORDS + 2 * TOPK, WORLD_SIZE)


@portable
def record_route(
    table, ids, token, before, own, rank, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr,
    WORLD_LANES: tl.constexpr,
):  # fmt: skip
    """Records where a token went and its ids, for combine."""
    lanes = tl.arange(0, WORLD_LANES)
    at = tl.arange(0, TOPK_LANES)
    routes = address(table, ROUTES, rank, WORLD_SIZE, tl.int32) + token * WORLD_SIZE
    index = tl.where(byte_of(own, lanes, WORLD_SIZE) > 0, byte_of(before, lanes, WORLD_SIZE), -1)
    tl.store(routes + lanes, index, mask=lanes < WORLD_SIZE)
    sent_ids = address(table, SENT_INDICES, rank, WORLD_SIZE, tl.int32) + token * TOPK
    tl.store(sent_ids + at, tl.load(ids + token * TOPK + at, mask=at < TOPK, other=-1), mask=at < TOPK)


@portable(
    do_not_specialize=[
        "num_tokens", "stride", "wire_word", "pad_id", "row_limit", "num_region_rows", "first_position", "rank",
        "num_senders", "num_receivers",
    ],
    do_not_specialize_on_alignment=["scales", "weights", "ids"],
)  # fmt: skip
def flagged_dispatch_kernel(
    x, scales, weights, ids, table, num_tokens, stride, wire_word, pad_id, row_limit, num_region_rows,
    first_position, rank, num_senders, num_receivers,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr, BYTE_SCALES: tl.constexpr, HAS_SCALES: tl.constexpr,
    GROUP: tl.constexpr, GROUP_LANES: tl.constexpr, GROUPS_LANES: tl.constexpr, POWERS_OF_TWO: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr, SLOTS: tl.constexpr, TOKEN_LANES: tl.constexpr,
    COUNT_LANES: tl.constexpr, SIDE_LANES: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Dispatch of one step of at most SLOTS tokens per rank; arguments as in dispatch_kernel, and:

    Args:
        num_senders: the programs after the first, which send.
        num_receivers: the last programs of the grid, which receive. Program 0 speaks with the peers: counts and flags.
        SEND, RECEIVE: what this launch does. The interpreter, which runs programs in turn, needs two launches.
    """
    if DEPENDENT_LAUNCH:
        after_previous_launch()
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    is_keeper = program == 0
    epoch, out_of_order = begin_stage(table, DISPATCH_SEND if SEND else DISPATCH_RECEIVE, WORLD_SIZE)
    answer = ask_poison(table, rank, WORLD_SIZE, COUNT_LANES)
    poison = tl.full((), 0, tl.int32)
    if SEND:
        sender = program - 1
        # -1: the keeper's sender is -1, and must find no token -1
        end = tl.where((sender >= 0) & (sender < num_senders), num_tokens, -1)
        row_dtype: tl.constexpr = tl.uint8 if GROUP > 0 else tl.int32
        row_width: tl.constexpr = ROW_WORDS * 4 if GROUP > 0 else ROW_WORDS
        row_bases = bases_of(table, FLAGGED_ROWS, rank, WORLD_SIZE, row_dtype)
        side_bases = bases_of(table, FLAGGED_SIDES, rank, WORLD_SIZE, tl.int64)
        if GROUP > 0:
            # in flight together with all that decides where the row goes
            tile = load_for_cast(x, sender, end, ROW_WORDS * 4, GROUP, GROUP_LANES, GROUPS_LANES)
        before, own = byte_counts(
            ids, tl.where(is_keeper, num_tokens, sender), num_tokens, TOPK, NUM_EXPERTS, WORLD_SIZE, TOKEN_LANES
        )
        poison = may_go_on(table, answer, 1, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
        if is_keeper & (poison == 0):
            tl.store(address(table, STATE, rank, WORLD_SIZE, tl.int32) + NUM_TOKENS, num_tokens)
            counts = byte_of(before, tl.arange(0, WORLD_LANES), WORLD_SIZE)
            post_counts(table, counts, wire_word, epoch, rank, WORLD_SIZE, WORLD_LANES)
            # last, since its fence takes longest and nobody needs it before the end
            post_all(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
        for token in range(sender, end, num_senders):
            slots = slots_of(before, own, poison == 0, rank, SLOTS, WORLD_SIZE)
            sides = line_starts(side_bases, slots, SCALE_WORDS + 2 * TOPK + 1, WORLD_SIZE, tl.int64)
            starts = line_starts(row_bases, slots, row_width, WORLD_SIZE, row_dtype)
            written_in_full = num_tokens < 0
            if GROUP > 0:
                push_cast_row(
                    tile, starts, slots, sides, epoch, WORLD_SIZE, ROW_WORDS * 4,
                    GROUP, GROUP_LANES, GROUPS_LANES, POWERS_OF_TWO, BYTE_SCALES,
                )  # fmt: skip
            else:
                written_in_full = push_row(x, starts, token, slots, WORLD_SIZE, ROW_WORDS, BLOCK_WORDS)
                if HAS_SCALES:
                    at = tl.arange(0, SIDE_LANES)
                    values = tl.load(scales + token * SCALE_WORDS + at, mask=at < SCALE_WORDS, other=0).to(tl.int32)
                    push(sides, slots, at, flagged(values, epoch), at < SCALE_WORDS, WORLD_SIZE)
            push_side(
                ids, weights, sides, slots, token, first_position + token, written_in_full, epoch,
                TOPK, TOPK_LANES, SCALE_WORDS, HAS_WEIGHTS, WORLD_SIZE,
            )  # fmt: skip
            record_route(table, ids, token, before, own, rank, TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES)
            following = token + num_senders
            if GROUP > 0:
                tile = load_for_cast(x, following, end, ROW_WORDS * 4, GROUP, GROUP_LANES, GROUPS_LANES)
            before, own = byte_counts(ids, following, num_tokens, TOPK, NUM_EXPERTS, WORLD_SIZE, TOKEN_LANES)
    else:
        poison = may_go_on(table, answer, 1, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    if RECEIVE:
        receiver = program - (num_programs - num_receivers)
        if is_keeper:
            old_counts, old_stride, old_pad_id = last_received(table, rank, WORLD_SIZE, WORLD_LANES)
            if poison == 0:
                _, poison = wait_counts(table, epoch, rank, WORLD_SIZE, COUNT_LANES)
            if poison == 0:
                poison = accept_rows(
                    table, old_counts, old_stride, old_pad_id, epoch, stride, wire_word, pad_id, row_limit,
                    num_region_rows, rank, TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, COMPACT,
                )  # fmt: skip
            if poison == 0:
                # tells that every peer's earlier combine has read what this rank will write next
                poison = wait_all(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
            if poison != 0:
                receive_nothing(table, rank, WORLD_SIZE, WORLD_LANES)
        elif (receiver >= 0) & (poison == 0):
            poison = receive_flagged_rows(
                table, epoch, stride, row_limit, rank, receiver, num_receivers,
                TOPK, WORLD_SIZE, ROW_WORDS, BLOCK_WORDS, SCALE_WORDS, BYTE_SCALES, HAS_SCALES, HAS_WEIGHTS, COMPACT,
                SLOTS, COUNT_LANES, SIDE_LANES, GROUP > 0,
            )  # fmt: skip
        if poison != 0:
            late = lanes_behind(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
            fail(table, poison, 1, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
        finish_stage(table, DISPATCH_RECEIVE, program, num_programs, WORLD_SIZE)
    if SEND:
        finish_stage(table, DISPATCH_SEND, program, num_programs, WORLD_SIZE)
