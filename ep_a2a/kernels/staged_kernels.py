"""Kernels around the host's exchange between nodes: they pack lines before it, and unpack them behind it.

The chunks of rings (ring_shape.py) that a step sends to a node lie behind one another, behind a head with this rank's
counts, flags and failures. Dispatch:

- D1. number_rows_kernel (ring_dispatch_kernels.py) counts and numbers rows.
- D2. pack_kernel packs one line per token and node, then the heads.
- D3. The host exchanges heads and chunks with the ranks of the same local number.
- D4. pass_on_kernel passes the heads of other nodes on to the ranks of this node.
- D5. forward_kernel waits for all counts, copies the lines that have come to the ranks of this node, and raises flags.
- D6. A bulk_dispatch_kernel that only receives waits for the flags: its own D6.

Combine is the mirror image:

- C1, C2. offer_results_kernel (ring_offer_kernels.py) puts results where the ranks of this node read them.
- C3. pack_sums_kernel waits for the ranks of this node and packs the node's sums for what this rank has forwarded.
- C4. The host exchanges, as in D3. pass_on_kernel passes the heads on.
- C5. sum_nodes_kernel waits for all ranks and adds the nodes' sums of this rank's tokens.
- C6. A failed step gives zeros.

post_failure_kernel stands in for a kernel of D4 to C5 where the host's exchange has failed.

Lines that the host has exchanged are there, so no kernel waits for them. Kernels wait for ranks of their node, and for
lines that those have received.
"""

import triton.language as tl

from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels.combine_kernels import await_peers
from ep_a2a.kernels.layout import Region, Stage, StepPhase
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.receive_kernels import wait_counts
from ep_a2a.kernels.ring_combine_kernels import Results, add_nodes, add_ranks, clear_results
from ep_a2a.kernels.ring_forward_kernels import Places, copy_lines
from ep_a2a.kernels.ring_kernels import tokens_of_chunk, words_at
from ep_a2a.kernels.ring_send_kernels import Source, write_chunk
from ep_a2a.kernels.ring_shape import BACK, HeadMark
from ep_a2a.kernels.target import barrier

AFTER_HOST = tl.constexpr(2)
"""Timeouts that a kernel waits for a block that another rank's host exchanges; that rank names who is missing."""
AFTER_COMBINING_HOST = tl.constexpr(3)
"""The same in combine, where a host waits for two: for ranks that wait for others of their node first."""


@portable
def start_of(op, region: tl.constexpr, node, num_chunks, R: tl.constexpr):
    """Address (int64) of the head of the block to a node, or from it, in a step of so many chunks."""
    num_words = R.HEAD_WORDS + tl.cast(num_chunks, tl.int64) * R.SLOT_WORDS
    return tl.load(op.table + region * op.WORLD_SIZE + op.rank) + node * num_words * 4


@portable
def marks_of(start, op):
    """Pointer to the marks (HeadMark) of a head, behind its line of COUNTS."""
    return words_at(start, 2 * (op.WORLD_SIZE + 2), tl.int32)


@portable
def chunk_of(op, region: tl.constexpr, node, chunk, num_chunks, R: tl.constexpr):
    """Address (int64) of one of those chunks."""
    start = start_of(op, region, node, num_chunks, R)
    return start + R.HEAD_WORDS * 4 + tl.cast(chunk, tl.int64) * (R.SLOT_WORDS * 4)


@portable
def write_heads(op, region: tl.constexpr, num_chunks, poison, R: tl.constexpr):
    """Writes the head for every node: this rank's mirrors and its poison word."""
    # a whole line: ranks of several nodes are two at least
    lanes = tl.arange(0, 2 * op.WORLD_LANES)
    line = prim.address(op, Region.MIRROR_COUNTS, tl.int64) + op.rank * (op.WORLD_SIZE + 2)
    counts = tl.load(line + lanes, mask=lanes < op.WORLD_SIZE + 2, other=0)
    flag = tl.load(prim.address(op, Region.MIRROR_COMBINE_FLAGS, tl.int32) + op.rank)
    weights = tl.load(prim.address(op, Region.MIRROR_WEIGHT_EPOCHS, tl.int32) + op.rank)
    for node in range(R.NODES):
        start = start_of(op, region, node, num_chunks, R)
        words = start.to(tl.pointer_type(tl.int64))
        tl.store(words + lanes, counts, mask=lanes < op.WORLD_SIZE + 2)
        marks = marks_of(start, op)
        tl.store(marks + HeadMark.COMBINE_EPOCH, flag)
        tl.store(marks + HeadMark.WEIGHT_EPOCH, weights)
        tl.store(marks + HeadMark.POISON, poison)


@portable
def end_packing(op, region: tl.constexpr, num_chunks, poison, R: tl.constexpr):
    """Writes the heads in the program that is done last: chunks that a failed program left out must not pass for whole.

    Args:
        poison: this program's poison word.
    """
    is_last, any_poisoned = prim.arrive_last(op, tl.num_programs(0), poison)
    if is_last:
        written = tl.full((), 0, tl.int32)
        if any_poisoned:
            written += prim.poison_of(op)
        write_heads(op, region, num_chunks, written, R)


@portable(
    do_not_specialize=["num_tokens", "first_row", "num_chunks", "rank"],
    do_not_specialize_on_alignment=["scales", "weights", "ids"],
)
def pack_kernel(
    x, scales, weights, ids, table, num_tokens, first_row, num_chunks, rank,
    S: tl.constexpr, R: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr, POISON_LANES: tl.constexpr,
):  # fmt: skip
    """Packs this rank's block for each node, its own included: a line for each token, and the head.

    Args:
        x, scales, weights, ids, num_tokens, first_row: as of bulk_dispatch_kernel.
        num_chunks: those of a step.
        S: Shape. R: Ring of the way to experts. ROW: Row. LINE: Line. POISON_LANES: at least the program's threads.
    """
    op = OpContext(table, rank, S)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    _, poison = prim.begin_launch(op, Stage.DISPATCH_SEND, StepPhase.DISPATCH, POISON_LANES)
    source = Source(x, scales, weights, ids, num_tokens, first_row)
    for unit in range(program, num_chunks * R.NODES, num_programs):
        # D2
        if poison == 0:
            chunk, peer = unit // R.NODES, (rank // R.GPUS + unit) % R.NODES
            first, end = tokens_of_chunk(num_tokens, chunk, 0, R)
            slot = chunk_of(op, Region.STAGED_CHUNKS, peer, chunk, num_chunks, R)
            write_chunk(source, op, slot, first, end, peer, end >= first, R, ROW, LINE)
    # D2: the heads
    end_packing(op, Region.STAGED_CHUNKS, num_chunks, poison, R)
    prim.finish_stage(op, Stage.DISPATCH_SEND, program, num_programs)


@portable
def pass_on_flags(op, marks, members, present, source, HAS_WEIGHTS: tl.constexpr):
    """Raises the flags of rank `source` at those members of this node: it has begun its combine."""
    if HAS_WEIGHTS:
        epochs = prim.address_at(op, Region.WEIGHT_EPOCHS, members, tl.int32) + source
        tl.store(epochs, prim.full_like(members, tl.load(marks + HeadMark.WEIGHT_EPOCH)), mask=present)
    flags = prim.address_at(op, Region.COMBINE_FLAGS, members, tl.int32) + source
    epoch = prim.full_like(members, tl.load(marks + HeadMark.COMBINE_EPOCH))
    barrier()
    tl.atomic_xchg(flags, epoch, mask=present, sem="release", scope="sys")


@portable
def pass_on_counts(op, start, members, present, source):
    """Writes the counts of rank `source`, from the head at `start`, to those members of this node."""
    lanes, ends = tl.arange(0, op.WORLD_LANES), op.WORLD_SIZE + tl.arange(0, 2)
    sent = start.to(tl.pointer_type(tl.int64))
    counts = tl.load(sent + lanes, mask=lanes < op.WORLD_SIZE, other=0)
    last_words = tl.load(sent + ends)
    lines = prim.address_at(op, Region.COUNTS, members, tl.int64) + source * (op.WORLD_SIZE + 2)
    mask = present[:, None] & (lanes < op.WORLD_SIZE)[None, :]
    nothing = tl.cast(prim.full_like(members, 0), tl.int64)[:, None]
    tl.store(lines[:, None] + lanes[None, :], counts[None, :] + nothing, mask=mask, cache_modifier=".wt")
    mask = present[:, None] & (ends >= 0)[None, :]
    tl.store(lines[:, None] + ends[None, :], last_words[None, :] + nothing, mask=mask, cache_modifier=".wt")


@portable(do_not_specialize=["num_chunks", "rank"])
def pass_on_kernel(table, num_chunks, rank, S: tl.constexpr, R: tl.constexpr, HAS_WEIGHTS: tl.constexpr):
    """Passes the head of another node's rank on to the ranks of this node; a program for each other node.

    A failure is passed on alone. Else, on the way to experts, the rank's counts are; on the way back its combine flag,
    and the epoch of its weights if HAS_WEIGHTS.
    """
    op = OpContext(table, rank, S)
    # D4, C4
    node = (rank // R.GPUS + 1 + tl.program_id(0)) % R.NODES
    source = node * R.GPUS + rank % R.GPUS
    region: tl.constexpr = Region.CHUNKS_BACK if R.DIRECTION == BACK else Region.CHUNKS
    start = start_of(op, region, node, num_chunks, R)
    marks = marks_of(start, op)
    local_ranks = tl.arange(0, R.GPU_LANES)
    present = local_ranks < R.GPUS
    # compare-and-swap takes no mask: surplus lanes repeat this rank
    members = tl.where(present, (rank // R.GPUS) * R.GPUS + local_ranks, rank)
    poison = tl.load(marks + HeadMark.POISON)
    if poison != 0:
        words, unset = prim.address_at(op, Region.POISON, members, tl.int32), prim.full_like(members, 0)
        tl.atomic_cas(words, unset, prim.full_like(members, poison), sem="relaxed", scope="sys")
    elif R.DIRECTION == BACK:
        pass_on_flags(op, marks, members, present, source, HAS_WEIGHTS)
    else:
        pass_on_counts(op, start, members, present, source)


@portable
def raise_flags(op, R: tl.constexpr):
    """Raises the flags of all sources whose lines came through this rank, at the ranks of this node."""
    nodes, local_ranks = tl.arange(0, R.NODE_LANES)[:, None], tl.arange(0, R.GPU_LANES)[None, :]
    present = (nodes < R.NODES) & (local_ranks < R.GPUS)
    members = (op.rank // R.GPUS) * R.GPUS + tl.where(present, local_ranks, 0)
    flags = prim.address_at(op, Region.DISPATCH_FLAGS, members, tl.int32) + nodes * R.GPUS + op.rank % R.GPUS
    barrier()
    tl.atomic_xchg(flags, prim.full_like(members, prim.dispatch_flag(op)), mask=present, sem="release", scope="sys")


@portable(do_not_specialize=["num_chunks", "row_limit", "positions_per_rank", "rank"])
def forward_kernel(
    table, num_chunks, row_limit, positions_per_rank, rank,
    S: tl.constexpr, R: tl.constexpr, ROW: tl.constexpr, LINE: tl.constexpr, COUNT_LANES: tl.constexpr,
    POISON_LANES: tl.constexpr,
):  # fmt: skip
    """Copies what has come from all nodes to the ranks of this one, and raises the flags of the lines' sources there.

    Args:
        num_chunks: those of a step.
        row_limit: as of bulk_dispatch_kernel. positions_per_rank: as of exchange_kernel.
        S: Shape. R: Ring of the way to experts. ROW: Row. LINE: Line. COUNT_LANES, POISON_LANES: as in Exchange.
    """
    op = OpContext(table, rank, S)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, poison = prim.begin_launch(op, Stage.DISPATCH_RECEIVE, StepPhase.DISPATCH, POISON_LANES)
    places = Places(row_limit, positions_per_rank)
    # D5
    if poison == 0:
        _, poison = wait_counts(op, epoch, COUNT_LANES, op.COMPACT, 1, R.GPUS)
    # counts of other nodes come through ranks of this one, so that these are waited for first
    if poison == 0:
        _, poison = wait_counts(op, epoch, COUNT_LANES, op.COMPACT, AFTER_HOST, 0)
    for unit in range(program, num_chunks * R.NODES, num_programs):
        if poison == 0:
            chunk, peer = unit // R.NODES, (rank // R.GPUS + unit) % R.NODES
            slot = chunk_of(op, Region.CHUNKS, peer, chunk, num_chunks, R)
            copy_lines(op, slot, peer, chunk, places, R, ROW, LINE)
    if poison != 0:
        late = (tl.arange(0, S.WORLD_LANES) == (poison & 0xFFFF)).to(tl.int32)
        prim.fail(op, poison, StepPhase.DISPATCH, epoch, 0, late)
    is_last, any_poisoned = prim.arrive_last(op, num_programs, poison)
    if is_last & (any_poisoned == 0):
        raise_flags(op, R)


@portable(do_not_specialize=["num_chunks", "rank"])
def pack_sums_kernel(table, num_chunks, rank, S: tl.constexpr, R: tl.constexpr, A: tl.constexpr):
    """Packs the sums of this node's results for what this rank has forwarded in the step.

    Args:
        num_chunks: those of a step.
        S: Shape. R: Ring of the way back. A: NodeSums.
    """
    op = OpContext(table, rank, S)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, poison = prim.begin_launch(op, Stage.COMBINE_RECEIVE, StepPhase.COMBINE, A.POISON_LANES)
    # C3
    if poison == 0:
        poison = prim.wait_all(op, Region.COMBINE_FLAGS, epoch, True, 1, R.GPUS)
    for unit in range(program, num_chunks * R.NODES, num_programs):
        if poison == 0:
            chunk, peer = unit // R.NODES, (rank // R.GPUS + unit) % R.NODES
            slot = chunk_of(op, Region.CHUNKS_SENT_BACK, peer, chunk, num_chunks, R)
            add_ranks(op, slot, peer, chunk, R, A)
    if poison != 0:
        prim.fail_behind(op, poison, StepPhase.COMBINE, epoch, Region.COMBINE_FLAGS, epoch)
    end_packing(op, Region.CHUNKS_SENT_BACK, num_chunks, poison, R)


@portable(do_not_specialize=["num_tokens", "num_chunks", "rank"], do_not_specialize_on_alignment=["ids"])
def sum_nodes_kernel(
    result, ids, bias_0, bias_1, table, num_tokens, num_chunks, rank,
    S: tl.constexpr, R: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Adds the nodes' sums of this rank's tokens, in ascending order of nodes.

    Args:
        result, ids, bias_0, bias_1: as of return_kernel.
        num_chunks: those of a step.
        S: Shape. R: Ring of the way back. A: NodeSums.
    """
    op = OpContext(table, rank, S)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, poison = prim.begin_launch(op, Stage.COMBINE_RECEIVE, StepPhase.COMBINE, A.POISON_LANES)
    out = Results(op, result, ids, num_tokens, epoch)
    # C5
    if poison == 0:
        poison = await_peers(op, epoch, epoch, A.HAS_WEIGHTS, True, AFTER_COMBINING_HOST)
    for chunk in range(program, num_chunks, num_programs):
        if poison == 0:
            slots = ()
            for node in tl.static_range(R.NODES):
                slots = slots + (chunk_of(op, Region.CHUNKS_BACK, node, chunk, num_chunks, R),)
            add_nodes(out, slots, bias_0, bias_1, chunk, 0, R, A)
        else:
            # C6
            clear_results(result, num_tokens, chunk, R, A)
    if poison != 0:
        prim.fail_behind(op, poison, StepPhase.COMBINE, epoch, Region.COMBINE_FLAGS, epoch)
    prim.finish_stage(op, Stage.COMBINE_RECEIVE, program, num_programs)


@portable(do_not_specialize=["poison", "phase", "rank"])
def post_failure_kernel(table, poison, phase, rank, S: tl.constexpr):
    """Records a failure that the host has found, and poisons the ranks of this node; one program."""
    op = OpContext(table, rank, S)
    epoch, _ = prim.begin_stage(op, Stage.COMBINE_RECEIVE)
    # an earlier failure, which a rank of this node has posted, takes precedence
    posted = tl.atomic_cas(prim.address(op, Region.POISON, tl.int32), 0, poison, sem="relaxed", scope="sys")
    poison = tl.where(posted == 0, poison, posted)
    late = (tl.arange(0, S.WORLD_LANES) == (poison & 0xFFFF)).to(tl.int32)
    prim.fail(op, poison, phase, epoch, 0, late)
