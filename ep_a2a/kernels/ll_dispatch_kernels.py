"""IntraNode dispatch of few tokens: words that are their own flags, so that a row takes one hop and no fence.

A sender writes a row into a region of its own at the receiver, and the receiver's programs wait for the words
themselves and move them to where the experts read. The words beside the row (scales, ids, weights, position) are
words that carry the epoch. The row itself costs no extra bytes: a word of it is there when it is not EMPTY, and the
reader leaves EMPTY behind. Rows of a fused cast never contain EMPTY; a row that does is written in full first, and then
announced by a released position word with the highest bit set.
"""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels.cast_kernels import quantize_tile
from ep_a2a.kernels.layout import FlagProgram, Region, Span, Stage
from ep_a2a.kernels.ll_receive_kernels import receive_low_latency_rows, received_places
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    DISPATCH_PHASE,
    EMPTY,
    NUM_TOKENS,
    POISON,
    STATE,
    address,
    after_previous_launch,
    begin_stage,
    fail,
    finish_stage,
    flagged,
    initial_poison,
    lanes_behind,
    load_poison,
    post_all,
    reduce_sum,
    wait_all,
)
from ep_a2a.kernels.receive_kernels import (
    DispatchInputs,
    DispatchStep,
    accept_counts,
    post_counts,
    receive_nothing,
)
from ep_a2a.kernels.routing_kernels import field_of, fields_before, fields_of_token, fields_of_tokens, record_route
from ep_a2a.kernels.send_kernels import load_choices, load_tile
from ep_a2a.kernels.span_kernels import begin_span, end_span, next_span

DISPATCH_FLAGS = tl.constexpr(Region.DISPATCH_FLAGS.value)
LOW_LATENCY_ROWS = tl.constexpr(Region.LOW_LATENCY_ROWS.value)
LOW_LATENCY_SIDES = tl.constexpr(Region.LOW_LATENCY_SIDES.value)
TOKENS = tl.constexpr(Region.TOKENS.value)
ROUTES = tl.constexpr(Region.ROUTES.value)
SENT_INDICES = tl.constexpr(Region.SENT_INDICES.value)
DISPATCH_SEND = tl.constexpr(Stage.DISPATCH_SEND.value)
DISPATCH_RECEIVE = tl.constexpr(Stage.DISPATCH_RECEIVE.value)
QUANT_AND_PUT = tl.constexpr(Span.QUANT_AND_PUT.value)
COUNT_PUT = tl.constexpr(Span.COUNT_PUT.value)
WAIT = tl.constexpr(Span.WAIT.value)
PREPARE = tl.constexpr(Span.PREPARE.value)

COUNT_PUBLISHER = tl.constexpr(FlagProgram.COUNT_PUBLISHER.value)
FLAG_POSTER = tl.constexpr(FlagProgram.FLAG_POSTER.value)
NUM_FLAG_PROGRAMS = tl.constexpr(len(FlagProgram))

WRITTEN_IN_FULL = tl.constexpr(-(1 << 31))


class SendPlaces(NamedTuple):
    """Where a sender writes.

    rows, sides: where regions begin at every rank, from bases_of. own: from received_places. routes, ids: this rank's
    record of what it sends.
    """

    rows: tuple
    sides: tuple
    own: tuple
    routes: tl.tensor
    ids: tl.tensor


class Roles(NamedTuple):
    """A program's roles in a low-latency dispatch.

    is_publisher: it posts and awaits counts. is_poster: flags. num_senders: the programs after those two, which send.
    num_receivers: the last programs of the grid, which receive.
    """

    is_publisher: tl.tensor
    is_poster: tl.tensor
    num_senders: tl.tensor
    num_receivers: tl.tensor


class SentToken(NamedTuple):
    """A token of this rank: its number, the parts that are loaded, and fields (routing_kernels) as in slots_of."""

    number: tl.tensor
    tile: tl.tensor
    ids: tl.tensor
    weights: tl.tensor
    before: tuple
    own: tuple


class Targets(NamedTuple):
    """Where a token goes, by rank in an order that begins with this one.

    slots: from slots_of. rows, sides: where its row, and the words beside it, begin there.
    """

    slots: tuple
    rows: tuple
    sides: tuple


@portable
def slots_of(
    before, own, healthy, rank, own_slots, SLOTS: tl.constexpr, WORLD_SIZE: tl.constexpr, COUNT_BITS: tl.constexpr
):
    """Return the slot of a token's row at every rank, -1 for none; a tuple that begins with this rank.

    Args:
        before: fields (routing_kernels), rows per rank of the tokens before it; own: of the token itself.
        healthy: nothing is sent without it.
        own_slots: slots per source where this rank's own rows go. SLOTS: those of LOW_LATENCY_ROWS.
    """
    slots = ()
    for step in tl.static_range(WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        goes = (field_of(own, peer, WORLD_SIZE, COUNT_BITS) > 0) & healthy
        first = rank * (own_slots if step == 0 else SLOTS)
        slots = slots + (tl.where(goes, first + field_of(before, peer, WORLD_SIZE, COUNT_BITS), -1),)
    return slots


@portable
def bases_of(
    table, own_region: tl.constexpr, region: tl.constexpr, rank, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr
):
    """Return where a region begins at every rank, this rank first, for which it is `own_region`."""
    bases = (address(table, own_region, rank, WORLD_SIZE, DTYPE),)
    for step in tl.static_range(1, WORLD_SIZE):
        bases = bases + (address(table, region, (rank + step) % WORLD_SIZE, WORLD_SIZE, DTYPE),)
    return bases


@portable
def line_starts(bases, slots, WIDTH: tl.constexpr, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Return where the lines of WIDTH elements of those slots begin, in the same order."""
    starts = ()
    # the hint must be given here: on the result of a call it would be lost
    aligned: tl.constexpr = 16 if WIDTH * DTYPE.primitive_bitwidth % 128 == 0 else 8
    for step in tl.static_range(WORLD_SIZE):
        starts = starts + (tl.multiple_of(bases[step] + tl.cast(slots[step], tl.int64) * WIDTH, aligned),)
    return starts


@portable
def push(starts, slots, offsets, words, mask, FIRST: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Write words to every rank that the token goes to, from the FIRST in order on, past all caches of this GPU."""
    for step in tl.static_range(FIRST, WORLD_SIZE):
        if slots[step] >= 0:
            tl.store(starts[step] + offsets, words, mask=mask, cache_modifier=".wt")


@portable
def push_beside(own_lines, values, lanes, to, epoch, FIRST_WORD: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr):
    """Push COUNT values that travel beside a row to Targets.

    Those of an own row go straight to its line of `own_lines`, unless layout compact takes all counts to know where
    that is.
    """
    first_peer: tl.constexpr = 0 if S.COMPACT else 1
    push(to.sides, to.slots, FIRST_WORD + lanes, flagged(values, epoch), lanes < COUNT, first_peer, S.WORLD_SIZE)
    if first_peer == 1:
        if to.slots[0] >= 0:
            line = own_lines + tl.cast(to.slots[0], tl.int64) * COUNT
            tl.store(line + lanes, values.to(own_lines.dtype.element_ty), mask=lanes < COUNT)


@portable
def push_cast_row(own_scales, values, to, epoch, S: tl.constexpr, ROW: tl.constexpr):
    """Cast a row's tile to fp8 and push it, and its scales beside it, to Targets."""
    groups = tl.arange(0, ROW.GROUPS_LANES)
    num_groups: tl.constexpr = ROW.ROW_WORDS * 4 // ROW.GROUP
    elements = tl.arange(0, ROW.GROUP_LANES)
    mask = (groups < num_groups)[:, None] & (elements < ROW.GROUP)[None, :]
    bits, scale_bits = quantize_tile(values.to(tl.float32), ROW.POWERS_OF_TWO)
    push(to.rows, to.slots, groups[:, None] * ROW.GROUP + elements[None, :], bits, mask, 0, S.WORLD_SIZE)
    if ROW.BYTE_SCALES:
        scale_bits = scale_bits >> 23
    push_beside(own_scales, scale_bits, groups, to, epoch, 0, num_groups, S)


@portable
def push_row(x, to, token, WORLD_SIZE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr):
    """Push a token's row as it is to Targets. Returns whether it contains EMPTY."""
    source = tl.multiple_of(x + tl.cast(token, tl.int64) * ROW_WORDS, 16)
    num_empty = tl.full((), 0, tl.int32)
    for first_word in tl.static_range(0, ROW_WORDS, BLOCK_WORDS):
        offsets = first_word + tl.arange(0, BLOCK_WORDS)
        words = tl.load(source + offsets, mask=offsets < ROW_WORDS, other=0)
        push(to.rows, to.slots, offsets, words, offsets < ROW_WORDS, 0, WORLD_SIZE)
        num_empty += reduce_sum((words == EMPTY).to(tl.int32), 0)
    return num_empty > 0


@portable
def push_position(own_positions, to, position, written_in_full, epoch, POSITION: tl.constexpr, S: tl.constexpr):
    """Push the word that says where a row comes from, behind a fence when the row could not be its own flag."""
    first_peer: tl.constexpr = 0 if S.COMPACT else 1
    if first_peer == 1:
        if to.slots[0] >= 0:
            tl.store(own_positions + to.slots[0], position)
    if written_in_full:
        word = flagged(position | WRITTEN_IN_FULL, epoch)
        tl.debug_barrier()
        for step in tl.static_range(first_peer, S.WORLD_SIZE):
            if to.slots[step] >= 0:
                tl.atomic_xchg(to.sides[step] + POSITION, word, sem="release", scope="sys")
    else:
        word = flagged(position, epoch)
        for step in tl.static_range(first_peer, S.WORLD_SIZE):
            if to.slots[step] >= 0:
                tl.store(to.sides[step] + POSITION, word, cache_modifier=".wt")


@portable
def send_token(
    given, step, places, token, poison, S: tl.constexpr, ROW: tl.constexpr, LL: tl.constexpr, FORM: tl.constexpr
):
    """Push a token's row and the words beside it to the ranks it goes to; nothing when poisoned.

    Args:
        given: DispatchInputs. step: DispatchStep. places: SendPlaces. token: SentToken.
    """
    row_dtype: tl.constexpr = tl.uint8 if ROW.GROUP > 0 else tl.int32
    row_width: tl.constexpr = ROW.ROW_WORDS * 4 if ROW.GROUP > 0 else ROW.ROW_WORDS
    own, epoch = places.own, step.epoch
    # own rows go straight to where the experts read them, unless it takes all counts to know where that is
    own_slots = LL.SLOTS if S.COMPACT else step.step_tokens
    slots = slots_of(token.before, token.own, poison == 0, step.rank, own_slots, LL.SLOTS, S.WORLD_SIZE, LL.COUNT_BITS)
    sides = line_starts(places.sides, slots, LL.SCALE_WORDS + 2 * S.TOPK + 1, S.WORLD_SIZE, tl.int64)
    to = Targets(slots, line_starts(places.rows, slots, row_width, S.WORLD_SIZE, row_dtype), sides)
    written_in_full = step.num_tokens < 0
    if ROW.GROUP > 0:
        push_cast_row(own.scales, token.tile, to, epoch, S, ROW)
    else:
        written_in_full = push_row(given.x, to, token.number, S.WORLD_SIZE, ROW.ROW_WORDS, ROW.BLOCK_WORDS)
        if LL.HAS_SCALES:
            at = tl.arange(0, LL.SIDE_LANES)
            line = given.scales + token.number * LL.SCALE_WORDS
            values = tl.load(line + at, mask=at < LL.SCALE_WORDS, other=0).to(tl.int32)
            push_beside(own.scales, values, at, to, epoch, 0, LL.SCALE_WORDS, S)
    choices = tl.arange(0, S.TOPK_LANES)
    push_beside(own.ids, token.ids, choices, to, epoch, LL.SCALE_WORDS, S.TOPK, S)
    if FORM.HAS_WEIGHTS:
        push_beside(own.weights, token.weights, choices, to, epoch, LL.SCALE_WORDS + S.TOPK, S.TOPK, S)
    position = step.first_position + token.number
    push_position(own.positions, to, position, written_in_full, epoch, LL.SCALE_WORDS + 2 * S.TOPK, S)


@portable
def send_rows(
    given, step, roles, places, answer, out_of_order, OWNERS: tl.constexpr, S: tl.constexpr, ROW: tl.constexpr,
    LL: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Do the sending part of a program: post flags or counts, or send its share of the tokens. Returns the poison word.

    Args:
        given: DispatchInputs. step: DispatchStep. roles: Roles. places: SendPlaces.
        answer: from load_poison. out_of_order: from begin_stage.
    """
    table, rank, num_tokens = step.table, step.rank, step.num_tokens
    sender, num_senders = step.program - NUM_FLAG_PROGRAMS, roles.num_senders
    # below the sender of the first two programs, which must find no token
    end = tl.where((sender >= 0) & (sender < num_senders), num_tokens, -NUM_FLAG_PROGRAMS)
    tile = sender
    # in flight together with all that decides where the row goes
    if ROW.GROUP > 0:
        tile = load_tile(given.x, sender, end, ROW)
    token_ids, token_weights = load_choices(given.ids, given.weights, sender, end, S, FORM.HAS_WEIGHTS)
    going = fields_of_tokens(given.ids, num_tokens, S, OWNERS, LL.TOKEN_LANES, LL.COUNT_BITS)
    poison = initial_poison(table, answer, DISPATCH_PHASE, step.epoch, out_of_order, rank, S.WORLD_SIZE, S.WORLD_LANES)
    if roles.is_poster & (poison == 0):
        post_all(table, DISPATCH_FLAGS, step.epoch, rank, S.WORLD_SIZE, S.WORLD_LANES, False)
    counted = tl.where(roles.is_publisher, num_tokens, sender)
    before = fields_before(going, counted, S.WORLD_SIZE, LL.TOKEN_LANES, LL.COUNT_BITS)
    own = fields_of_token(token_ids, OWNERS, S.WORLD_SIZE, LL.COUNT_BITS)
    if roles.is_publisher & (poison == 0):
        begin_span(FORM.SPANS, table, COUNT_PUT, S.WORLD_SIZE)
        tl.store(address(table, STATE, rank, S.WORLD_SIZE, tl.int32) + NUM_TOKENS, num_tokens)
        counts = field_of(before, tl.arange(0, S.WORLD_LANES), S.WORLD_SIZE, LL.COUNT_BITS)
        post_counts(table, counts, step.wire_word, step.epoch, rank, S.WORLD_SIZE, S.WORLD_LANES)
        end_span(FORM.SPANS, table, COUNT_PUT, S.WORLD_SIZE)
    if (sender >= 0) & (sender < num_senders):
        next_span(FORM.SPANS, table, PREPARE, QUANT_AND_PUT, S.WORLD_SIZE)
    for token in range(sender, end, num_senders):
        loaded = SentToken(token, tile, token_ids, token_weights, before, own)
        send_token(given, step, places, loaded, poison, S, ROW, LL, FORM)
        record_route(places.routes, places.ids, token_ids, token, before, own, S, LL.COUNT_BITS)
        following = token + num_senders
        if ROW.GROUP > 0:
            tile = load_tile(given.x, following, end, ROW)
        token_ids, token_weights = load_choices(given.ids, given.weights, following, end, S, FORM.HAS_WEIGHTS)
        before = fields_before(going, following, S.WORLD_SIZE, LL.TOKEN_LANES, LL.COUNT_BITS)
        own = fields_of_token(token_ids, OWNERS, S.WORLD_SIZE, LL.COUNT_BITS)
    if (sender >= 0) & (sender < num_senders):
        end_span(FORM.SPANS, table, QUANT_AND_PUT, S.WORLD_SIZE)
    return poison


@portable
def receive_rows(step, places, roles, poison, S: tl.constexpr, ROW: tl.constexpr, LL: tl.constexpr, FORM: tl.constexpr):
    """Do the receiving part of a program: await counts or flags, or receive its share of the rows."""
    table, rank, epoch = step.table, step.rank, step.epoch
    receiver = step.program - (step.num_programs - roles.num_receivers)
    waits = roles.is_publisher | roles.is_poster | (receiver >= 0)
    if waits:
        begin_span(FORM.SPANS, table, WAIT, S.WORLD_SIZE)
    if roles.is_publisher:
        if poison == 0:
            poison = accept_counts(step, S, LL.COUNT_LANES)
        if poison != 0:
            receive_nothing(table, rank, S.WORLD_SIZE, S.WORLD_LANES)
    elif roles.is_poster & (poison == 0):
        # then every peer's earlier combine has read what this rank overwrites next
        poison = wait_all(table, DISPATCH_FLAGS, epoch, rank, S.WORLD_SIZE, S.WORLD_LANES, False, 1)
    elif (receiver >= 0) & (poison == 0):
        poison = receive_low_latency_rows(step, places, receiver, roles.num_receivers, S, ROW, LL, FORM)
    if poison != 0:
        late = lanes_behind(table, DISPATCH_FLAGS, epoch, rank, S.WORLD_SIZE, S.WORLD_LANES)
        fail(table, poison, DISPATCH_PHASE, epoch, 0, late, rank, S.WORLD_SIZE, S.WORLD_LANES)
    if waits:
        end_span(FORM.SPANS, table, WAIT, S.WORLD_SIZE)


@portable(
    do_not_specialize=[
        "num_tokens", "step_tokens", "wire_word", "pad_id", "row_limit", "num_region_rows", "first_position", "rank",
        "num_senders", "num_receivers",
    ],
    do_not_specialize_on_alignment=["scales", "weights", "ids"],
)  # fmt: skip
def ll_dispatch_kernel(
    x, scales, weights, ids, table, num_tokens, step_tokens, wire_word, pad_id, row_limit, num_region_rows,
    first_position, rank, num_senders, num_receivers,
    S: tl.constexpr, OWNERS: tl.constexpr, ROW: tl.constexpr, LL: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Dispatch of one step of few tokens per rank; run-time arguments as in bulk_dispatch_kernel, and:

    Program 0, the count publisher, posts and awaits the counts; program 1, the flag poster, posts and awaits the flags.
    The interpreter, which runs programs in turn, needs one launch that sends and one that receives.

    Args:
        num_senders: the programs after those two, which send.
        num_receivers: the last programs of the grid, which receive.
        S: Shape. OWNERS: ExpertPlacement. ROW: Row. LL: LowLatencyDispatch. FORM: LaunchForm.
    """
    row_dtype: tl.constexpr = tl.uint8 if ROW.GROUP > 0 else tl.int32
    scale_dtype: tl.constexpr = tl.uint8 if ROW.BYTE_SCALES else tl.int32
    own_region: tl.constexpr = LOW_LATENCY_ROWS if S.COMPACT else TOKENS
    # addresses never change, so they may be read before the launch before this one has ended
    places = SendPlaces(
        bases_of(table, own_region, LOW_LATENCY_ROWS, rank, S.WORLD_SIZE, row_dtype),
        bases_of(table, LOW_LATENCY_SIDES, LOW_LATENCY_SIDES, rank, S.WORLD_SIZE, tl.int64),
        received_places(table, rank, S.WORLD_SIZE, scale_dtype),
        address(table, ROUTES, rank, S.WORLD_SIZE, tl.int32),
        address(table, SENT_INDICES, rank, S.WORLD_SIZE, tl.int32),
    )
    poison_word = address(table, POISON, rank, S.WORLD_SIZE, tl.int32)
    if FORM.DEPENDENT_LAUNCH:
        after_previous_launch()
    if FORM.SEND:
        begin_span(FORM.SPANS, table, PREPARE, S.WORLD_SIZE)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    roles = Roles(program == COUNT_PUBLISHER, program == FLAG_POSTER, num_senders, num_receivers)
    epoch, out_of_order = begin_stage(table, DISPATCH_SEND if FORM.SEND else DISPATCH_RECEIVE, S.WORLD_SIZE)
    answer = load_poison(poison_word, LL.POISON_LANES)
    step = DispatchStep(
        table, rank, epoch, num_tokens, step_tokens, wire_word, pad_id, row_limit, num_region_rows, first_position,
        program, num_programs,
    )  # fmt: skip
    if FORM.SEND:
        given = DispatchInputs(x, scales, weights, ids)
        poison = send_rows(given, step, roles, places, answer, out_of_order, OWNERS, S, ROW, LL, FORM)
    else:
        poison = initial_poison(table, answer, DISPATCH_PHASE, epoch, out_of_order, rank, S.WORLD_SIZE, S.WORLD_LANES)
    if FORM.RECEIVE:
        receive_rows(step, places.own, roles, poison, S, ROW, LL, FORM)
        finish_stage(table, DISPATCH_RECEIVE, program, num_programs, S.WORLD_SIZE, FORM.DEPENDENT_LAUNCH)
    if FORM.SEND:
        finish_stage(table, DISPATCH_SEND, program, num_programs, S.WORLD_SIZE, FORM.DEPENDENT_LAUNCH)
