"""IntraNode bulk dispatch: writes rows where their experts read them, then adds to one flag per peer.

Each program owns a contiguous chunk of this rank's tokens, so that row numbers follow from a prefix count and rows
land in (source rank, source token) order. The steps of a launch, by which the code is marked:

- D1. Each program asks for its first token, its cast or its words, before it knows where the row goes.
- D2. It counts the rows of the tokens before its own: alone, of all ids, or by the counts of the programs before it.
- D3. One program posts how many rows this rank sends to each rank. Layout compact waits here for all ranks' counts.
- D4. The program sends its tokens one by one with all warps, or, where programs are few, in tiles. It records which
  row went where, for combine.
- D5. It adds its share to one flag at each peer: with the shares of all programs, all rows lie there.
- D6. The last program of the grid waits for the counts and then for the flags of all peers.
- D7. A failed step looks empty: nothing was received.
"""

import triton.language as tl

from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels import receive_kernels as receive
from ep_a2a.kernels.bulk_send_kernels import load_beside, send_one_by_one
from ep_a2a.kernels.layout import Region, Span, Stage, State, StepPhase
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.receive_kernels import STEP_NUMBERS
from ep_a2a.kernels.routing_kernels import count_by_rank, list_destinations, record_routes, rows_of_programs_before
from ep_a2a.kernels.send_kernels import load_row
from ep_a2a.kernels.send_tile_kernels import send_beside_rows, send_tiles
from ep_a2a.kernels.span_kernels import note_span
from ep_a2a.kernels.target import barrier


@portable
def receive_rows(step, poison, masked):
    """One program's part: publishes the counts while rows are on their way, then waits for every peer's flag."""
    op, flag = step.op, prim.dispatch_flag(step.op)
    note_span(op.FORM.SPANS, op, begun=Span.ACCEPT_ROWS)
    # D6; rows may still be on their way: those that are padded here are none of them
    if poison == 0:
        old = receive.last_received(op, op.BULK.COUNT_LANES)
        words, poison = receive.wait_counts(op, step.epoch, op.BULK.COUNT_LANES, False, 1, 0, masked)
        if poison == 0:
            poison = receive.accept_rows(step, old, words, op.BULK.COUNT_LANES)
    note_span(op.FORM.SPANS, op, Span.ACCEPT_ROWS, Span.WAIT)
    if poison == 0:
        # who forwards rows waits itself for the rank that they come from, and shall be the first to name it
        patience: tl.constexpr = 2 if op.BULK.FORWARDED else 1
        poison = prim.wait_all(op, Region.DISPATCH_FLAGS, flag, True, patience, 0, masked)
    note_span(op.FORM.SPANS, op, Span.WAIT, Span.FINISH)
    # D7
    if poison != 0:
        prim.fail_behind(op, poison, StepPhase.DISPATCH, step.epoch, Region.DISPATCH_FLAGS, flag)
        receive.receive_nothing(op)
    prim.finish_stage(op, Stage.DISPATCH_RECEIVE, 0, 1, op.FORM.DEPENDENT_LAUNCH)
    note_span(op.FORM.SPANS, op, ended=Span.FINISH)


@portable
def rows_before_program(ids, step, first, last):
    """(rows of all tokens before this program's, this program's own rows), both by rank [WORLD_LANES].

    Where programs count alone (redundant scan), own rows are 0.
    """
    op = step.op
    own_counts = prim.full_like(tl.arange(0, op.WORLD_LANES), 0)
    if op.BULK.COUNTS_ALONE:
        first_index = count_by_rank(ids, 0, first, op, op.OWNERS, op.BULK.MANY_TOKENS)
    else:
        own_counts = count_by_rank(ids, first, last, op, op.OWNERS, op.BULK.BLOCK_TOKENS)
        first_index = rows_of_programs_before(op, step.epoch, own_counts, step.program, op.BULK.PROGRAM_LANES)
    return first_index, own_counts


@portable
def publish_counts(ids, step, first, first_index, own_counts):
    """Posts how many rows this rank sends; one program does.

    Args:
        first: this program's first token. first_index, own_counts: from rows_before_program.
    """
    op = step.op
    # where programs wait for these counts, the one that posts them must not wait for other programs
    if step.program == (0 if op.COMPACT else step.num_programs - 1):
        note_span(op.FORM.SPANS, op, begun=Span.COUNT_PUT)
        if op.COMPACT or op.BULK.COUNTS_ALONE:
            own_counts = count_by_rank(ids, first, step.num_tokens, op, op.OWNERS, op.BULK.MANY_TOKENS)
        receive.post_counts(op, first_index + own_counts, step.first_row, step.wire_word, step.epoch)
        note_span(op.FORM.SPANS, op, ended=Span.COUNT_PUT)


@portable
def send_by_tiles(given, step, first, last, index, bases, masked):
    """Send tokens first ... last - 1 in tiles. index, bases, masked: as of send_one_by_one."""
    op = step.op
    # in the layout of the counts before, Triton 3.6 cannot compile the running sum for two ranks
    index = tl.gather(index, tl.arange(0, op.WORLD_LANES), 0)
    for start in range(first, last, op.TILE.LISTED):
        goes, indices, index = record_routes(given.ids, op, start, last, index, op.OWNERS, op.TILE.LISTED, masked)
        list_destinations(step, start, last, goes, bases[None, :] + indices)
        # the lists of destinations are read by other threads than wrote them
        barrier()
        send_beside_rows(given, step, start, last)
    send_tiles(given, step, first, last)


@portable
def send_rows(given, step, answer, out_of_order):
    """Send this program's share of the tokens. Returns the poison word.

    Args:
        given: DispatchInputs. step: DispatchStep. answer: from load_poison. out_of_order: from begin_stage.
    """
    op, program, num_programs = step.op, step.program, step.num_programs
    # one program more than bring rows has nothing to do but to count and to wait
    num_senders = tl.maximum(num_programs - op.BULK.RECEIVES_ALONE, 1)
    chunk = (step.num_tokens + num_senders - 1) // num_senders
    first = tl.minimum(program * chunk, step.num_tokens)
    last = tl.minimum(first + chunk, step.num_tokens)
    # D1; a tile of many tokens has no registers left for what is on its way
    tiles, beside = (), ()
    if op.TILE.TOKENS == 1:
        beside = load_beside(given, first, last, op)
        tiles = load_row(given.x, first, last, 0, op.ROW)
    # D2
    first_index, own_counts = rows_before_program(given.ids, step, first, last)
    if program == 0:
        tl.store(prim.address(op, Region.STATE, tl.int32) + State.NUM_TOKENS, step.num_tokens)
    bases = prim.full_like(tl.arange(0, op.WORLD_LANES), step.first_row)
    poison = prim.initial_poison(op, answer, StepPhase.DISPATCH, step.epoch, out_of_order)
    masked = prim.masked_of(op, answer)
    # D3
    if poison == 0:
        publish_counts(given.ids, step, first, first_index, own_counts)
        if op.COMPACT:
            _, poison = receive.wait_counts(op, step.epoch, op.BULK.COUNT_LANES, True)
            bases = receive.rows_before(op, op.rank)
    note_span(op.FORM.SPANS, op, Span.PREPARE, Span.QUANT_AND_PUT)
    # D4
    if poison == 0:
        if op.TILE.TOKENS == 1:
            send_one_by_one(given, step, first, last, tiles, beside, first_index, bases, masked)
        else:
            send_by_tiles(given, step, first, last, first_index, bases, masked)
    note_span(op.FORM.SPANS, op, Span.QUANT_AND_PUT, Span.POST)
    return poison


@portable(do_not_specialize=[*STEP_NUMBERS, "rank"], do_not_specialize_on_alignment=["scales", "weights", "ids"])
def bulk_dispatch_kernel(
    x, scales, weights, ids, table, num_tokens, step_tokens, wire_word, pad_id, row_limit, first_row, bound_mask,
    num_region_rows, first_position, rank,
    S: tl.constexpr, OWNERS: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr, BULK: tl.constexpr,
    TILE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Dispatch of one step; DispatchStep describes the numbers, kernels/constants.py what is known at compile time.

    Args:
        x: [num_tokens, row] as 4-byte words, or as elements when ROW asks for the fp8 cast.
        scales: [num_tokens, SCALE_WIDTH] of SCALE_DTYPE, when LINE has them.
        weights: [num_tokens, TOPK] float32 as int32 when HAS_WEIGHTS; ids: [num_tokens, TOPK] int32.
        table: addresses, see kernels/layout.py.
        S: Shape. OWNERS: ExpertPlacement. ROW: Row. LINE: Scales. BULK: BulkDispatch. TILE: Tile.
        FORM: LaunchForm. A launch that only receives is one program.
    """
    op = OpContext(table, rank, S, OWNERS=OWNERS, ROW=ROW, LINE=LINE, BULK=BULK, TILE=TILE, FORM=FORM)
    # an address never changes, so it may be read before the launch before this one has ended
    poison_word = prim.poison_address(op)
    if FORM.DEPENDENT_LAUNCH:
        prim.after_previous_launch()
    if FORM.SEND:
        note_span(FORM.SPANS, op, begun=Span.PREPARE)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, out_of_order = prim.begin_stage(op, Stage.DISPATCH_SEND if FORM.SEND else Stage.DISPATCH_RECEIVE)
    answer = prim.load_poison(poison_word, BULK.POISON_LANES)
    step = receive.DispatchStep(
        op, epoch, num_tokens, step_tokens, wire_word, pad_id, row_limit, first_row, bound_mask,
        num_region_rows, first_position, program, num_programs,
    )  # fmt: skip
    if FORM.SEND:
        given = receive.DispatchInputs(x, scales, weights, ids)
        poison = send_rows(given, step, answer, out_of_order)
        masked = prim.masked_of(op, answer)
        # D5; a program that left rows unsent tells nobody: the step must not end then
        if poison == 0:
            prim.post_arrival(op, Region.DISPATCH_FLAGS, program, num_programs, masked)
        note_span(FORM.SPANS, op, ended=Span.POST)
        prim.finish_stage(op, Stage.DISPATCH_SEND, program, num_programs)
        if FORM.RECEIVE:
            if program == num_programs - 1:
                receive_rows(step, poison, masked)
    else:
        poison = prim.initial_poison(op, answer, StepPhase.DISPATCH, epoch, out_of_order)
        receive_rows(step, poison, prim.masked_of(op, answer))
