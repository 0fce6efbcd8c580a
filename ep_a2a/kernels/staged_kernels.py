"""Kernels around an exchange between nodes that the host makes: they pack what crosses, and unpack what has come.

A rank packs one line per token and node, in the chunks of rings (ring_shape.py). The chunks of a step for a node lie
behind one another, behind a head. The head has what this rank tells all ranks: its counts, flags and failures. The
host exchanges all that with the ranks of the same local rank. Whoever receives a line copies it to the ranks of its
node, and tells them what the head says. Combine is the mirror image.

What the host has exchanged is there, so no kernel waits for it. Kernels wait for ranks of their node, and for what
these have received.
"""

import triton.language as tl

from ep_a2a.kernels.combine_kernels import hear_peers
from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import REMOTE_MIRRORS, Region, Stage
from ep_a2a.kernels.primitives import (
    POISON,
    address,
    arrive_last,
    ask_poison,
    begin_stage,
    fail,
    finish_stage,
    lanes_behind,
    may_go_on,
    poison_of,
    wait_all,
)
from ep_a2a.kernels.receive_kernels import wait_counts
from ep_a2a.kernels.ring_combine_kernels import add_nodes, add_ranks, clear_results
from ep_a2a.kernels.ring_forward_kernels import copy_lines
from ep_a2a.kernels.ring_kernels import tokens_of_chunk, words_at
from ep_a2a.kernels.ring_send_kernels import write_chunk

CHUNKS = tl.constexpr(Region.CHUNKS.value)
CHUNKS_BACK = tl.constexpr(Region.CHUNKS_BACK.value)
CHUNKS_SENT = tl.constexpr(Region.STAGED_CHUNKS.value)
CHUNKS_SENT_BACK = tl.constexpr(Region.CHUNKS_SENT_BACK.value)
COMBINE_FLAGS = tl.constexpr(Region.COMBINE_FLAGS.value)
COUNTS = tl.constexpr(Region.COUNTS.value)
DISPATCH_FLAGS = tl.constexpr(Region.DISPATCH_FLAGS.value)
WEIGHT_EPOCHS = tl.constexpr(Region.WEIGHT_EPOCHS.value)
MIRROR_COMBINE_FLAGS = tl.constexpr(REMOTE_MIRRORS[Region.COMBINE_FLAGS].value)
MIRROR_COUNTS = tl.constexpr(REMOTE_MIRRORS[Region.COUNTS].value)
MIRROR_WEIGHT_EPOCHS = tl.constexpr(REMOTE_MIRRORS[Region.WEIGHT_EPOCHS].value)
DISPATCH_SEND = tl.constexpr(Stage.DISPATCH_SEND.value)
DISPATCH_RECEIVE = tl.constexpr(Stage.DISPATCH_RECEIVE.value)
COMBINE_RECEIVE = tl.constexpr(Stage.COMBINE_RECEIVE.value)

AFTER_HOST = tl.constexpr(2)
"""Timeouts that a kernel waits for what another rank's host exchanges: that one is the first to name who is missing."""
AFTER_COMBINING_HOST = tl.constexpr(3)
"""The same in combine, where a host waits for two: for ranks that wait for others of their node first."""


@portable
def start_of(
    table, region: tl.constexpr, node, num_chunks, rank, HEAD_WORDS: tl.constexpr, RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Address (int64) of what goes to a node, or has come from it, in a step of so many chunks: its head."""
    num_words = HEAD_WORDS + tl.cast(num_chunks, tl.int64) * RINGS[7]
    return tl.load(table + region * WORLD_SIZE + rank) + node * num_words * 4


@portable
def chunk_of(
    table, region: tl.constexpr, node, chunk, num_chunks, rank, HEAD_WORDS: tl.constexpr, RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Address (int64) of one of those chunks."""
    start = start_of(table, region, node, num_chunks, rank, HEAD_WORDS, RINGS, WORLD_SIZE)
    return start + HEAD_WORDS * 4 + tl.cast(chunk, tl.int64) * (RINGS[7] * 4)


@portable
def write_heads(
    table, region: tl.constexpr, num_chunks, poison, rank, HEAD_WORDS: tl.constexpr, RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
):  # fmt: skip
    """Writes the head for every node: what this rank's kernels have stored in the mirrors, and its poison word."""
    NODES: tl.constexpr = RINGS[0]
    marks: tl.constexpr = 2 * (WORLD_SIZE + 1)
    lanes = tl.arange(0, WORLD_LANES)
    line = address(table, MIRROR_COUNTS, rank, WORLD_SIZE, tl.int64) + rank * (WORLD_SIZE + 1)
    counts = tl.load(line + lanes, mask=lanes < WORLD_SIZE, other=0)
    wire_word = tl.load(line + WORLD_SIZE)
    flag = tl.load(address(table, MIRROR_COMBINE_FLAGS, rank, WORLD_SIZE, tl.int32) + rank)
    weights = tl.load(address(table, MIRROR_WEIGHT_EPOCHS, rank, WORLD_SIZE, tl.int32) + rank)
    for node in range(NODES):
        start = start_of(table, region, node, num_chunks, rank, HEAD_WORDS, RINGS, WORLD_SIZE)
        words = start.to(tl.pointer_type(tl.int64))
        tl.store(words + lanes, counts, mask=lanes < WORLD_SIZE)
        tl.store(words + WORLD_SIZE, wire_word)
        head = words_at(start, marks, tl.int32)
        tl.store(head, flag)
        tl.store(head + 1, weights)
        tl.store(head + 2, poison)


@portable
def end_packing(
    table, region: tl.constexpr, num_chunks, poison, rank, HEAD_WORDS: tl.constexpr, RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
):  # fmt: skip
    """Writes the heads in the program that is done last: chunks that a failed program left out must not pass for whole.

    Args:
        poison: this program's poison word.
    """
    is_last, any_poisoned = arrive_last(table, rank, tl.num_programs(0), poison, WORLD_SIZE)
    if is_last:
        told = tl.full((), 0, tl.int32)
        if any_poisoned:
            told += poison_of(table, rank, WORLD_SIZE)
        write_heads(table, region, num_chunks, told, rank, HEAD_WORDS, RINGS, WORLD_SIZE, WORLD_LANES)


@portable(
    do_not_specialize=["num_tokens", "num_chunks", "rank"], do_not_specialize_on_alignment=["scales", "weights", "ids"]
)
def pack_kernel(
    x, scales, weights, ids, table, num_tokens, num_chunks, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    GPU_LANES: tl.constexpr, RINGS: tl.constexpr, HEAD_WORDS: tl.constexpr, ROW: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, HAS_WEIGHTS: tl.constexpr, POISON_LANES: tl.constexpr,
):  # fmt: skip
    """Packs what this rank sends to each node, its own included: a line for each token, and the head.

    Args:
        x, scales, weights, ids, num_tokens: as of dispatch_kernel.
        num_chunks: those of a step.
        ROW: as of exchange_kernel.
    """
    NODES: tl.constexpr = RINGS[0]
    GPUS: tl.constexpr = RINGS[1]
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, out_of_order = begin_stage(table, DISPATCH_SEND, WORLD_SIZE)
    answer = ask_poison(address(table, POISON, rank, WORLD_SIZE, tl.int32), POISON_LANES)
    poison = may_go_on(table, answer, 1, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    for unit in range(program, num_chunks * NODES, num_programs):
        if poison == 0:
            chunk, peer = unit // NODES, (rank // GPUS + unit) % NODES
            first, end = tokens_of_chunk(num_tokens, chunk, 0, RINGS)
            slot = chunk_of(table, CHUNKS_SENT, peer, chunk, num_chunks, rank, HEAD_WORDS, RINGS, WORLD_SIZE)
            write_chunk(
                x, scales, weights, ids, table, slot, first, end, peer, end >= first, rank, GPU_LANES, RINGS, True, ROW,
                SCALE_DTYPE, TOPK, TOPK_LANES, HAS_WEIGHTS, WORLD_SIZE,
            )  # fmt: skip
    end_packing(table, CHUNKS_SENT, num_chunks, poison, rank, HEAD_WORDS, RINGS, WORLD_SIZE, WORLD_LANES)
    finish_stage(table, DISPATCH_SEND, program, num_programs, WORLD_SIZE)


@portable(do_not_specialize=["num_chunks", "rank"])
def pass_on_kernel(
    table, num_chunks, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, GPU_LANES: tl.constexpr,
    RINGS: tl.constexpr, HEAD_WORDS: tl.constexpr, BACK: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Tells the ranks of this node what the head of another node's rank says; a program for each other node.

    BACK: that the rank has begun its combine, HAS_WEIGHTS with weights; else its counts. Failures are always told.
    """
    NODES: tl.constexpr = RINGS[0]
    GPUS: tl.constexpr = RINGS[1]
    marks: tl.constexpr = 2 * (WORLD_SIZE + 1)
    node = (rank // GPUS + 1 + tl.program_id(0)) % NODES
    source = node * GPUS + rank % GPUS
    start = start_of(table, CHUNKS_BACK if BACK else CHUNKS, node, num_chunks, rank, HEAD_WORDS, RINGS, WORLD_SIZE)
    head = words_at(start, marks, tl.int32)
    local_ranks = tl.arange(0, GPU_LANES)
    present = local_ranks < GPUS
    # compare-and-swap takes no mask: surplus lanes repeat this rank
    members = tl.where(present, (rank // GPUS) * GPUS + local_ranks, rank)
    poison = tl.load(head + 2)
    if poison != 0:
        poison_words = address(table, POISON, members, WORLD_SIZE, tl.int32)
        tl.atomic_cas(poison_words, local_ranks * 0, local_ranks * 0 + poison, sem="relaxed", scope="sys")
    elif BACK:
        if HAS_WEIGHTS:
            told = address(table, WEIGHT_EPOCHS, members, WORLD_SIZE, tl.int32) + source
            tl.store(told, local_ranks * 0 + tl.load(head + 1), mask=present)
        flags = address(table, COMBINE_FLAGS, members, WORLD_SIZE, tl.int32) + source
        epoch = local_ranks * 0 + tl.load(head)
        tl.debug_barrier()
        tl.atomic_xchg(flags, epoch, mask=present, sem="release", scope="sys")
    else:
        lanes = tl.arange(0, WORLD_LANES)
        sent = start.to(tl.pointer_type(tl.int64))
        counts = tl.load(sent + lanes, mask=lanes < WORLD_SIZE, other=0)
        wire_word = tl.load(sent + WORLD_SIZE)
        lines = address(table, COUNTS, members, WORLD_SIZE, tl.int64) + source * (WORLD_SIZE + 1)
        mask = present[:, None] & (lanes < WORLD_SIZE)[None, :]
        copies = counts[None, :] + tl.cast(local_ranks * 0, tl.int64)[:, None]
        tl.store(lines[:, None] + lanes[None, :], copies, mask=mask, cache_modifier=".wt")
        tl.store(lines + WORLD_SIZE, tl.cast(local_ranks * 0, tl.int64) + wire_word, mask=present, cache_modifier=".wt")


@portable(do_not_specialize=["num_chunks", "stride", "row_limit", "positions_per_rank", "rank"])
def forward_kernel(
    table, num_chunks, stride, row_limit, positions_per_rank, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    NODE_LANES: tl.constexpr, GPU_LANES: tl.constexpr, RINGS: tl.constexpr, HEAD_WORDS: tl.constexpr,
    ROW: tl.constexpr, SCALE_DTYPE: tl.constexpr, HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr,
    COUNT_LANES: tl.constexpr, POISON_LANES: tl.constexpr,
):  # fmt: skip
    """Copies what has come from all nodes to the ranks of this one, and raises the flags of the lines' sources there.

    Args:
        num_chunks: those of a step.
        stride, row_limit: as of dispatch_kernel. positions_per_rank, ROW: as of exchange_kernel.
    """
    NODES: tl.constexpr = RINGS[0]
    GPUS: tl.constexpr = RINGS[1]
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, out_of_order = begin_stage(table, DISPATCH_RECEIVE, WORLD_SIZE)
    answer = ask_poison(address(table, POISON, rank, WORLD_SIZE, tl.int32), POISON_LANES)
    poison = may_go_on(table, answer, 1, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    if poison == 0:
        # ranks of this node first: through them the counts of other nodes come
        _, poison = wait_counts(table, epoch, rank, WORLD_SIZE, COUNT_LANES, 1, GPUS)
    if poison == 0:
        _, poison = wait_counts(table, epoch, rank, WORLD_SIZE, COUNT_LANES, AFTER_HOST, 0)
    for unit in range(program, num_chunks * NODES, num_programs):
        if poison == 0:
            chunk, peer = unit // NODES, (rank // GPUS + unit) % NODES
            slot = chunk_of(table, CHUNKS, peer, chunk, num_chunks, rank, HEAD_WORDS, RINGS, WORLD_SIZE)
            copy_lines(
                table, slot, peer, chunk, stride, row_limit, positions_per_rank, rank, RINGS, ROW, SCALE_DTYPE, TOPK,
                TOPK_LANES, HAS_WEIGHTS, COMPACT, WORLD_SIZE, WORLD_LANES,
            )  # fmt: skip
    if poison != 0:
        late = (tl.arange(0, WORLD_LANES) == (poison & 0xFFFF)).to(tl.int32)
        fail(table, poison, 1, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
    is_last, any_poisoned = arrive_last(table, rank, num_programs, poison, WORLD_SIZE)
    if is_last:
        if not any_poisoned:
            nodes, local_ranks = tl.arange(0, NODE_LANES)[:, None], tl.arange(0, GPU_LANES)[None, :]
            present = (nodes < NODES) & (local_ranks < GPUS)
            members = (rank // GPUS) * GPUS + tl.where(present, local_ranks, 0)
            flags = address(table, DISPATCH_FLAGS, members, WORLD_SIZE, tl.int32) + nodes * GPUS + rank % GPUS
            tl.debug_barrier()
            tl.atomic_xchg(flags, members * 0 + epoch, mask=present, sem="release", scope="sys")


@portable(do_not_specialize=["num_chunks", "rank"])
def pack_sums_kernel(
    table, num_chunks, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    RINGS: tl.constexpr, HEAD_WORDS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    BACK_WORDS: tl.constexpr, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, QUANTIZED: tl.constexpr,
    SCALE_GROUP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, POISON_LANES: tl.constexpr,
):  # fmt: skip
    """Packs the sums of this node's results for what this rank has forwarded in the step.

    Args:
        num_chunks: those of a step.
        The others: as of return_kernel.
    """
    NODES: tl.constexpr = RINGS[0]
    GPUS: tl.constexpr = RINGS[1]
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, out_of_order = begin_stage(table, COMBINE_RECEIVE, WORLD_SIZE)
    answer = ask_poison(address(table, POISON, rank, WORLD_SIZE, tl.int32), POISON_LANES)
    poison = may_go_on(table, answer, 2, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    if poison == 0:
        poison = wait_all(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES, True, 1, GPUS)
    for unit in range(program, num_chunks * NODES, num_programs):
        if poison == 0:
            chunk, peer = unit // NODES, (rank // GPUS + unit) % NODES
            slot = chunk_of(table, CHUNKS_SENT_BACK, peer, chunk, num_chunks, rank, HEAD_WORDS, RINGS, WORLD_SIZE)
            add_ranks(
                table, slot, peer, chunk, rank, RINGS, TOPK, TOPK_LANES, HIDDEN, BLOCK, BACK_WORDS, DTYPE, ELEMENT,
                QUANTIZED, SCALE_GROUP, HAS_WEIGHTS, WORLD_SIZE,
            )  # fmt: skip
    if poison != 0:
        late = lanes_behind(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
        fail(table, poison, 2, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
    end_packing(table, CHUNKS_SENT_BACK, num_chunks, poison, rank, HEAD_WORDS, RINGS, WORLD_SIZE, WORLD_LANES)


@portable(do_not_specialize=["num_tokens", "num_chunks", "rank"], do_not_specialize_on_alignment=["ids"])
def sum_nodes_kernel(
    result, ids, bias_0, bias_1, table, num_tokens, num_chunks, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    RINGS: tl.constexpr, HEAD_WORDS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    BACK_WORDS: tl.constexpr, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    CHECK_INDICES: tl.constexpr, POISON_LANES: tl.constexpr,
):  # fmt: skip
    """Adds the nodes' sums of this rank's tokens, in ascending order of nodes.

    Args:
        num_chunks: those of a step.
        The others: as of return_kernel.
    """
    NODES: tl.constexpr = RINGS[0]
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, out_of_order = begin_stage(table, COMBINE_RECEIVE, WORLD_SIZE)
    answer = ask_poison(address(table, POISON, rank, WORLD_SIZE, tl.int32), POISON_LANES)
    poison = may_go_on(table, answer, 2, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    if poison == 0:
        poison = hear_peers(table, epoch, rank, WORLD_SIZE, WORLD_LANES, HAS_WEIGHTS, True, AFTER_COMBINING_HOST)
    for chunk in range(program, num_chunks, num_programs):
        if poison == 0:
            slots = ()
            for node in tl.static_range(NODES):
                slots = slots + (
                    chunk_of(table, CHUNKS_BACK, node, chunk, num_chunks, rank, HEAD_WORDS, RINGS, WORLD_SIZE),
                )  # fmt: skip
            add_nodes(
                table, slots, result, ids, bias_0, bias_1, num_tokens, chunk, 0, epoch, rank, RINGS, TOPK, TOPK_LANES,
                HIDDEN, BLOCK, BACK_WORDS, DTYPE, ELEMENT, HAS_WEIGHTS, CHECK_INDICES, WORLD_SIZE,
            )  # fmt: skip
        else:
            clear_results(result, num_tokens, chunk, RINGS, HIDDEN, BLOCK, DTYPE)
    if poison != 0:
        late = lanes_behind(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
        fail(table, poison, 2, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
    finish_stage(table, COMBINE_RECEIVE, program, num_programs, WORLD_SIZE)


@portable(do_not_specialize=["poison", "phase", "rank"])
def tell_failure_kernel(table, poison, phase, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """Records a failure that the host has found, and poisons the ranks of this node; one program."""
    epoch, _ = begin_stage(table, COMBINE_RECEIVE, WORLD_SIZE)
    # what a rank of this node has told before counts
    told = tl.atomic_cas(address(table, POISON, rank, WORLD_SIZE, tl.int32), 0, poison, sem="relaxed", scope="sys")
    poison = tl.where(told == 0, poison, told)
    late = (tl.arange(0, WORLD_LANES) == (poison & 0xFFFF)).to(tl.int32)
    fail(table, poison, phase, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
