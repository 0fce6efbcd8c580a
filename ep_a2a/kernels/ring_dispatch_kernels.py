"""InterNodeV1 dispatch: each token crosses once to every other node, in chunks that are forwarded as they come.

A channel does all its roles in turn without waiting in any: it sends its next chunk where the ring has room, and
forwards the next chunk that has come. So one program and a ring of one chunk are enough to finish.
"""

import triton.language as tl

from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region, Stage
from ep_a2a.kernels.primitives import (
    NUM_TOKENS,
    POISON,
    STATE,
    address,
    ask_poison,
    begin_stage,
    fail,
    finish_stage,
    may_go_on,
    reduce_sum,
)
from ep_a2a.kernels.receive_kernels import post_counts, wait_counts
from ep_a2a.kernels.ring_forward_kernels import forward_chunk
from ep_a2a.kernels.ring_kernels import TO_EXPERTS, idle, load_channel, num_own_chunks, pick, store_channel
from ep_a2a.kernels.ring_send_kernels import send_chunk
from ep_a2a.kernels.routing_kernels import count_rows, field_of, fields_of_token, plus, record_route
from ep_a2a.kernels.send_kernels import load_choices

ROUTES = tl.constexpr(Region.ROUTES.value)
SENT_INDICES = tl.constexpr(Region.SENT_INDICES.value)
DISPATCH_SEND = tl.constexpr(Stage.DISPATCH_SEND.value)


@portable(do_not_specialize=["num_tokens", "wire_word", "rank"], do_not_specialize_on_alignment=["ids"])
def number_rows_kernel(
    ids, table, num_tokens, wire_word, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, OWNERS: tl.constexpr, WORLD_SIZE: tl.constexpr,
    WORLD_LANES: tl.constexpr, MANY_TOKENS: tl.constexpr, COUNT_BITS: tl.constexpr, POISON_LANES: tl.constexpr,
    FINISHES: tl.constexpr,
):  # fmt: skip
    """Numbers the rows that this rank's tokens get at every rank, and tells all ranks how many there are.

    FINISHES: the sending stage ends with this launch; else with the one after it.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, out_of_order = begin_stage(table, DISPATCH_SEND, WORLD_SIZE)
    answer = ask_poison(address(table, POISON, rank, WORLD_SIZE, tl.int32), POISON_LANES)
    poison = may_go_on(table, answer, 1, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    ranks = tl.arange(0, WORLD_LANES)
    if poison == 0:
        if program == 0:
            tl.store(address(table, STATE, rank, WORLD_SIZE, tl.int32) + NUM_TOKENS, num_tokens)
            totals = count_rows(ids, 0, num_tokens, TOPK, OWNERS, WORLD_SIZE, MANY_TOKENS, COUNT_BITS)
            counts = field_of(totals, ranks, WORLD_SIZE, COUNT_BITS)
            post_counts(table, counts, wire_word, epoch, rank, WORLD_SIZE, WORLD_LANES)
        share = (num_tokens + num_programs - 1) // num_programs
        first = tl.minimum(program * share, num_tokens)
        last = tl.minimum(first + share, num_tokens)
        routes = address(table, ROUTES, rank, WORLD_SIZE, tl.int32)
        sent_ids = address(table, SENT_INDICES, rank, WORLD_SIZE, tl.int32)
        before = count_rows(ids, 0, first, TOPK, OWNERS, WORLD_SIZE, MANY_TOKENS, COUNT_BITS)
        for token in range(first, last):
            token_ids, _ = load_choices(ids, ids, token, last, TOPK, TOPK_LANES, False)
            own = fields_of_token(token_ids, OWNERS, WORLD_SIZE, COUNT_BITS)
            record_route(
                routes, sent_ids, token_ids, token, before, own, TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, COUNT_BITS
            )
            before = plus(before, own, WORLD_SIZE, COUNT_BITS)
    if FINISHES:
        finish_stage(table, DISPATCH_SEND, program, num_programs, WORLD_SIZE)


@portable(
    do_not_specialize=["num_tokens", "stride", "row_limit", "positions_per_rank", "rank"],
    do_not_specialize_on_alignment=["scales", "weights", "ids"],
)  # fmt: skip
def exchange_kernel(
    x, scales, weights, ids, table, num_tokens, stride, row_limit, positions_per_rank, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    NODE_LANES: tl.constexpr, GPU_LANES: tl.constexpr, RINGS: tl.constexpr, OWN_LINE_EACH: tl.constexpr,
    ROW: tl.constexpr, SCALE_DTYPE: tl.constexpr, HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr,
    COUNT_LANES: tl.constexpr, POISON_LANES: tl.constexpr,
    SENDS: tl.constexpr, FORWARDS: tl.constexpr, STAGE: tl.constexpr, FINISHES: tl.constexpr,
):  # fmt: skip
    """Sends this rank's chunks to all nodes and forwards those that come from them.

    Args:
        x, scales, weights, ids, num_tokens, stride, row_limit: as of dispatch_kernel.
        positions_per_rank: W * M, by which source positions count.
        ROW: (words of a row, words copied at once, words of its scales, elements of SCALE_DTYPE of its scales, lanes
            for those, elements of a group of the fp8 cast or 0, lanes for them, lanes for groups, whether scales are
            powers of two).
        SENDS, FORWARDS: what this launch does. STAGE: the stage it belongs to; FINISHES: and ends.
    """
    NODES: tl.constexpr = RINGS[0]
    GPUS: tl.constexpr = RINGS[1]
    CHANNELS: tl.constexpr = RINGS[2]
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, out_of_order = begin_stage(table, STAGE, WORLD_SIZE)
    answer = ask_poison(address(table, POISON, rank, WORLD_SIZE, tl.int32), POISON_LANES)
    poison = may_go_on(table, answer, 1, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    nodes = tl.arange(0, NODE_LANES)
    if COMPACT and FORWARDS:
        if poison == 0:
            _, poison = wait_counts(table, epoch, rank, WORLD_SIZE, COUNT_LANES)
    for channel in range(program, CHANNELS, num_programs):
        sent_before, taken_before = load_channel(table, TO_EXPERTS, channel, rank, NODE_LANES, RINGS, WORLD_SIZE)
        num_own = num_own_chunks(num_tokens, channel, RINGS)
        sent, taken = nodes * 0, nodes * 0
        unsent, unfinished = (nodes < NODES).to(tl.int32), (nodes < NODES).to(tl.int32)
        if not SENDS:
            unsent = nodes * 0
        if not FORWARDS:
            unfinished = nodes * 0
        polls, deadline = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
        while (reduce_sum(unsent + unfinished, 0) > 0) & (poison == 0):
            moved = tl.full((), 0, tl.int32)
            for step in range(NODES):
                peer = (rank // GPUS + step) % NODES
                here = nodes == peer
                if SENDS:
                    if pick(unsent, peer, NODE_LANES) > 0:
                        count, before = pick(sent, peer, NODE_LANES), pick(sent_before, peer, NODE_LANES)
                        gone = send_chunk(
                            x, scales, weights, ids, table, num_tokens, channel, peer, count, before, num_own, rank,
                            GPU_LANES, RINGS, OWN_LINE_EACH, ROW, SCALE_DTYPE, TOPK, TOPK_LANES, HAS_WEIGHTS,
                            WORLD_SIZE,
                        )  # fmt: skip
                        sent += (here & gone).to(tl.int32)
                        unsent = tl.where(here & gone & (count + 1 == num_own), 0, unsent)
                        moved += gone.to(tl.int32)
                if FORWARDS:
                    if pick(unfinished, peer, NODE_LANES) > 0:
                        count, before = pick(taken, peer, NODE_LANES), pick(taken_before, peer, NODE_LANES)
                        gone, ended = forward_chunk(
                            table, channel, peer, count, before, stride, row_limit, positions_per_rank, epoch, rank,
                            GPU_LANES, RINGS, ROW, SCALE_DTYPE, TOPK, TOPK_LANES, HAS_WEIGHTS, COMPACT, WORLD_SIZE,
                            WORLD_LANES,
                        )  # fmt: skip
                        taken += (here & gone).to(tl.int32)
                        unfinished = tl.where(here & ended, 0, unfinished)
                        moved += gone.to(tl.int32)
            poison, polls, deadline = idle(
                table, moved, polls, deadline, unsent + unfinished, epoch, rank, NODE_LANES, RINGS, WORLD_SIZE,
                WORLD_LANES,
            )  # fmt: skip
        store_channel(
            table, TO_EXPERTS, channel, sent_before + sent, taken_before + taken, rank, NODE_LANES, RINGS, WORLD_SIZE
        )
    if poison != 0:
        late = (tl.arange(0, WORLD_LANES) == (poison & 0xFFFF)).to(tl.int32)
        fail(table, poison, 1, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
    if FINISHES:
        finish_stage(table, STAGE, program, num_programs, WORLD_SIZE)
