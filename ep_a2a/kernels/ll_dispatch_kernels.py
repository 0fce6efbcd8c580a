"""IntraNode dispatch of few tokens: words that are their own flags, so that a row takes one hop and no fence.

A sender writes a row into a region of its own at the receiver, and the receiver's programs wait for the words
themselves and move them to where the experts read. What travels beside the row (scales, ids, weights, position) are
words that carry the epoch. The row itself costs no extra bytes: a word of it is there when it is not EMPTY, and the
reader leaves EMPTY behind. Rows of a fused cast never contain EMPTY; a row that does is written in full first, and then
announced by a released position word with the highest bit set.
"""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import quantize_tile
from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region, Span, Stage
from ep_a2a.kernels.ll_receive_kernels import receive_flagged_rows, received_places
from ep_a2a.kernels.primitives import (
    EMPTY,
    NUM_TOKENS,
    POISON,
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
    record_span_edge,
    reduce_sum,
    wait_all,
)
from ep_a2a.kernels.receive_kernels import accept_rows, last_received, post_counts, receive_nothing, wait_counts
from ep_a2a.kernels.routing_kernels import field_of, fields_before, fields_of_token, fields_of_tokens, record_route
from ep_a2a.kernels.send_kernels import load_choices, load_for_cast

DISPATCH_FLAGS = tl.constexpr(Region.DISPATCH_FLAGS.value)
FLAGGED_ROWS = tl.constexpr(Region.FLAGGED_ROWS.value)
FLAGGED_SIDES = tl.constexpr(Region.FLAGGED_SIDES.value)
TOKENS = tl.constexpr(Region.TOKENS.value)
ROUTES = tl.constexpr(Region.ROUTES.value)
SENT_INDICES = tl.constexpr(Region.SENT_INDICES.value)
DISPATCH_SEND = tl.constexpr(Stage.DISPATCH_SEND.value)
DISPATCH_RECEIVE = tl.constexpr(Stage.DISPATCH_RECEIVE.value)
QUANT_AND_PUT = tl.constexpr(Span.QUANT_AND_PUT.value)
COUNT_PUT = tl.constexpr(Span.COUNT_PUT.value)
WAIT = tl.constexpr(Span.WAIT.value)

WRITTEN_IN_FULL = tl.constexpr(-(1 << 31))


@portable
def slots_of(
    before, own, healthy, rank, own_stride, SLOTS: tl.constexpr, WORLD_SIZE: tl.constexpr, COUNT_BITS: tl.constexpr
):  # fmt: skip
    """The slot of a token's row at every rank, -1 for none; a tuple that begins with this rank.

    Args:
        before: fields (routing_kernels), rows per rank of the tokens before it; own: of the token itself.
        healthy: nothing is sent without it.
        own_stride: slots per source where this rank's own rows go. SLOTS: those of the flagged regions.
    """
    slots = ()
    for step in tl.static_range(WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        goes = (field_of(own, peer, WORLD_SIZE, COUNT_BITS) > 0) & healthy
        first = rank * (own_stride if step == 0 else SLOTS)
        slots = slots + (tl.where(goes, first + field_of(before, peer, WORLD_SIZE, COUNT_BITS), -1),)
    return slots


@portable
def bases_of(
    table, own_region: tl.constexpr, region: tl.constexpr, rank, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Where a region begins at every rank, as a tuple that begins with this rank, for which it is `own_region`."""
    bases = (address(table, own_region, rank, WORLD_SIZE, DTYPE),)
    for step in tl.static_range(1, WORLD_SIZE):
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
def push(starts, slots, offsets, words, mask, FIRST: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Writes words to every rank that the token goes to, from the FIRST in order on, past all caches of this GPU."""
    for step in tl.static_range(FIRST, WORLD_SIZE):
        if slots[step] >= 0:
            tl.store(starts[step] + offsets, words, mask=mask, cache_modifier=".wt")


@portable
def push_beside(
    own_lines, values, lanes, sides, slots, epoch, FIRST_WORD: tl.constexpr, COUNT: tl.constexpr, FIRST: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Pushes COUNT values that travel beside a row; those of an own row go straight to its line of `own_lines`."""
    push(sides, slots, FIRST_WORD + lanes, flagged(values, epoch), lanes < COUNT, FIRST, WORLD_SIZE)
    if FIRST == 1:
        if slots[0] >= 0:
            line = own_lines + tl.cast(slots[0], tl.int64) * COUNT
            tl.store(line + lanes, values.to(own_lines.dtype.element_ty), mask=lanes < COUNT)


@portable
def push_cast_row(
    own_scales, values, starts, slots, sides, epoch, FIRST: tl.constexpr, WORLD_SIZE: tl.constexpr,
    HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUP_LANES: tl.constexpr, GROUPS_LANES: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr, BYTE_SCALES: tl.constexpr,
):  # fmt: skip
    """Casts a row's tile to fp8 and pushes it, and its scales beside it."""
    groups = tl.arange(0, GROUPS_LANES)
    num_groups: tl.constexpr = HIDDEN // GROUP
    elements = tl.arange(0, GROUP_LANES)
    mask = (groups < num_groups)[:, None] & (elements < GROUP)[None, :]
    bits, scale_bits = quantize_tile(values.to(tl.float32), POWERS_OF_TWO)
    push(starts, slots, groups[:, None] * GROUP + elements[None, :], bits, mask, 0, WORLD_SIZE)
    if BYTE_SCALES:
        scale_bits = scale_bits >> 23
    push_beside(own_scales, scale_bits, groups, sides, slots, epoch, 0, num_groups, FIRST, WORLD_SIZE)


@portable
def push_row(x, starts, token, slots, WORLD_SIZE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr):
    """Pushes a token's row as it is. Returns whether it contains EMPTY."""
    source = tl.multiple_of(x + tl.cast(token, tl.int64) * ROW_WORDS, 16)
    num_empty = tl.full((), 0, tl.int32)
    for first_word in tl.static_range(0, ROW_WORDS, BLOCK_WORDS):
        offsets = first_word + tl.arange(0, BLOCK_WORDS)
        words = tl.load(source + offsets, mask=offsets < ROW_WORDS, other=0)
        push(starts, slots, offsets, words, offsets < ROW_WORDS, 0, WORLD_SIZE)
        num_empty += reduce_sum((words == EMPTY).to(tl.int32), 0)
    return num_empty > 0


@portable
def push_position(
    own_positions, sides, slots, position, written_in_full, epoch, POSITION: tl.constexpr, FIRST: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Pushes the word that says where a row comes from, behind a fence when the row could not be its own flag."""
    if FIRST == 1:
        if slots[0] >= 0:
            tl.store(own_positions + slots[0], position)
    if written_in_full:
        word = flagged(position | WRITTEN_IN_FULL, epoch)
        tl.debug_barrier()
        for step in tl.static_range(FIRST, WORLD_SIZE):
            if slots[step] >= 0:
                tl.atomic_xchg(sides[step] + POSITION, word, sem="release", scope="sys")
    else:
        word = flagged(position, epoch)
        for step in tl.static_range(FIRST, WORLD_SIZE):
            if slots[step] >= 0:
                tl.store(sides[step] + POSITION, word, cache_modifier=".wt")


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
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, OWNERS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr, BYTE_SCALES: tl.constexpr, HAS_SCALES: tl.constexpr,
    GROUP: tl.constexpr, GROUP_LANES: tl.constexpr, GROUPS_LANES: tl.constexpr, POWERS_OF_TWO: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr, SLOTS: tl.constexpr, TOKEN_LANES: tl.constexpr,
    COUNT_BITS: tl.constexpr, COUNT_LANES: tl.constexpr, SIDE_LANES: tl.constexpr, SPARSE_POLLS: tl.constexpr,
    SEND: tl.constexpr, RECEIVE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Dispatch of one step of at most SLOTS tokens per rank; arguments as in dispatch_kernel, and:

    Program 0, the keeper, tells and hears the counts; program 1, the herald, posts and awaits the flags.

    Args:
        num_senders: the programs after those two, which send.
        num_receivers: the last programs of the grid, which receive.
        SPARSE_POLLS: see take_row_block.
        SPANS: see dispatch_kernel.
        SEND, RECEIVE: what this launch does. The interpreter, which runs programs in turn, needs two launches.
    """
    row_dtype: tl.constexpr = tl.uint8 if GROUP > 0 else tl.int32
    row_width: tl.constexpr = ROW_WORDS * 4 if GROUP > 0 else ROW_WORDS
    scale_dtype: tl.constexpr = tl.uint8 if BYTE_SCALES else tl.int32
    # own rows go straight to where the experts read them, unless it takes all counts to know where that is
    first_peer: tl.constexpr = 0 if COMPACT else 1
    # addresses never change, so they may be read before the launch before this one has ended
    row_bases = bases_of(table, FLAGGED_ROWS if COMPACT else TOKENS, FLAGGED_ROWS, rank, WORLD_SIZE, row_dtype)
    side_bases = bases_of(table, FLAGGED_SIDES, FLAGGED_SIDES, rank, WORLD_SIZE, tl.int64)
    places = received_places(table, rank, WORLD_SIZE, scale_dtype)
    _own_rows, own_scales, own_weights, own_ids, own_positions = places
    routes = address(table, ROUTES, rank, WORLD_SIZE, tl.int32)
    sent_ids = address(table, SENT_INDICES, rank, WORLD_SIZE, tl.int32)
    poison_word = address(table, POISON, rank, WORLD_SIZE, tl.int32)
    if DEPENDENT_LAUNCH:
        after_previous_launch()
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    is_keeper = program == 0
    is_herald = program == 1
    epoch, out_of_order = begin_stage(table, DISPATCH_SEND if SEND else DISPATCH_RECEIVE, WORLD_SIZE)
    answer = ask_poison(poison_word, COUNT_LANES)
    poison = tl.full((), 0, tl.int32)
    if SEND:
        sender = program - 2
        # below the sender of the first two programs, which must find no token
        end = tl.where((sender >= 0) & (sender < num_senders), num_tokens, -2)
        # in flight together with all that decides where the row goes
        if GROUP > 0:
            tile = load_for_cast(x, sender, end, ROW_WORDS * 4, GROUP, GROUP_LANES, GROUPS_LANES)
        token_ids, token_weights = load_choices(ids, weights, sender, end, TOPK, TOPK_LANES, HAS_WEIGHTS)
        going = fields_of_tokens(ids, num_tokens, TOPK, OWNERS, WORLD_SIZE, TOKEN_LANES, COUNT_BITS)
        poison = may_go_on(table, answer, 1, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
        if is_herald & (poison == 0):
            post_all(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES, False)
        before = fields_before(going, tl.where(is_keeper, num_tokens, sender), WORLD_SIZE, TOKEN_LANES, COUNT_BITS)
        own = fields_of_token(token_ids, OWNERS, WORLD_SIZE, COUNT_BITS)
        if is_keeper & (poison == 0):
            if SPANS:
                record_span_edge(table, COUNT_PUT, False, WORLD_SIZE)
            tl.store(address(table, STATE, rank, WORLD_SIZE, tl.int32) + NUM_TOKENS, num_tokens)
            counts = field_of(before, tl.arange(0, WORLD_LANES), WORLD_SIZE, COUNT_BITS)
            post_counts(table, counts, wire_word, epoch, rank, WORLD_SIZE, WORLD_LANES)
            if SPANS:
                record_span_edge(table, COUNT_PUT, True, WORLD_SIZE)
        if SPANS:
            if (sender >= 0) & (sender < num_senders):
                record_span_edge(table, QUANT_AND_PUT, False, WORLD_SIZE)
        for token in range(sender, end, num_senders):
            slots = slots_of(
                before, own, poison == 0, rank, SLOTS if COMPACT else stride, SLOTS, WORLD_SIZE, COUNT_BITS
            )
            sides = line_starts(side_bases, slots, SCALE_WORDS + 2 * TOPK + 1, WORLD_SIZE, tl.int64)
            starts = line_starts(row_bases, slots, row_width, WORLD_SIZE, row_dtype)
            written_in_full = num_tokens < 0
            if GROUP > 0:
                push_cast_row(
                    own_scales, tile, starts, slots, sides, epoch, first_peer, WORLD_SIZE, ROW_WORDS * 4,
                    GROUP, GROUP_LANES, GROUPS_LANES, POWERS_OF_TWO, BYTE_SCALES,
                )  # fmt: skip
            else:
                written_in_full = push_row(x, starts, token, slots, WORLD_SIZE, ROW_WORDS, BLOCK_WORDS)
                if HAS_SCALES:
                    at = tl.arange(0, SIDE_LANES)
                    values = tl.load(scales + token * SCALE_WORDS + at, mask=at < SCALE_WORDS, other=0).to(tl.int32)
                    push_beside(own_scales, values, at, sides, slots, epoch, 0, SCALE_WORDS, first_peer, WORLD_SIZE)
            choices = tl.arange(0, TOPK_LANES)
            push_beside(own_ids, token_ids, choices, sides, slots, epoch, SCALE_WORDS, TOPK, first_peer, WORLD_SIZE)
            if HAS_WEIGHTS:
                push_beside(
                    own_weights, token_weights, choices, sides, slots, epoch, SCALE_WORDS + TOPK, TOPK, first_peer,
                    WORLD_SIZE,
                )  # fmt: skip
            push_position(
                own_positions, sides, slots, first_position + token, written_in_full, epoch, SCALE_WORDS + 2 * TOPK,
                first_peer, WORLD_SIZE,
            )  # fmt: skip
            record_route(
                routes, sent_ids, token_ids, token, before, own, TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, COUNT_BITS
            )
            following = token + num_senders
            if GROUP > 0:
                tile = load_for_cast(x, following, end, ROW_WORDS * 4, GROUP, GROUP_LANES, GROUPS_LANES)
            token_ids, token_weights = load_choices(ids, weights, following, end, TOPK, TOPK_LANES, HAS_WEIGHTS)
            before = fields_before(going, following, WORLD_SIZE, TOKEN_LANES, COUNT_BITS)
            own = fields_of_token(token_ids, OWNERS, WORLD_SIZE, COUNT_BITS)
        if SPANS:
            if (sender >= 0) & (sender < num_senders):
                record_span_edge(table, QUANT_AND_PUT, True, WORLD_SIZE)
    else:
        poison = may_go_on(table, answer, 1, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    if RECEIVE:
        receiver = program - (num_programs - num_receivers)
        if SPANS:
            if is_keeper | is_herald | (receiver >= 0):
                record_span_edge(table, WAIT, False, WORLD_SIZE)
        if is_keeper:
            old_counts, old_stride, old_pad_id = last_received(table, rank, WORLD_SIZE, WORLD_LANES)
            if poison == 0:
                _, poison = wait_counts(table, epoch, rank, WORLD_SIZE, COUNT_LANES)
            if poison == 0:
                poison = accept_rows(
                    table, old_counts, old_stride, old_pad_id, epoch, stride, wire_word, pad_id, row_limit,
                    num_region_rows, rank, TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, COMPACT,
                )  # fmt: skip
            if poison != 0:
                receive_nothing(table, rank, WORLD_SIZE, WORLD_LANES)
        elif is_herald & (poison == 0):
            # tells that every peer's earlier combine has read what this rank will write next
            poison = wait_all(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES, False, 1)
        elif (receiver >= 0) & (poison == 0):
            poison = receive_flagged_rows(
                table, places, epoch, stride, row_limit, rank, receiver, num_receivers,
                TOPK, WORLD_SIZE, ROW_WORDS, BLOCK_WORDS, SCALE_WORDS, HAS_SCALES, HAS_WEIGHTS, COMPACT,
                SLOTS, COUNT_LANES, SIDE_LANES, GROUP > 0, SPARSE_POLLS,
            )  # fmt: skip
        if poison != 0:
            late = lanes_behind(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
            fail(table, poison, 1, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
        if SPANS:
            if is_keeper | is_herald | (receiver >= 0):
                record_span_edge(table, WAIT, True, WORLD_SIZE)
        finish_stage(table, DISPATCH_RECEIVE, program, num_programs, WORLD_SIZE)
    if SEND:
        finish_stage(table, DISPATCH_SEND, program, num_programs, WORLD_SIZE)
