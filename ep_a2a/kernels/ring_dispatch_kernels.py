"""InterNodeV1 dispatch: each token crosses once to every other node, in chunks that are forwarded as they come.

The steps of a dispatch, which has three launches:

- D1. number_rows_kernel posts how many rows this rank sends to each rank, and numbers each token's row at every rank.
- D2. exchange_kernel, in layout compact, waits for all ranks' counts, which say where rows begin.
- D3. A channel sends its next chunk to a node whose ring has room: each token once for the node.
- D4. It forwards the next chunk that has come from a node to the ranks of its own node that the tokens go to, and gives
  the slot back. Behind a source's last chunk it raises that source's flags.
- D5. A bulk_dispatch_kernel that only receives waits for the flags: its D6.

A channel does D3 and D4 in turn for each node, and waits in neither. So one program and a ring of one chunk are enough
to finish.
"""

import triton.language as tl

from ep_a2a.kernels.layout import Region, Stage, State, StepPhase
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import address, begin_launch, fail, finish_stage, full_like, pick, reduce_sum
from ep_a2a.kernels.receive_kernels import post_counts, wait_counts
from ep_a2a.kernels.ring_forward_kernels import Places, forward_chunk
from ep_a2a.kernels.ring_kernels import idle, load_channel, num_own_chunks, store_channel
from ep_a2a.kernels.ring_send_kernels import Source, send_chunk
from ep_a2a.kernels.routing_kernels import count_by_rank, record_routes


@portable(do_not_specialize=["num_tokens", "wire_word", "first_row", "rank"], do_not_specialize_on_alignment=["ids"])
def number_rows_kernel(
    ids, table, num_tokens, wire_word, first_row, rank,
    OWNERS: tl.constexpr, S: tl.constexpr, MANY_TOKENS: tl.constexpr, TOKENS: tl.constexpr,
    POISON_LANES: tl.constexpr, FINISHES: tl.constexpr,
):  # fmt: skip
    """Numbers the rows that this rank's tokens get at every rank, and posts their counts to all ranks.

    Args:
        ids: [num_tokens, TOPK] int32. wire_word, first_row: as in DispatchStep.
        OWNERS: ExpertPlacement. S: Shape.
        MANY_TOKENS, TOKENS: tokens whose ids a program looks at at once, to count rows and to number them.
        POISON_LANES: lanes of a wait, at least the threads of a program.
        FINISHES: the sending stage ends with this launch; else with the one after it.
    """
    op = OpContext(table, rank, S)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, poison = begin_launch(op, Stage.DISPATCH_SEND, StepPhase.DISPATCH, POISON_LANES)
    # D1
    if poison == 0:
        if program == 0:
            tl.store(address(op, Region.STATE, tl.int32) + State.NUM_TOKENS, num_tokens)
            counts = count_by_rank(ids, 0, num_tokens, op, OWNERS, MANY_TOKENS)
            post_counts(op, counts, first_row, wire_word, epoch)
        share = (num_tokens + num_programs - 1) // num_programs
        first = tl.minimum(program * share, num_tokens)
        last = tl.minimum(first + share, num_tokens)
        index = count_by_rank(ids, 0, first, op, OWNERS, MANY_TOKENS)
        for start in range(first, last, TOKENS):
            _, _, index = record_routes(ids, op, start, last, index, OWNERS, TOKENS)
    if FINISHES:
        finish_stage(op, Stage.DISPATCH_SEND, program, num_programs)


@portable
def exchange_channel(
    source, op, channel, places, poison, epoch, R: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr, X: tl.constexpr
):
    """Sends and forwards all chunks of a channel. Returns the poison word.

    What is known of each node lies in vectors [NODE_LANES]: how many chunks went there or came from there in this step
    (sent, taken) and before it, and whether some are left (unsent, unfinished).
    """
    nodes = tl.arange(0, R.NODE_LANES)
    sent_before, taken_before = load_channel(op, channel, R)
    num_own = num_own_chunks(source.num_tokens, channel, R)
    sent, taken = full_like(nodes, 0), full_like(nodes, 0)
    unsent, unfinished = (nodes < R.NODES).to(tl.int32), (nodes < R.NODES).to(tl.int32)
    if not X.SENDS:
        unsent = full_like(nodes, 0)
    if not X.FORWARDS:
        unfinished = full_like(nodes, 0)
    polls, deadline = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    while (reduce_sum(unsent + unfinished, 0) > 0) & (poison == 0):
        moved = tl.full((), 0, tl.int32)
        for step in range(R.NODES):
            peer = (op.rank // R.GPUS + step) % R.NODES
            here = nodes == peer
            # D3
            if X.SENDS:
                if pick(unsent, peer) > 0:
                    count, before = pick(sent, peer), pick(sent_before, peer)
                    gone = send_chunk(source, op, channel, peer, count, before, num_own, R, ROW, LINE)
                    sent += (here & gone).to(tl.int32)
                    unsent = tl.where(here & gone & (count + 1 == num_own), 0, unsent)
                    moved += gone.to(tl.int32)
            # D4
            if X.FORWARDS:
                if pick(unfinished, peer) > 0:
                    count, before = pick(taken, peer), pick(taken_before, peer)
                    gone, ended = forward_chunk(op, channel, peer, count, before, places, R, ROW, LINE)
                    taken += (here & gone).to(tl.int32)
                    unfinished = tl.where(here & ended, 0, unfinished)
                    moved += gone.to(tl.int32)
        poison, polls, deadline = idle(op, moved, polls, deadline, unsent + unfinished, epoch, R)
    store_channel(op, channel, sent_before + sent, taken_before + taken, R)
    return poison


@portable(
    do_not_specialize=["num_tokens", "first_row", "row_limit", "positions_per_rank", "rank"],
    do_not_specialize_on_alignment=["scales", "weights", "ids"],
)  # fmt: skip
def exchange_kernel(
    x, scales, weights, ids, table, num_tokens, first_row, row_limit, positions_per_rank, rank,
    S: tl.constexpr, R: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Sends this rank's chunks to all nodes and forwards those that come from them.

    Args:
        x, scales, weights, ids, num_tokens, first_row, row_limit: as of bulk_dispatch_kernel.
        positions_per_rank: W * M, by which source positions count.
        S: Shape. R: Ring of the way to experts. ROW: Row. LINE: Line. X: Exchange.
    """
    op = OpContext(table, rank, S)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, poison = begin_launch(op, X.STAGE, StepPhase.DISPATCH, X.POISON_LANES)
    source = Source(x, scales, weights, ids, num_tokens, first_row)
    places = Places(row_limit, positions_per_rank)
    # D2
    if S.COMPACT and X.FORWARDS:
        if poison == 0:
            _, poison = wait_counts(op, epoch, X.COUNT_LANES, True)
    for channel in range(program, R.CHANNELS, num_programs):
        poison = exchange_channel(source, op, channel, places, poison, epoch, R, ROW, LINE, X)
    if poison != 0:
        late = (tl.arange(0, S.WORLD_LANES) == (poison & 0xFFFF)).to(tl.int32)
        fail(op, poison, StepPhase.DISPATCH, epoch, 0, late)
    if X.STAGE == Stage.DISPATCH_SEND:
        finish_stage(op, X.STAGE, program, num_programs)
