"""IntraNode combine: expert ranks push rows to where their tokens came from, which adds them in ascending rank order.

A row is its own flag: an element of it has arrived when it is not EMPTY, and the reader leaves EMPTY behind. So there
is no fence, rows are added while later ones are still on the wire, and a step costs one hop. One flag per peer
announces that the peer has begun its combine, which bounds how far ranks can run ahead of each other.
"""

import triton.language as tl

from ep_a2a.kernels.combine_receive_kernels import Receiver, add_results, clear_results
from ep_a2a.kernels.combine_send_kernels import first_unit, push_results, unlike_dispatch
from ep_a2a.kernels.layout import Region, Span, Stage
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    COMBINE_PHASE,
    NOBODY,
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
    like,
    may_go_on,
    post_all,
    reduce_max,
    reduce_sum,
    wait_all,
)
from ep_a2a.kernels.span_kernels import begin_span, end_span

COMBINE_FLAGS = tl.constexpr(Region.COMBINE_FLAGS.value)
RECV_COUNTS = tl.constexpr(Region.RECV_COUNTS.value)
WEIGHT_EPOCHS = tl.constexpr(Region.WEIGHT_EPOCHS.value)
COMBINE_SEND = tl.constexpr(Stage.COMBINE_SEND.value)
COMBINE_RECEIVE = tl.constexpr(Stage.COMBINE_RECEIVE.value)
COPY_AND_PUT = tl.constexpr(Span.COPY_AND_PUT.value)
RECV_WAIT = tl.constexpr(Span.RECV_WAIT.value)
TOPK_REDUCE = tl.constexpr(Span.TOPK_REDUCE.value)

# The program that speaks with the peers.
SPEAKER = tl.constexpr(0)


@portable
def post_to_peers(
    table, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    ORDERS: tl.constexpr,
):  # fmt: skip
    """Posts to every peer that this rank has begun this combine, and whether it brings weights.

    ORDERS: as in post_all; weights must be ordered.
    """
    if HAS_WEIGHTS:
        lanes = tl.arange(0, WORLD_LANES)
        present = lanes < WORLD_SIZE
        epochs_at = address(table, WEIGHT_EPOCHS, tl.where(present, lanes, rank), WORLD_SIZE, tl.int32) + rank
        tl.store(epochs_at, like(lanes, epoch), mask=present)
    post_all(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES, ORDERS)


@portable
def await_peers(
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
            epochs_at = address(table, WEIGHT_EPOCHS, rank, WORLD_SIZE, tl.int32) + lanes
            brought = tl.load(epochs_at, mask=lanes < WORLD_SIZE, other=0, volatile=True)
            missing = ((brought != epoch) & (lanes < WORLD_SIZE)).to(tl.int32)
            if reduce_max(missing, 0) > 0:
                poison = tl.full((), (WEIGHTS_MISSING << 16) | NOBODY, tl.int32)
                fail(table, poison, COMBINE_PHASE, epoch, 1, missing, rank, WORLD_SIZE, WORLD_LANES)
    return poison


@portable
def send_results(
    first, rows_in, weights_in, table, counts, stride, slots_per_rank, rank, epoch, poison, is_speaker,
    sender, is_sender, num_senders, S: tl.constexpr, SENT: tl.constexpr, COMBINE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The sending part of a program: posts to the peers, or sends its share of the rows. first: from first_unit."""
    if is_speaker & (poison == 0):
        post_to_peers(table, epoch, rank, S.WORLD_SIZE, S.WORLD_LANES, FORM.HAS_WEIGHTS, FORM.HAS_WEIGHTS)
    if is_sender & (poison == 0):
        begin_span(FORM.SPANS, table, COPY_AND_PUT, S.WORLD_SIZE)
        push_results(
            first, rows_in, weights_in, table, counts, stride, slots_per_rank, rank, sender, num_senders, S, SENT,
            FORM.HAS_WEIGHTS, COMBINE.OWN_IN_PLACE,
        )  # fmt: skip
        end_span(FORM.SPANS, table, COPY_AND_PUT, S.WORLD_SIZE)


@portable
def first_own_row_of(counts, stride, rank, S: tl.constexpr):
    """Where this rank's own rows begin among those that it has received."""
    first_own_row = rank * stride
    if S.COMPACT:
        first_own_row = reduce_sum(tl.where(tl.arange(0, S.WORLD_LANES) < rank, counts, 0), 0)
    return first_own_row


@portable
def receive_results(
    work, rows_in, weights_in, result, ids, bias_0, bias_1, counts, stride, poison, is_speaker, S: tl.constexpr,
    ADDED: tl.constexpr, WEIGHTS: tl.constexpr, COMBINE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The receiving part of a program: waits for the peers' flags, or adds its share of the tokens' rows.

    Args:
        work: Receiver, whose first_own_row is not known yet; its number is negative in programs that add nothing.
    """
    table, rank, epoch = work.table, work.rank, work.epoch
    if is_speaker | (work.number >= 0):
        begin_span(FORM.SPANS, table, RECV_WAIT, S.WORLD_SIZE)
    if is_speaker:
        if poison == 0:
            # then every peer's experts have read what this rank overwrites next
            poison = await_peers(table, epoch, rank, S.WORLD_SIZE, S.WORLD_LANES, FORM.HAS_WEIGHTS, FORM.HAS_WEIGHTS)
        end_span(FORM.SPANS, table, RECV_WAIT, S.WORLD_SIZE)
    elif (work.number >= 0) & (poison == 0):
        own = first_own_row_of(counts, stride, rank, S)
        poison = add_results(
            Receiver(
                table, rank, epoch, work.num_tokens, work.slots_per_rank, own, work.number, work.num_receivers,
                work.pause_ns,
            ),
            rows_in, weights_in, result, ids, bias_0, bias_1, S, ADDED, WEIGHTS, COMBINE, FORM.HAS_WEIGHTS, FORM.SPANS,
        )  # fmt: skip
        end_span(FORM.SPANS, table, TOPK_REDUCE, S.WORLD_SIZE)
    if poison != 0:
        late = lanes_behind(table, COMBINE_FLAGS, epoch, rank, S.WORLD_SIZE, S.WORLD_LANES)
        fail(table, poison, COMBINE_PHASE, epoch, 0, late, rank, S.WORLD_SIZE, S.WORLD_LANES)
        if work.number >= 0:
            clear_results(result, work.num_tokens, work.number, work.num_receivers, ADDED, COMBINE.DTYPE)


@portable
def begin_combine(table, state, num_tokens, stride, S: tl.constexpr, FORM: tl.constexpr):
    """The step's epoch, and what is not 0 when the calls come out of order or do not fit the dispatch before."""
    epoch, out_of_order = begin_stage(table, COMBINE_SEND if FORM.SEND else COMBINE_RECEIVE, S.WORLD_SIZE)
    return epoch, out_of_order | unlike_dispatch(state, num_tokens, stride, S.COMPACT)


@portable(
    do_not_specialize=["num_tokens", "stride", "slots_per_rank", "rank", "num_senders", "num_receivers", "pause_ns"],
    do_not_specialize_on_alignment=["ids", "weights_in"],
)  # fmt: skip
def combine_kernel(
    rows_in, weights_in, result, ids, bias_0, bias_1, table, num_tokens, stride, slots_per_rank, rank, num_senders,
    num_receivers, pause_ns,
    S: tl.constexpr, SENT: tl.constexpr, ADDED: tl.constexpr, WEIGHTS: tl.constexpr, COMBINE: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Combine of one step: result [num_tokens, H]; tokens that went nowhere, or whose program fails, become zeros.

    The interpreter, which runs programs in turn, needs one launch that sends and one that receives.

    Args:
        rows_in: the received rows' results, in the order in which dispatch left the rows; integer elements of the
            wire's width, or the result's dtype when they are QUANTIZED.
        weights_in: [rows, TOPK] float32 as int32, in the same order, when HAS_WEIGHTS.
        result: of COMBINE.DTYPE.
        ids: this rank's own ids [num_tokens, TOPK], when CHECK_INDICES.
        bias_0, bias_1: [num_tokens, H] of the result's dtype to add to the sums before they are rounded, or None.
        stride: rows per source in layout rank_major. slots_per_rank: M, rows that each peer may send back.
        num_senders: the programs after the first, which send. Program 0 speaks with the peers.
        num_receivers: the last programs of the grid, which add.
        pause_ns: how long a receiver sleeps between two looks at rows that have not arrived.
        S: Shape. SENT, ADDED, WEIGHTS: Block of what is sent, added, and of weights. COMBINE: Combine. FORM: Form.
    """
    # addresses never change, so they may be read before the launch before this one has ended
    recv_counts = address(table, RECV_COUNTS, rank, S.WORLD_SIZE, tl.int32)
    state = address(table, STATE, rank, S.WORLD_SIZE, tl.int32)
    poison_word = address(table, POISON, rank, S.WORLD_SIZE, tl.int32)
    if FORM.DEPENDENT_LAUNCH:
        after_previous_launch()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    is_speaker = program == SPEAKER
    lanes = tl.arange(0, S.WORLD_LANES)
    counts = tl.load(recv_counts + lanes, mask=lanes < S.WORLD_SIZE, other=0)
    epoch, out_of_order = begin_combine(table, state, num_tokens, stride, S, FORM)
    answer = ask_poison(poison_word, WEIGHTS.GROUP)
    sender = program - 1
    is_sender = (sender >= 0) & (sender < num_senders)
    if FORM.SEND:
        # in flight together with what decides whether it is sent
        first = first_unit(rows_in, table, counts, stride, rank, sender, is_sender, S, SENT, COMBINE.OWN_IN_PLACE)
    poison = may_go_on(table, answer, COMBINE_PHASE, epoch, out_of_order, rank, S.WORLD_SIZE, S.WORLD_LANES)
    if FORM.SEND:
        send_results(
            first, rows_in, weights_in, table, counts, stride, slots_per_rank, rank, epoch, poison, is_speaker, sender,
            is_sender, num_senders, S, SENT, COMBINE, FORM,
        )  # fmt: skip
    if FORM.RECEIVE:
        receiver = program - (num_programs - num_receivers)
        work = Receiver(table, rank, epoch, num_tokens, slots_per_rank, 0, receiver, num_receivers, pause_ns)
        receive_results(
            work, rows_in, weights_in, result, ids, bias_0, bias_1, counts, stride, poison, is_speaker, S, ADDED,
            WEIGHTS, COMBINE, FORM,
        )  # fmt: skip
        finish_stage(table, COMBINE_RECEIVE, program, num_programs, S.WORLD_SIZE, FORM.DEPENDENT_LAUNCH)
    if FORM.SEND:
        finish_stage(table, COMBINE_SEND, program, num_programs, S.WORLD_SIZE, FORM.DEPENDENT_LAUNCH)
