"""IntraNode dispatch of many tokens: every row is written where its expert reads it, then one flag per peer is raised.

Each program owns a contiguous chunk of this rank's tokens, so that row numbers follow from a prefix count and rows
land in (source rank, source token) order. The last program to finish tells the peers and waits for them.
"""

import triton.language as tl

from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region, Span, Stage
from ep_a2a.kernels.primitives import (
    NUM_TOKENS,
    POISON,
    STATE,
    address,
    after_previous_launch,
    arrive_last,
    ask_poison,
    begin_stage,
    fail,
    finish_stage,
    lanes_behind,
    may_go_on,
    poison_of,
    post_all,
    record_span_edge,
    wait_all,
)
from ep_a2a.kernels.receive_kernels import (
    accept_rows,
    last_received,
    post_counts,
    receive_nothing,
    rows_before,
    wait_counts,
)
from ep_a2a.kernels.routing_kernels import (
    count_rows,
    field_of,
    fields_of_token,
    packed,
    plus,
    record_route,
    rows_of_programs_before,
)
from ep_a2a.kernels.send_kernels import (
    first_rows_of,
    load_choices,
    load_for_cast,
    load_line,
    rows_of,
    send_payload,
    send_quantized,
    store_at_all,
    targets_of,
)

DISPATCH_FLAGS = tl.constexpr(Region.DISPATCH_FLAGS.value)
INDICES = tl.constexpr(Region.INDICES.value)
SOURCE_POSITIONS = tl.constexpr(Region.SOURCE_POSITIONS.value)
SCALES = tl.constexpr(Region.SCALES.value)
WEIGHTS = tl.constexpr(Region.WEIGHTS.value)
ROUTES = tl.constexpr(Region.ROUTES.value)
SENT_INDICES = tl.constexpr(Region.SENT_INDICES.value)
DISPATCH_SEND = tl.constexpr(Stage.DISPATCH_SEND.value)
DISPATCH_RECEIVE = tl.constexpr(Stage.DISPATCH_RECEIVE.value)
QUANT_AND_PUT = tl.constexpr(Span.QUANT_AND_PUT.value)
COUNT_PUT = tl.constexpr(Span.COUNT_PUT.value)
WAIT = tl.constexpr(Span.WAIT.value)


@portable
def receive_rows(
    table, poison, epoch, stride, wire_word, pad_id, row_limit, num_region_rows, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    COMPACT: tl.constexpr, FORWARDED: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """One program's part: wait for every peer's flag and publish the counts. FORWARDED: as of dispatch_kernel."""
    if SPANS:
        record_span_edge(table, WAIT, False, WORLD_SIZE)
    old_counts, old_stride, old_pad_id = last_received(table, rank, WORLD_SIZE, WORLD_LANES)
    if poison == 0:
        poison = wait_all(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES, True, 2 if FORWARDED else 1)
    if poison == 0:
        poison = accept_rows(
            table, old_counts, old_stride, old_pad_id, epoch, stride, wire_word, pad_id, row_limit, num_region_rows,
            rank, TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, COMPACT,
        )  # fmt: skip
    if poison != 0:
        late = lanes_behind(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
        fail(table, poison, 1, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
        receive_nothing(table, rank, WORLD_SIZE, WORLD_LANES)
    if SPANS:
        record_span_edge(table, WAIT, True, WORLD_SIZE)
    finish_stage(table, DISPATCH_RECEIVE, 0, 1, WORLD_SIZE)


@portable(
    do_not_specialize=[
        "num_tokens", "stride", "wire_word", "pad_id", "row_limit", "num_region_rows", "first_position", "rank",
    ],
    do_not_specialize_on_alignment=["scales", "weights", "ids"],
)  # fmt: skip
def dispatch_kernel(
    x, scales, weights, ids, table, num_tokens, stride, wire_word, pad_id, row_limit, num_region_rows,
    first_position, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, OWNERS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    SCALE_WIDTH: tl.constexpr, SCALE_LANES: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    GROUP: tl.constexpr, GROUP_LANES: tl.constexpr, GROUPS_LANES: tl.constexpr, POWERS_OF_TWO: tl.constexpr,
    BYTE_SCALES: tl.constexpr, HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    MANY_TOKENS: tl.constexpr, COUNTS_ALONE: tl.constexpr, COUNT_BITS: tl.constexpr, COUNT_LANES: tl.constexpr,
    POISON_LANES: tl.constexpr, PROGRAM_LANES: tl.constexpr,
    SEND: tl.constexpr, RECEIVE: tl.constexpr, FORWARDED: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    SPANS: tl.constexpr,
):  # fmt: skip
    """Dispatch of one step.

    Args:
        x: [num_tokens, row] as 4-byte words, or as elements when GROUP > 0 asks for the fp8 cast.
        scales: [num_tokens, SCALE_WIDTH] of SCALE_DTYPE, when SCALE_WIDTH > 0.
        weights: [num_tokens, TOPK] float32 when HAS_WEIGHTS; ids: [num_tokens, TOPK] int32.
        table: addresses, see kernels/layout.py.
        stride: max_num_tokens, rows per source in layout rank_major; the same on all ranks.
        wire_word: stride and wire format of this step, compared with every peer's.
        pad_id: id of rows without a token.
        row_limit: rows that a rank may receive this step; num_region_rows: rows of the regions.
        first_position: source position of this rank's token 0, rank * W * M.
        BLOCK_TOKENS, MANY_TOKENS: tokens whose ids a program looks at at once, where it counts its own or all.
        COUNTS_ALONE: every program counts the rows before its own; else it learns them from the programs before it.
        COUNT_BITS: bits that hold any rank's number of tokens.
        SEND, RECEIVE: what this launch does; RECEIVE alone is one program.
        FORWARDED: rows and flags come through another rank of this node (only with RECEIVE alone).
        SPANS: programs note when they begin and end what they do.
    """
    # an address never changes, so it may be read before the launch before this one has ended
    poison_word = address(table, POISON, rank, WORLD_SIZE, tl.int32)
    if DEPENDENT_LAUNCH:
        after_previous_launch()
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    # scales made here are words or bytes; given ones are lines of either
    scale_dtype: tl.constexpr = (tl.uint8 if BYTE_SCALES else tl.int32) if GROUP > 0 else SCALE_DTYPE
    scale_width: tl.constexpr = ROW_WORDS * 4 // GROUP if GROUP > 0 else SCALE_WIDTH
    epoch, out_of_order = begin_stage(table, DISPATCH_SEND if SEND else DISPATCH_RECEIVE, WORLD_SIZE)
    answer = ask_poison(poison_word, POISON_LANES)
    if SEND:
        chunk = (num_tokens + num_programs - 1) // num_programs
        first = tl.minimum(program * chunk, num_tokens)
        last = tl.minimum(first + chunk, num_tokens)
        # in flight together with all that decides where the row goes
        if GROUP > 0:
            tile = load_for_cast(x, first, last, ROW_WORDS * 4, GROUP, GROUP_LANES, GROUPS_LANES)
        if SCALE_WIDTH > 0:
            token_scales = load_line(scales, first, last, SCALE_WIDTH, SCALE_LANES)
        token_ids, token_weights = load_choices(ids, weights, first, last, TOPK, TOPK_LANES, HAS_WEIGHTS)
        choices, scale_lanes, ranks = tl.arange(0, TOPK_LANES), tl.arange(0, SCALE_LANES), tl.arange(0, WORLD_LANES)
        sent_ids = address(table, SENT_INDICES, rank, WORLD_SIZE, tl.int32)
        if COUNTS_ALONE:
            before = count_rows(ids, 0, first, TOPK, OWNERS, WORLD_SIZE, MANY_TOKENS, COUNT_BITS)
        else:
            own_fields = count_rows(ids, first, last, TOPK, OWNERS, WORLD_SIZE, BLOCK_TOKENS, COUNT_BITS)
            own_counts = field_of(own_fields, ranks, WORLD_SIZE, COUNT_BITS)
            first_index = rows_of_programs_before(
                table, epoch, own_counts, program, rank, WORLD_SIZE, WORLD_LANES, PROGRAM_LANES
            )
            before = packed(first_index, WORLD_SIZE, WORLD_LANES, COUNT_BITS)
        routes = address(table, ROUTES, rank, WORLD_SIZE, tl.int32)
        if program == 0:
            tl.store(address(table, STATE, rank, WORLD_SIZE, tl.int32) + NUM_TOKENS, num_tokens)
        bases = ranks * 0 + rank * stride
        poison = may_go_on(table, answer, 1, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
        if poison == 0:
            # others wait for these counts, so they cannot wait for other programs where programs wait for counts
            counts_all: tl.constexpr = COMPACT or COUNTS_ALONE
            if program == (0 if counts_all else num_programs - 1):
                if SPANS:
                    record_span_edge(table, COUNT_PUT, False, WORLD_SIZE)
                if counts_all:
                    totals = count_rows(ids, 0, num_tokens, TOPK, OWNERS, WORLD_SIZE, MANY_TOKENS, COUNT_BITS)
                    counts = field_of(totals, ranks, WORLD_SIZE, COUNT_BITS)
                else:
                    counts = first_index + own_counts
                post_counts(table, counts, wire_word, epoch, rank, WORLD_SIZE, WORLD_LANES)
                if SPANS:
                    record_span_edge(table, COUNT_PUT, True, WORLD_SIZE)
            if COMPACT:
                _, poison = wait_counts(table, epoch, rank, WORLD_SIZE, COUNT_LANES)
                bases = rows_before(table, rank, rank, WORLD_SIZE, WORLD_LANES)
        if SPANS:
            record_span_edge(table, QUANT_AND_PUT, False, WORLD_SIZE)
        if poison == 0:
            first_rows = first_rows_of(bases, rank, WORLD_SIZE, WORLD_LANES)
            for token in range(first, last):
                own = fields_of_token(token_ids, OWNERS, WORLD_SIZE, COUNT_BITS)
                rows = rows_of(before, own, first_rows, row_limit, rank, WORLD_SIZE, COUNT_BITS)
                following_ids, following_weights = load_choices(
                    ids, weights, token + 1, last, TOPK, TOPK_LANES, HAS_WEIGHTS
                )
                # all addresses before the first store, which would wait for each in turn
                weight_targets = targets_of(table, WEIGHTS, rows, rank, TOPK, WORLD_SIZE, tl.int32)
                id_targets = targets_of(table, INDICES, rows, rank, TOPK, WORLD_SIZE, tl.int32)
                positions = targets_of(table, SOURCE_POSITIONS, rows, rank, 1, WORLD_SIZE, tl.int32)
                scale_targets = targets_of(
                    table, SCALES, rows, rank, scale_width, WORLD_SIZE, scale_dtype
                )  # fmt: skip
                if GROUP > 0:
                    send_quantized(
                        tile, scale_targets, table, rows, rank, WORLD_SIZE, ROW_WORDS * 4, GROUP, GROUP_LANES,
                        GROUPS_LANES, POWERS_OF_TWO, BYTE_SCALES,
                    )  # fmt: skip
                    # while this row leaves
                    tile = load_for_cast(x, token + 1, last, ROW_WORDS * 4, GROUP, GROUP_LANES, GROUPS_LANES)
                else:
                    send_payload(x, table, token, rows, rank, WORLD_SIZE, ROW_WORDS, BLOCK_WORDS)
                if SCALE_WIDTH > 0:
                    store_at_all(scale_targets, rows, scale_lanes, token_scales, scale_lanes < SCALE_WIDTH, WORLD_SIZE)
                    token_scales = load_line(scales, token + 1, last, SCALE_WIDTH, SCALE_LANES)
                if HAS_WEIGHTS:
                    store_at_all(weight_targets, rows, choices, token_weights, choices < TOPK, WORLD_SIZE)
                store_at_all(id_targets, rows, choices, token_ids, choices < TOPK, WORLD_SIZE)
                for step in tl.static_range(WORLD_SIZE):
                    if rows[step] >= 0:
                        tl.store(positions[step], first_position + token)
                record_route(
                    routes, sent_ids, token_ids, token, before, own, TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES,
                    COUNT_BITS,
                )  # fmt: skip
                before = plus(before, own, WORLD_SIZE, COUNT_BITS)
                token_ids, token_weights = following_ids, following_weights
        if SPANS:
            record_span_edge(table, QUANT_AND_PUT, True, WORLD_SIZE)
        is_last, any_poisoned = arrive_last(table, rank, num_programs, poison, WORLD_SIZE)
        if is_last:
            poison = tl.full((), 0, tl.int32)
            if any_poisoned:
                # a program left its rows unsent, so this step must not look complete to anyone
                poison += poison_of(table, rank, WORLD_SIZE)
            else:
                post_all(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES, True)
            finish_stage(table, DISPATCH_SEND, 0, 1, WORLD_SIZE)
            if RECEIVE:
                receive_rows(
                    table, poison, epoch, stride, wire_word, pad_id, row_limit, num_region_rows, rank,
                    TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, COMPACT, False, SPANS,
                )  # fmt: skip
    else:
        poison = may_go_on(table, answer, 1, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
        if FORWARDED:
            # counts come from their own rank, so a rank that never came is named and not the one that waits for it
            if poison == 0:
                _, poison = wait_counts(table, epoch, rank, WORLD_SIZE, COUNT_LANES)
        receive_rows(
            table, poison, epoch, stride, wire_word, pad_id, row_limit, num_region_rows, rank,
            TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, COMPACT, FORWARDED, SPANS,
        )  # fmt: skip
