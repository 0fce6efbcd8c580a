"""IntraNode dispatch: one launch that routes, optionally casts to fp8, and writes every row where its expert reads it.

Each program owns a contiguous chunk of this rank's tokens, so that row numbers follow from a prefix count and rows
land in (source rank, source token) order. The last program to finish tells the peers and waits for them.
"""

import triton.language as tl

from ep_a2a.kernels.layout import Region, State
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    ALTERNATION,
    CAPACITY,
    DISPATCHED,
    IDLE,
    NOBODY,
    STATE,
    STRIDE_MISMATCH,
    address,
    arrive_last,
    fail,
    lanes_behind,
    next_epoch,
    poison_of,
    post_all,
    reduce_max,
    reduce_sum,
    wait_all,
)
from ep_a2a.kernels.receive_kernels import counts_of, pad_unused_rows, post_counts, rows_before
from ep_a2a.kernels.routing_kernels import count_rows, record_routes
from ep_a2a.kernels.send_kernels import rows_of, send_line, send_payload, send_quantized, targets_of

COUNT_FLAGS = tl.constexpr(Region.COUNT_FLAGS.value)
DISPATCH_FLAGS = tl.constexpr(Region.DISPATCH_FLAGS.value)
INDICES = tl.constexpr(Region.INDICES.value)
SOURCE_POSITIONS = tl.constexpr(Region.SOURCE_POSITIONS.value)
SCALES = tl.constexpr(Region.SCALES.value)
WEIGHTS = tl.constexpr(Region.WEIGHTS.value)
ROUTES = tl.constexpr(Region.ROUTES.value)
SENT_INDICES = tl.constexpr(Region.SENT_INDICES.value)
RECV_COUNTS = tl.constexpr(Region.RECV_COUNTS.value)
TOTAL_RECV = tl.constexpr(Region.TOTAL_RECV.value)
DISPATCH_EPOCH = tl.constexpr(State.DISPATCH_EPOCH.value)
PHASE = tl.constexpr(State.PHASE.value)
LAST_PAD_ID = tl.constexpr(State.LAST_PAD_ID.value)
LAST_STRIDE = tl.constexpr(State.LAST_STRIDE.value)


@portable
def finish_dispatch(
    table, any_poisoned, epoch, stride, wire_word, pad_id, row_limit, num_region_rows, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    COMPACT: tl.constexpr,
):  # fmt: skip
    """The last program's part: tell the peers that all rows are there, wait for theirs, publish the counts."""
    state = address(table, STATE, rank, WORLD_SIZE, tl.int32)
    lanes = tl.arange(0, WORLD_LANES)
    present = lanes < WORLD_SIZE
    # what the previous step left, loaded while the peers are still sending
    old_counts = tl.load(address(table, RECV_COUNTS, rank, WORLD_SIZE, tl.int32) + lanes, mask=present, other=0)
    old_stride = tl.load(state + LAST_STRIDE)
    old_pad_id = tl.load(state + LAST_PAD_ID)
    poison = tl.full((), 0, tl.int32)
    if any_poisoned:
        # a program left its rows unsent, so this step must not look complete to anyone
        poison += poison_of(table, rank, WORLD_SIZE)
    else:
        post_all(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
        poison = wait_all(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
    counts = tl.full((WORLD_LANES,), 0, tl.int32)
    if poison == 0:
        lines = counts_of(table, rank, epoch, WORLD_SIZE) + lanes * (WORLD_SIZE + 1)
        counts = tl.load(lines + rank, mask=present, other=0, volatile=True)
        words = tl.load(lines + WORLD_SIZE, mask=present, other=0, volatile=True)
        differs = ((words != wire_word) & present).to(tl.int32)
        if reduce_max(differs, 0) > 0:
            poison = tl.full((), (STRIDE_MISMATCH << 16) | NOBODY, tl.int32)
            fail(table, poison, 1, epoch, wire_word, words, rank, WORLD_SIZE, WORLD_LANES)
    if poison == 0:
        total = reduce_sum(counts, 0)
        if total > row_limit:
            poison = (CAPACITY << 16) | rank
            fail(table, poison, 1, epoch, total, counts, rank, WORLD_SIZE, WORLD_LANES)
        else:
            pad_unused_rows(
                table, epoch, rank, old_counts, old_stride, old_pad_id, counts, stride, pad_id, num_region_rows,
                TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, COMPACT,
            )  # fmt: skip
            # every thread has read the previous counts before they are replaced
            tl.debug_barrier()
            tl.store(address(table, RECV_COUNTS, rank, WORLD_SIZE, tl.int32) + lanes, counts, mask=present)
            tl.store(address(table, TOTAL_RECV, rank, WORLD_SIZE, tl.int32), total)
            tl.store(state + PHASE, DISPATCHED)
    if poison != 0:
        late = lanes_behind(table, DISPATCH_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
        fail(table, poison, 1, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
        tl.store(address(table, RECV_COUNTS, rank, WORLD_SIZE, tl.int32) + lanes, lanes * 0, mask=present)
        tl.store(address(table, TOTAL_RECV, rank, WORLD_SIZE, tl.int32), 0)
    tl.store(state + DISPATCH_EPOCH, epoch)


@portable(
    do_not_specialize=[
        "num_tokens", "stride", "wire_word", "pad_id", "row_limit", "num_region_rows", "first_position", "rank",
    ],
    do_not_specialize_on_alignment=["scales", "weights", "ids"],
)  # fmt: skip
def dispatch_kernel(
    x, scales, weights, ids, table, num_tokens, stride, wire_word, pad_id, row_limit, num_region_rows,
    first_position, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    SCALE_WIDTH: tl.constexpr, SCALE_LANES: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    GROUP: tl.constexpr, GROUP_LANES: tl.constexpr, GROUPS_LANES: tl.constexpr, UE8M0: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Dispatch of one step.

    Args:
        x: [num_tokens, row] as 4-byte words, or as elements when GROUP > 0 asks for the fp8 cast.
        scales: [num_tokens, SCALE_WIDTH] of SCALE_DTYPE, when SCALE_WIDTH > 0.
        weights: [num_tokens, TOPK] float32 when HAS_WEIGHTS; ids: [num_tokens, TOPK] int32.
        table: addresses, see kernels/layout.py.
        stride: max_num_tokens, rows per source in layout rank_major; the same on all ranks.
        wire_word: stride and wire format of this step, compared with every peer's.
        pad_id: id of rows without a token.
        row_limit: rows that a rank may receive this step; num_region_rows: rows of the regions.
        first_position: source position of this rank's token 0, rank * W * M.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    state = address(table, STATE, rank, WORLD_SIZE, tl.int32)
    epoch = next_epoch(state + DISPATCH_EPOCH)
    # loaded before the atomic, so that the two are in flight together
    phase = tl.load(state + PHASE)
    poison = poison_of(table, rank, WORLD_SIZE)
    if (poison == 0) & (phase != IDLE):
        poison = (ALTERNATION << 16) | rank
        fail(table, poison, 1, epoch, 0, tl.arange(0, WORLD_LANES) * 0, rank, WORLD_SIZE, WORLD_LANES)
    chunk = (num_tokens + num_programs - 1) // num_programs
    first = tl.minimum(program * chunk, num_tokens)
    last = tl.minimum(first + chunk, num_tokens)
    routes = address(table, ROUTES, rank, WORLD_SIZE, tl.int32)
    sent_ids = address(table, SENT_INDICES, rank, WORLD_SIZE, tl.int32)
    next_row = tl.full((WORLD_LANES,), 0, tl.int32)
    if poison == 0:
        if program == 0:
            all_counts = count_rows(ids, 0, num_tokens, TOPK, NUM_EXPERTS, WORLD_SIZE, WORLD_LANES, BLOCK_TOKENS)
            post_counts(table, all_counts, wire_word, epoch, rank, WORLD_SIZE, WORLD_LANES, COMPACT)
        next_row = count_rows(ids, 0, first, TOPK, NUM_EXPERTS, WORLD_SIZE, WORLD_LANES, BLOCK_TOKENS)
        if COMPACT:
            poison = wait_all(table, COUNT_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
            if poison == 0:
                next_row += rows_before(table, epoch, rank, WORLD_SIZE, WORLD_LANES)
        else:
            next_row += rank * stride
    if poison == 0:
        # rank_major may run past its own block only if a rank brought more than stride tokens, which the host refuses
        record_routes(
            routes, sent_ids, ids, first, last, next_row, row_limit,
            TOPK, NUM_EXPERTS, WORLD_SIZE, WORLD_LANES, BLOCK_TOKENS,
        )  # fmt: skip
        tl.debug_barrier()
        for token in range(first, last):
            rows = rows_of(routes, token, rank, WORLD_SIZE)
            if GROUP > 0:
                send_quantized(
                    x, table, token, rows, rank, WORLD_SIZE, ROW_WORDS * 4, GROUP, GROUP_LANES, GROUPS_LANES, UE8M0
                )
            else:
                send_payload(x, table, token, rows, rank, WORLD_SIZE, ROW_WORDS, BLOCK_WORDS)
            if SCALE_WIDTH > 0:
                send_line(scales, table, SCALES, token, rows, rank, WORLD_SIZE, SCALE_WIDTH, SCALE_LANES, SCALE_DTYPE)
            if HAS_WEIGHTS:
                send_line(weights, table, WEIGHTS, token, rows, rank, WORLD_SIZE, TOPK, TOPK_LANES, tl.float32)
            send_line(ids, table, INDICES, token, rows, rank, WORLD_SIZE, TOPK, TOPK_LANES, tl.int32)
            positions = targets_of(table, SOURCE_POSITIONS, rows, rank, 1, WORLD_SIZE, tl.int32)
            for step in tl.static_range(WORLD_SIZE):
                if rows[step] >= 0:
                    tl.store(positions[step], first_position + token)
    last, any_poisoned = arrive_last(table, rank, num_programs, poison, WORLD_SIZE)
    if last:
        finish_dispatch(
            table, any_poisoned, epoch, stride, wire_word, pad_id, row_limit, num_region_rows, rank,
            TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, COMPACT,
        )  # fmt: skip
