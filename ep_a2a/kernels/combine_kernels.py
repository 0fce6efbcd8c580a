"""IntraNode combine: expert ranks push rows to where their tokens came from, which adds them in ascending rank order.

A row is its own flag: an element of it has arrived when it is not EMPTY, and the reader leaves EMPTY behind. So there
is no fence, rows are added while later ones are still on the wire, and a step costs one hop. One flag per peer
announces that the peer has begun its combine, which bounds how far ranks can run ahead of each other.

Few programs have no time for looks and marks. Where policy.adds_arrived, rows are not MARKED: each program sends its
share of the rows and adds a share to its rank's flag at every peer, then waits for all flags, then adds. The steps:

- C1. A sender asks for its first block of results before it knows whether the step is sound.
- C2. Program 0 posts to every peer that this rank has begun, if rows are MARKED, and whether it brings weights.
- C3. Senders push results, cast if asked, to the ranks that the tokens came from.
- C4. Program 0 waits until every peer has begun; where rows are not MARKED, all programs until every peer has sent.
- C5. Receivers, and senders that are done, wait for the elements of a token's rows, add them in ascending order of
  ranks in float32, round once, and leave EMPTY behind.
- C6. A failed step gives zeros.
"""

import triton.language as tl

from ep_a2a.kernels import combine_send_kernels as send
from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels.combine_receive_kernels import add_results, clear_results
from ep_a2a.kernels.layout import FailureCode, Region, Span, Stage, StepPhase
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import NOBODY
from ep_a2a.kernels.span_kernels import note_span
from ep_a2a.kernels.target import volatile_load

# The program that exchanges flags with the peers.
FLAG_PROGRAM = tl.constexpr(0)


@portable
def tell_weights(op, epoch):
    """Tell every peer, to be ordered by a later post, that this rank brings weights to this combine."""
    lanes = tl.arange(0, op.WORLD_LANES)
    present = lanes < op.WORLD_SIZE
    epochs_at = prim.address_at(op, Region.WEIGHT_EPOCHS, tl.where(present, lanes, op.rank), tl.int32) + op.rank
    tl.store(epochs_at, prim.full_like(lanes, epoch), mask=present)


@portable
def post_to_peers(op, epoch, HAS_WEIGHTS: tl.constexpr, ORDERS: tl.constexpr, masked=0):
    """Post to every peer that this rank has begun this combine, and whether it brings weights.

    ORDERS, masked: as in post_all; weights must be ordered.
    """
    if HAS_WEIGHTS:
        tell_weights(op, epoch)
    prim.post_all(op, Region.COMBINE_FLAGS, epoch, ORDERS, masked)


@portable
def await_peers(
    op, flag, epoch, HAS_WEIGHTS: tl.constexpr, ORDERS: tl.constexpr, PATIENCE: tl.constexpr = 1, masked=0
):  # fmt: skip
    """Wait until every peer has reached `flag` of this combine. Returns the poison word, also when one has no weights.

    ORDERS, PATIENCE, masked: as of wait_all.
    """
    poison = prim.wait_all(op, Region.COMBINE_FLAGS, flag, ORDERS, PATIENCE, 0, masked)
    if HAS_WEIGHTS:
        if poison == 0:
            lanes = tl.arange(0, op.WORLD_LANES)
            epochs_at = prim.address(op, Region.WEIGHT_EPOCHS, tl.int32) + lanes
            brought = volatile_load(epochs_at, mask=lanes < op.WORLD_SIZE, other=0)
            missing = ((brought != epoch) & (lanes < op.WORLD_SIZE)).to(tl.int32)
            if op.MASKS:
                missing = tl.where(prim.is_live(prim.masked_now(op), lanes), missing, 0)
            if prim.reduce_max(missing, 0) > 0:
                poison = tl.full((), NOBODY | (FailureCode.WEIGHTS_MISSING << 16), tl.int32)
                prim.fail(op, poison, StepPhase.COMBINE, epoch, 1, missing)
    return poison


@portable
def send_results(first, given, step, share, poison, masked, SENT: tl.constexpr):
    """Do the sending part of a program: post to the peers, or send its share of the rows. first: from first_unit."""
    op = step.op
    # C2
    if step.signals & (poison == 0):
        if op.COMBINE.MARKED:
            post_to_peers(op, step.epoch, op.FORM.HAS_WEIGHTS, op.FORM.HAS_WEIGHTS, masked)
        elif op.FORM.HAS_WEIGHTS:
            tell_weights(op, step.epoch)
    # C3
    if step.is_sender & (poison == 0):
        note_span(op.FORM.SPANS, op, begun=Span.COPY_AND_PUT)
        send.push_results(first, given, step, share, SENT)
        if not op.COMBINE.MARKED:
            prim.post_arrival(op, Region.COMBINE_FLAGS, share.program, share.num_programs, masked)
        note_span(op.FORM.SPANS, op, ended=Span.COPY_AND_PUT)


@portable
def receive_results(given, step, share, poison, masked, ADDED: tl.constexpr, WEIGHTS: tl.constexpr):
    """Do the receiving part of a program: wait for the peers' flags, or add its share of the tokens' rows."""
    op, epoch = step.op, step.epoch
    adds = share.program >= 0
    flag = epoch if op.COMBINE.MARKED else prim.dispatch_flag(op)
    if step.signals | adds:
        note_span(op.FORM.SPANS, op, begun=Span.RECV_WAIT)
    if step.signals | (not op.COMBINE.MARKED):
        if poison == 0:
            # C4; then every peer's experts have read what this rank overwrites next
            ordered: tl.constexpr = op.FORM.HAS_WEIGHTS or not op.COMBINE.MARKED
            poison = await_peers(op, flag, epoch, op.FORM.HAS_WEIGHTS, ordered, 1, masked)
            if op.MASKS:
                masked = prim.masked_now(op)
        note_span(op.FORM.SPANS, op, ended=Span.RECV_WAIT)
    # C5
    if adds & (poison == 0):
        own_row = send.first_row_from(step, op.rank)
        poison = add_results(given, step, share, own_row, masked, ADDED, WEIGHTS)
        note_span(op.FORM.SPANS, op, ended=Span.TOPK_REDUCE)
    # C6
    if poison != 0:
        prim.fail_behind(op, poison, StepPhase.COMBINE, epoch, Region.COMBINE_FLAGS, flag)
        if adds:
            clear_results(given.result, step.num_tokens, share, ADDED, op.COMBINE.DTYPE)


@portable(
    do_not_specialize=["num_tokens", "step_tokens", "M", "rank", "num_receivers", "pause_ns"],
    do_not_specialize_on_alignment=["ids", "weights_in"],
)
def combine_kernel(
    rows_in, weights_in, result, ids, bias_0, bias_1, table, num_tokens, step_tokens, M, rank, num_receivers,
    pause_ns,
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
        step_tokens: the step's, as in DispatchStep. M: rows that each peer may send back.
        num_receivers: the last programs of a grid that receives, which only add. The others send, but for program 0,
            which exchanges flags with the peers. With 0 each program does all of it: it sends, then adds.
        pause_ns: how long a receiver sleeps between two looks at rows that have not arrived.
        S: Shape. SENT, ADDED, WEIGHTS: the Block of sent rows, of added rows, and of weights. COMBINE: Combine.
        FORM: LaunchForm.
    """
    op = OpContext(table, rank, S, COMBINE=COMBINE, FORM=FORM)
    # addresses never change, so they may be read before the launch before this one has ended
    recv_counts = prim.address(op, Region.RECV_COUNTS, tl.int32)
    state = prim.address(op, Region.STATE, tl.int32)
    poison_word = prim.poison_address(op)
    if FORM.DEPENDENT_LAUNCH:
        prim.after_previous_launch()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    signals = program == FLAG_PROGRAM
    lanes = tl.arange(0, S.WORLD_LANES)
    counts = tl.load(recv_counts + lanes, mask=lanes < S.WORLD_SIZE, other=0)
    epoch, out_of_order = prim.begin_stage(op, Stage.COMBINE_SEND if FORM.SEND else Stage.COMBINE_RECEIVE)
    out_of_order = out_of_order | send.unlike_dispatch(state, num_tokens, step_tokens)
    answer = prim.load_poison(poison_word, WEIGHTS.GROUPS_LANES)
    given = send.Operands(rows_in, weights_in, result, ids, bias_0, bias_1)
    first_sender = (num_receivers > 0).to(tl.int32)
    first_receiver = num_programs - num_receivers if FORM.RECEIVE else num_programs
    sender = program - first_sender
    is_sender = (sender >= 0) & (program < first_receiver)
    step = send.CombineStep(op, epoch, num_tokens, step_tokens, M, recv_counts, counts, signals, is_sender, pause_ns)
    sends = send.Share(sender, first_receiver - first_sender)
    if FORM.SEND:
        # C1; in flight together with what decides whether it is sent
        first = send.first_unit(rows_in, step, sends, SENT, COMBINE.OWN_IN_PLACE)
    poison = prim.initial_poison(op, answer, StepPhase.COMBINE, epoch, out_of_order)
    masked = prim.masked_of(op, answer)
    if FORM.SEND:
        send_results(first, given, step, sends, poison, masked, SENT)
    if FORM.RECEIVE:
        adds = send.Share(program, num_programs)
        if num_receivers > 0:
            adds = send.Share(program - first_receiver, num_receivers)
        receive_results(given, step, adds, poison, masked, ADDED, WEIGHTS)
        prim.finish_stage(op, Stage.COMBINE_RECEIVE, program, num_programs, FORM.DEPENDENT_LAUNCH)
    if FORM.SEND:
        prim.finish_stage(op, Stage.COMBINE_SEND, program, num_programs, FORM.DEPENDENT_LAUNCH)
