"""IntraNode combine: expert ranks push rows to where their tokens came from, which adds them in ascending rank order.

A row is its own flag: an element of it has arrived when it is not EMPTY, and the reader leaves EMPTY behind. So there
is no fence, rows are added while later ones are still on the wire, and a step costs one hop. One flag per peer tells
beside it that the peer has begun its combine, which bounds how far ranks can run ahead of each other.
"""

import triton.language as tl

from ep_a2a.kernels.combine_receive_kernels import add_results, clear_results
from ep_a2a.kernels.combine_send_kernels import first_unit, push_results
from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region, Span, Stage
from ep_a2a.kernels.primitives import (
    NOBODY,
    NUM_TOKENS,
    POISON,
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
    post_all,
    record_span_edge,
    reduce_max,
    reduce_sum,
    wait_all,
)

COMBINE_FLAGS = tl.constexpr(Region.COMBINE_FLAGS.value)
RECV_COUNTS = tl.constexpr(Region.RECV_COUNTS.value)
WEIGHT_EPOCHS = tl.constexpr(Region.WEIGHT_EPOCHS.value)
COMBINE_SEND = tl.constexpr(Stage.COMBINE_SEND.value)
COMBINE_RECEIVE = tl.constexpr(Stage.COMBINE_RECEIVE.value)
COPY_AND_PUT = tl.constexpr(Span.COPY_AND_PUT.value)
RECV_WAIT = tl.constexpr(Span.RECV_WAIT.value)
TOPK_REDUCE = tl.constexpr(Span.TOPK_REDUCE.value)


@portable
def tell_peers(
    table, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    ORDERS: tl.constexpr,
):  # fmt: skip
    """Tells every peer that this rank has begun this combine, and whether it brings weights.

    ORDERS: as in post_all; weights must be ordered.
    """
    if HAS_WEIGHTS:
        lanes = tl.arange(0, WORLD_LANES)
        present = lanes < WORLD_SIZE
        told = address(table, WEIGHT_EPOCHS, tl.where(present, lanes, rank), WORLD_SIZE, tl.int32) + rank
        tl.store(told, lanes * 0 + epoch, mask=present)
    post_all(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES, ORDERS)


@portable
def hear_peers(
    table, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    ORDERS: tl.constexpr, PATIENCE: tl.constexpr = 1,
):  # fmt: skip
    """Waits until every peer has begun this combine; the poison word, also when a peer brings no weights.

    ORDERS, PATIENCE: as of wait_all.
    """
    poison = wait_all(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES, ORDERS, PATIENCE)
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
    rows_in, weights_in, result, ids, bias_0, bias_1, table, num_tokens, stride, slots_per_rank, rank, num_senders,
    num_receivers, pause_ns,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WEIGHT_LANES: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    HIDDEN: tl.constexpr, SEND_GROUPS_LANES: tl.constexpr, SEND_GROUP: tl.constexpr,
    GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr,
    DTYPE: tl.constexpr, WIRE_DTYPE: tl.constexpr, ELEMENT: tl.constexpr, QUANTIZED: tl.constexpr,
    SCALED: tl.constexpr, HAS_WEIGHTS: tl.constexpr, CHECK_INDICES: tl.constexpr, COMPACT: tl.constexpr,
    OWN_IN_PLACE: tl.constexpr, READ_AHEAD: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Combine of one step: result [num_tokens, HIDDEN] of DTYPE; a token that went nowhere becomes zeros, and so
    do those of a program that fails.

    Args:
        rows_in: the received rows' results, in the order in which dispatch left the rows; integer elements of the
            wire's width, or DTYPE when QUANTIZED asks for the cast to fp8 (SCALED: one scale per GROUP elements).
        weights_in: [rows, TOPK] float32 as int32, in the same order, when HAS_WEIGHTS.
        ids: this rank's own ids [num_tokens, TOPK], when CHECK_INDICES.
        bias_0, bias_1: [num_tokens, HIDDEN] of DTYPE to add to the sums before they are rounded, or None.
        stride: rows per source in layout rank_major. slots_per_rank: M, rows that each peer may send back.
        num_senders: the programs after the first, which send blocks of SEND_GROUPS_LANES * SEND_GROUP elements.
        num_receivers: the last programs of the grid, which add blocks of GROUPS_LANES * GROUP elements. Program 0
            speaks with the peers.
        pause_ns: how long a receiver sleeps between two looks at rows that have not arrived.
        OWN_IN_PLACE: this rank's own rows are added where they lie, instead of being sent.
        READ_AHEAD: see add_results.
        SPANS: programs note when they begin and end what they do.
        SEND, RECEIVE: what this launch does. The interpreter, which runs programs in turn, needs two launches.
    """
    # addresses never change, so they may be read before the launch before this one has ended
    recv_counts = address(table, RECV_COUNTS, rank, WORLD_SIZE, tl.int32)
    state = address(table, STATE, rank, WORLD_SIZE, tl.int32)
    poison_word = address(table, POISON, rank, WORLD_SIZE, tl.int32)
    if DEPENDENT_LAUNCH:
        after_previous_launch()
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    is_keeper = program == 0
    lanes = tl.arange(0, WORLD_LANES)
    counts = tl.load(recv_counts + lanes, mask=lanes < WORLD_SIZE, other=0)
    epoch, out_of_order = begin_stage(table, COMBINE_SEND if SEND else COMBINE_RECEIVE, WORLD_SIZE)
    # a graph of another number of tokens would leave rows behind that nobody takes
    sent_tokens = tl.load(state + NUM_TOKENS)
    out_of_order = out_of_order | tl.cast(sent_tokens - num_tokens, tl.int64)
    answer = ask_poison(poison_word, WEIGHT_LANES)
    sender = program - 1
    is_sender = (sender >= 0) & (sender < num_senders)
    if SEND:
        # in flight together with what decides whether it is sent
        first = first_unit(
            rows_in, table, counts, stride, rank, sender, is_sender, WORLD_SIZE, WORLD_LANES, HIDDEN,
            SEND_GROUPS_LANES, SEND_GROUP, ELEMENT, COMPACT, OWN_IN_PLACE,
        )  # fmt: skip
    poison = may_go_on(table, answer, 2, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    if SEND:
        if is_keeper & (poison == 0):
            tell_peers(table, epoch, rank, WORLD_SIZE, WORLD_LANES, HAS_WEIGHTS, HAS_WEIGHTS)
        if is_sender & (poison == 0):
            if SPANS:
                record_span_edge(table, COPY_AND_PUT, False, WORLD_SIZE)
            push_results(
                first, rows_in, weights_in, table, counts, stride, slots_per_rank, rank, sender, num_senders,
                TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, HIDDEN, SEND_GROUPS_LANES, SEND_GROUP, ELEMENT, QUANTIZED,
                SCALED, HAS_WEIGHTS, COMPACT, OWN_IN_PLACE,
            )  # fmt: skip
            if SPANS:
                record_span_edge(table, COPY_AND_PUT, True, WORLD_SIZE)
    if RECEIVE:
        receiver = program - (num_programs - num_receivers)
        if SPANS:
            if is_keeper | (receiver >= 0):
                record_span_edge(table, RECV_WAIT, False, WORLD_SIZE)
        if is_keeper:
            if poison == 0:
                # also tells that every peer's experts have read what this rank will write next
                poison = hear_peers(table, epoch, rank, WORLD_SIZE, WORLD_LANES, HAS_WEIGHTS, HAS_WEIGHTS)
            if SPANS:
                record_span_edge(table, RECV_WAIT, True, WORLD_SIZE)
        elif (receiver >= 0) & (poison == 0):
            first_own_row = rank * stride
            if COMPACT:
                first_own_row = reduce_sum(tl.where(lanes < rank, counts, 0), 0)
            poison = add_results(
                rows_in, weights_in, result, ids, bias_0, bias_1, table, num_tokens, first_own_row, slots_per_rank,
                rank, epoch, receiver, num_receivers, pause_ns,
                TOPK, TOPK_LANES, WEIGHT_LANES, WORLD_SIZE, HIDDEN, GROUPS_LANES, GROUP, DTYPE, WIRE_DTYPE, ELEMENT,
                SCALED, HAS_WEIGHTS, CHECK_INDICES, OWN_IN_PLACE, READ_AHEAD, SPANS,
            )  # fmt: skip
            if SPANS:
                record_span_edge(table, TOPK_REDUCE, True, WORLD_SIZE)
        if poison != 0:
            late = lanes_behind(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
            fail(table, poison, 2, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
            if receiver >= 0:
                clear_results(result, num_tokens, receiver, num_receivers, HIDDEN, GROUPS_LANES, GROUP, DTYPE)
        finish_stage(table, COMBINE_RECEIVE, program, num_programs, WORLD_SIZE)
    if SEND:
        finish_stage(table, COMBINE_SEND, program, num_programs, WORLD_SIZE)
