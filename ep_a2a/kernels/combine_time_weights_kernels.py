"""Kernel that exchanges router weights given to combine: each rank sends its own to all ranks.

A weight travels as a flagged word, which has arrived when it carries the step's epoch. So the exchange takes one hop
and no fence. Every rank has an inbox [W, M, TOPK], indexed by source rank and token. From there the kernel copies the
weights of received rows to where dispatch would have put them.

Where no store reaches other nodes, the host first exchanges the weights among the ranks of equal local number. Each of
them passes the weights of all nodes on to the ranks of its own. The steps of a program, one for each rank:

- W1. It writes this rank's weights into the inbox of its partner.
- W2. It waits for the words of the rows that came from its source, block by block.
- W3. It copies their weights to where dispatch would have put them.
"""

import triton.language as tl

from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels.combine_send_kernels import unlike_dispatch
from ep_a2a.kernels.layout import Region, Span, Stage, StepPhase
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import POLLS_PER_CLOCK
from ep_a2a.kernels.span_kernels import note_span
from ep_a2a.kernels.staged_kernels import AFTER_COMBINING_HOST
from ep_a2a.kernels.target import volatile_load


@portable
def push_weights(weights, inbox, num_words, epoch, BLOCK_WORDS: tl.constexpr):
    """Writes this rank's weights into its part of a peer's inbox."""
    for first in range(0, num_words, BLOCK_WORDS):
        at = first + tl.arange(0, BLOCK_WORDS)
        values = tl.load(weights + at, mask=at < num_words, other=0)
        tl.store(inbox + at, prim.flagged(values, epoch), mask=at < num_words, cache_modifier=".wt")


@portable
def await_words(op, words_at, wanted, epoch, sender, PATIENCE: tl.constexpr):
    """(words, poison word) once all wanted words are of this epoch, or their sender is masked.

    Each lane is read by one thread, so that their number is one verdict for all; what is judged is what is returned.

    Args:
        words_at: where the words lie; at least as many lanes as a program has threads.
        sender: the rank to be named when time is up. PATIENCE: as in overdue.
    """
    words = volatile_load(words_at, mask=wanted, other=0)
    num_late = prim.reduce_sum(prim.reduce_sum(((prim.epoch_of(words) != epoch) & wanted).to(tl.int32), 1), 0)
    poison, polls, deadline = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    while (num_late > 0) & (poison == 0):
        prim.pause(0)
        words = volatile_load(words_at, mask=wanted, other=0)
        num_late = prim.reduce_sum(prim.reduce_sum(((prim.epoch_of(words) != epoch) & wanted).to(tl.int32), 1), 0)
        polls = prim.next_poll(polls)
        if (polls % POLLS_PER_CLOCK == 0) & (num_late > 0):
            if op.MASKS:
                num_late = tl.where(prim.is_live(prim.masked_now(op), sender), num_late, 0)
            poison, deadline = prim.overdue(op, polls, deadline, sender, PATIENCE)
    return words, poison


@portable
def place_weights_of(
    op, inbox, source, sender, step_tokens, M, epoch, BLOCK_ROWS: tl.constexpr, PATIENCE: tl.constexpr
):
    """Waits for the weights of all rows that came from `source`, which `sender` writes to the inbox.

    Writes them to WEIGHTS, and returns the poison word. PATIENCE: as in overdue.
    """
    count = tl.load(prim.address(op, Region.RECV_COUNTS, tl.int32) + source)
    positions = prim.address(op, Region.SOURCE_POSITIONS, tl.int32)
    targets = prim.address(op, Region.WEIGHTS, tl.int32)
    topk = tl.arange(0, op.TOPK_LANES)
    poison = tl.full((), 0, tl.int32)
    for first in range(0, count, BLOCK_ROWS):
        if poison == 0:
            index = first + tl.arange(0, BLOCK_ROWS)
            rows = tl.cast(source * step_tokens + index, tl.int64)
            tokens = tl.load(positions + rows, mask=index < count, other=0) - source * (op.WORLD_SIZE * M)
            present = index < count
            if op.MASKS:
                # of a rank that was lost with its counts told, rows that have not come show another step's position
                present = present & (tokens >= 0) & (tokens < M)
            wanted = present[:, None] & (topk < op.TOPK)[None, :]
            words_at = inbox + tl.cast(tokens, tl.int64)[:, None] * op.TOPK + topk[None, :]
            # W2
            words, poison = await_words(op, words_at, wanted, epoch, sender, PATIENCE)
            # W3
            tl.store(targets + rows[:, None] * op.TOPK + topk[None, :], prim.payload_of(words), mask=wanted)
    return poison


@portable(do_not_specialize=["num_tokens", "step_tokens", "M", "rank"], do_not_specialize_on_alignment=["weights"])
def exchange_weights_kernel(
    weights, inboxes, table, num_tokens, step_tokens, M, rank,
    S: tl.constexpr, GPUS: tl.constexpr, BLOCK_WORDS: tl.constexpr, BLOCK_ROWS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Brings the weights of all received rows to WEIGHTS, between a step's dispatch and its combine. W programs.

    Program p sends to rank p, then receives from rank p. Of ranks of another node, program p instead sends the weights
    from p's node to the rank of this node that has p's local number, and receives p's weights from that rank. All ranks
    meet their partners in ascending order, so programs that run in turn, as in the interpreter, do not block each
    other. The next step overwrites the words at the earliest, after a dispatch that has waited for every peer's
    launches of this step.

    Args:
        weights: float32 as int32. This rank's own, [num_tokens, TOPK]. With GPUS below WORLD_SIZE those that the host
            has brought from the ranks of this local number, [nodes, step_tokens, TOPK].
        inboxes: by rank, the address of its inbox: flagged words [W, M, TOPK].
        step_tokens: the bound of the step, rows per source. M: tokens per rank at most.
        S: Shape. GPUS: ranks that stores reach, WORLD_SIZE or those of a node.
        BLOCK_WORDS, BLOCK_ROWS * TOPK_LANES: words that a program moves at once; at least its threads.
        SPANS: programs note when they begin and end.
    """
    op = OpContext(table, rank, S)
    note_span(SPANS, op, begun=Span.EXCHANGE_WEIGHTS)
    peer = tl.program_id(0)
    unlike = unlike_dispatch(prim.address(op, Region.STATE, tl.int32), num_tokens, step_tokens)
    epoch, poison = prim.begin_launch(op, Stage.COMBINE_SEND, StepPhase.COMBINE, BLOCK_WORDS, unlike)
    inbox_words = tl.cast(M, tl.int64) * S.TOPK
    if poison == 0:
        node = peer // GPUS
        partner = rank // GPUS * GPUS + peer % GPUS
        source = node * GPUS + rank % GPUS
        num_sent = (step_tokens if GPUS < S.WORLD_SIZE else num_tokens) * S.TOPK
        # W1
        theirs = tl.load(inboxes + partner).to(tl.pointer_type(tl.int64)) + source * inbox_words
        push_weights(weights + tl.cast(node, tl.int64) * step_tokens * S.TOPK, theirs, num_sent, epoch, BLOCK_WORDS)
        own = tl.load(inboxes + rank).to(tl.pointer_type(tl.int64)) + peer * inbox_words
        patience: tl.constexpr = AFTER_COMBINING_HOST if GPUS < S.WORLD_SIZE else 1
        poison = place_weights_of(op, own, peer, partner, step_tokens, M, epoch, BLOCK_ROWS, patience)
        if poison != 0:
            late = (tl.arange(0, S.WORLD_LANES) == partner).to(tl.int32)
            prim.fail(op, poison, StepPhase.COMBINE, epoch, 0, late)
    note_span(SPANS, op, ended=Span.EXCHANGE_WEIGHTS)
