"""IntraNode dispatch of few tokens: words that are their own flags, so that a row takes one hop and no fence.

A sender writes a row into a region of its own at the receiver. The words beside the row (scales, ids, weights,
position) are words that carry the epoch. The row itself costs no extra bytes: a word of it is there when it is not
EMPTY, and the reader leaves EMPTY behind. Rows of a fused cast never contain EMPTY; a row that does is written in full
first, and then announced by a released position word with the highest bit set. The steps of a launch:

- D1. A sender asks for its first token and for the ids of all tokens before it knows where the row goes.
- D2. The flag poster raises a flag at each peer: this rank has begun, so what it read in earlier steps may be
  overwritten.
- D3. The count publisher posts how many rows this rank sends to each rank.
- D4. Senders push rows and the words beside them, this rank's own rows straight to where experts read them, and record
  which row went where, for combine.
- D5. The count publisher waits for all ranks' counts, and where receivers need them to place rows, these do, too.
- D6. A failed step looks empty: that program writes that nothing was received.
- D7. Receivers poll the words of the rows that are due and move them to where experts read them.
"""

import triton.language as tl

from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels import receive_kernels as receive
from ep_a2a.kernels.layout import FlagProgram, Region, Span, Stage, State, StepPhase
from ep_a2a.kernels.ll_receive_kernels import own_places, receive_low_latency_rows
from ep_a2a.kernels.ll_send_kernels import SentToken, send_token
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.receive_kernels import STEP_NUMBERS
from ep_a2a.kernels.routing_kernels import ranks_of_tokens, rows_before_token
from ep_a2a.kernels.send_kernels import load_choices, load_row
from ep_a2a.kernels.span_kernels import note_span

NUM_FLAG_PROGRAMS = tl.constexpr(len(FlagProgram))


@portable
def send_rows(given, step, num_senders, places, answer, out_of_order):
    """Do the sending part of a program: post flags or counts, or send its share of the tokens. Returns the poison word.

    Args:
        given: DispatchInputs. step: DispatchStep. num_senders: as of the kernel. places: OwnPlaces.
        answer: from load_poison. out_of_order: from begin_stage.
    """
    op, num_tokens = step.op, step.num_tokens
    sender = step.program - NUM_FLAG_PROGRAMS
    # below the sender of the first two programs, which must find no token
    end = tl.where((sender >= 0) & (sender < num_senders), num_tokens, -NUM_FLAG_PROGRAMS)
    # D1; in flight together with all that decides where the row goes
    tiles = load_row(given.x, sender, end, 0, op.ROW)
    token_ids, token_weights = load_choices(given.ids, given.weights, sender, end, op, op.FORM.HAS_WEIGHTS)
    going = ranks_of_tokens(given.ids, num_tokens, op, op.OWNERS, op.LL.TOKEN_LANES)
    poison = prim.initial_poison(op, answer, StepPhase.DISPATCH, step.epoch, out_of_order)
    masked = prim.masked_of(op, answer)
    # D2
    if (step.program == FlagProgram.FLAG_POSTER) & (poison == 0):
        prim.post_all(op, Region.DISPATCH_FLAGS, prim.dispatch_flag(op), False, masked)
    # D3
    if (step.program == FlagProgram.COUNT_PUBLISHER) & (poison == 0):
        note_span(op.FORM.SPANS, op, begun=Span.COUNT_PUT)
        tl.store(prim.address(op, Region.STATE, tl.int32) + State.NUM_TOKENS, num_tokens)
        counts = rows_before_token(going, num_tokens, tl.arange(0, op.WORLD_LANES), op.LL.TOKEN_LANES)
        receive.post_counts(op, counts, step.first_row, step.wire_word, step.epoch)
        note_span(op.FORM.SPANS, op, ended=Span.COUNT_PUT)
    if (sender >= 0) & (sender < num_senders):
        note_span(op.FORM.SPANS, op, Span.PREPARE, Span.QUANT_AND_PUT)
    # D4
    for token in range(sender, end, num_senders):
        loaded = SentToken(token, tiles, token_ids, token_weights)
        send_token(given, step, places, loaded, going, poison, masked)
        following = token + num_senders
        tiles = load_row(given.x, following, end, 0, op.ROW)
        token_ids, token_weights = load_choices(given.ids, given.weights, following, end, op, op.FORM.HAS_WEIGHTS)
    if (sender >= 0) & (sender < num_senders):
        note_span(op.FORM.SPANS, op, ended=Span.QUANT_AND_PUT)
    return poison


@portable
def receive_rows(step, places, num_receivers, poison, masked):
    """Do the receiving part of a program: await counts, or receive its share of the rows."""
    op, epoch = step.op, step.epoch
    is_publisher = step.program == FlagProgram.COUNT_PUBLISHER
    receiver = step.program - (step.num_programs - num_receivers)
    waits = is_publisher | (receiver >= 0)
    if waits:
        note_span(op.FORM.SPANS, op, begun=Span.WAIT)
    counts_needed = is_publisher
    if op.COMPACT or step.step_tokens < 0:
        counts_needed = waits
    words = prim.full_like(tl.arange(0, op.LL.COUNT_LANES), 0)
    old_rows, old_pad_id = words, step.pad_id
    if counts_needed & (poison == 0):
        if is_publisher:
            old_rows, old_pad_id = receive.last_received(op, op.LL.COUNT_LANES)
        # D5; a peer's counts tell also that its earlier combine has read what this rank overwrites next
        words, poison = receive.wait_counts(op, epoch, op.LL.COUNT_LANES, False, 1, 0, masked)
    if is_publisher:
        if poison == 0:
            poison = receive.accept_rows(step, receive.Received(old_rows, old_pad_id), words, op.LL.COUNT_LANES)
        # D6
        if poison != 0:
            receive.receive_nothing(op)
    elif (receiver >= 0) & (poison == 0):
        # D7
        poison = receive_low_latency_rows(step, places, words, receiver, num_receivers, masked)
    if poison != 0:
        prim.fail_behind(op, poison, StepPhase.DISPATCH, epoch, Region.DISPATCH_FLAGS, prim.dispatch_flag(op))
    if waits:
        note_span(op.FORM.SPANS, op, ended=Span.WAIT)


@portable(
    do_not_specialize=[*STEP_NUMBERS, "rank", "num_senders", "num_receivers"],
    do_not_specialize_on_alignment=["scales", "weights", "ids"],
)
def ll_dispatch_kernel(
    x, scales, weights, ids, table, num_tokens, step_tokens, wire_word, pad_id, row_limit, first_row, bound_mask,
    num_region_rows, first_position, rank, num_senders, num_receivers,
    S: tl.constexpr, OWNERS: tl.constexpr, ROW: tl.constexpr, LL: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Dispatch of one step of few tokens per rank; run-time arguments as in bulk_dispatch_kernel, and:

    Program 0, the count publisher, posts and awaits the counts; program 1, the flag poster, posts the flags.
    The interpreter, which runs programs in turn, needs one launch that sends and one that receives.

    Args:
        num_senders: the programs after those two, which send.
        num_receivers: the last programs of the grid, which receive.
        S: Shape. OWNERS: ExpertPlacement. ROW: Row. LL: LowLatencyDispatch. FORM: LaunchForm.
    """
    op = OpContext(table, rank, S, OWNERS=OWNERS, ROW=ROW, LL=LL, FORM=FORM)
    # addresses never change, so they may be read before the launch before this one has ended
    places = own_places(op)
    poison_word = prim.poison_address(op)
    if FORM.DEPENDENT_LAUNCH:
        prim.after_previous_launch()
    if FORM.SEND:
        note_span(FORM.SPANS, op, begun=Span.PREPARE)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, out_of_order = prim.begin_stage(op, Stage.DISPATCH_SEND if FORM.SEND else Stage.DISPATCH_RECEIVE)
    answer = prim.load_poison(poison_word, LL.POISON_LANES)
    step = receive.DispatchStep(
        op, epoch, num_tokens, step_tokens, wire_word, pad_id, row_limit, first_row, bound_mask,
        num_region_rows, first_position, program, num_programs,
    )  # fmt: skip
    if FORM.SEND:
        given = receive.DispatchInputs(x, scales, weights, ids)
        poison = send_rows(given, step, num_senders, places, answer, out_of_order)
    else:
        poison = prim.initial_poison(op, answer, StepPhase.DISPATCH, epoch, out_of_order)
    if FORM.RECEIVE:
        receive_rows(step, places, num_receivers, poison, prim.masked_of(op, answer))
        prim.finish_stage(op, Stage.DISPATCH_RECEIVE, program, num_programs, FORM.DEPENDENT_LAUNCH)
    if FORM.SEND:
        prim.finish_stage(op, Stage.DISPATCH_SEND, program, num_programs, FORM.DEPENDENT_LAUNCH)
