"""IntraNode dispatch: one launch that routes, optionally casts to fp8, and writes every row where its expert reads it.

Each program owns a contiguous chunk of this rank's tokens, so that row numbers follow from a prefix count and rows
land in (source rank, source token) order. The last program to finish tells the peers and waits for them.
"""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import quantize_tile
from ep_a2a.kernels.layout import Region, State
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    ALTERNATION,
    CAPACITY,
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
from ep_a2a.kernels.routing_kernels import count_rows, record_routes

COUNT_FLAGS = tl.constexpr(Region.COUNT_FLAGS.value)
DISPATCH_FLAGS = tl.constexpr(Region.DISPATCH_FLAGS.value)
COUNTS = tl.constexpr(Region.COUNTS.value)
INDICES = tl.constexpr(Region.INDICES.value)
SOURCE_POSITIONS = tl.constexpr(Region.SOURCE_POSITIONS.value)
TOKENS = tl.constexpr(Region.TOKENS.value)
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

IDLE = tl.constexpr(0)
DISPATCHED = tl.constexpr(1)
PAD_ROWS = tl.constexpr(64)
BLOCK_PAD_ROWS = tl.constexpr(16)


@portable
def counts_of(table, rank, epoch, WORLD_SIZE: tl.constexpr):
    """Pointer to the count matrix [source, W + 1] that belongs to an epoch, at `rank` (which may be a vector)."""
    return address(table, COUNTS, rank, WORLD_SIZE, tl.int32) + (epoch & 1) * (WORLD_SIZE * (WORLD_SIZE + 1))


@portable
def post_counts(
    table, counts, wire_word, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, COMPACT: tl.constexpr
):
    """Tells every rank how many rows this rank sends to each rank, and what it believes all ranks agree on.

    Layout compact waits for the counts before it sends; otherwise they are ordered by the flags of the whole dispatch.
    """
    lanes = tl.arange(0, WORLD_LANES)
    present = lanes < WORLD_SIZE
    for peer in range(WORLD_SIZE):
        line = counts_of(table, peer, epoch, WORLD_SIZE) + rank * (WORLD_SIZE + 1)
        tl.store(line + lanes, counts, mask=present)
        tl.store(line + WORLD_SIZE, wire_word)
    if COMPACT:
        post_all(table, COUNT_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)


@portable
def rows_before(table, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """[WORLD_LANES]: at each destination, the rows of all sources below this rank (layout compact)."""
    lanes = tl.arange(0, WORLD_LANES)
    matrix = counts_of(table, rank, epoch, WORLD_SIZE) + lanes[:, None] * (WORLD_SIZE + 1) + lanes[None, :]
    mask = (lanes < rank)[:, None] & (lanes < WORLD_SIZE)[None, :]
    return reduce_sum(tl.load(matrix, mask=mask, other=0, volatile=True), 0)


@portable
def send_payload(
    x, table, routes, token, rank, WORLD_SIZE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr
):
    """Copies one token's row as 4-byte words to every rank it goes to; each word is read once."""
    for first_word in tl.static_range(0, ROW_WORDS, BLOCK_WORDS):
        words = first_word + tl.arange(0, BLOCK_WORDS)
        source = tl.multiple_of(x + tl.cast(token, tl.int64) * ROW_WORDS, 16)
        data = tl.load(source + words, mask=words < ROW_WORDS)
        for step in range(WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            row = tl.load(routes + tl.cast(token, tl.int64) * WORLD_SIZE + peer)
            if row >= 0:
                target = address(table, TOKENS, peer, WORLD_SIZE, tl.int32) + tl.cast(row, tl.int64) * ROW_WORDS
                tl.store(tl.multiple_of(target, 16) + words, data, mask=words < ROW_WORDS)


@portable
def send_quantized(
    x, table, routes, token, rank, WORLD_SIZE: tl.constexpr, HIDDEN: tl.constexpr,
    GROUP: tl.constexpr, GROUP_LANES: tl.constexpr, GROUPS_LANES: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    """Casts one token's row to fp8 and writes bytes and scales to every rank it goes to."""
    groups = tl.arange(0, GROUPS_LANES)
    elements = tl.arange(0, GROUP_LANES)
    num_groups: tl.constexpr = HIDDEN // GROUP
    offsets = groups[:, None] * GROUP + elements[None, :]
    mask = (groups < num_groups)[:, None] & (elements < GROUP)[None, :]
    row_start = tl.multiple_of(x + tl.cast(token, tl.int64) * HIDDEN, 16)
    bits, scale_bits = quantize_tile(tl.load(row_start + offsets, mask=mask, other=0.0).to(tl.float32), UE8M0)
    for step in range(WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        row = tl.load(routes + tl.cast(token, tl.int64) * WORLD_SIZE + peer)
        if row >= 0:
            target = address(table, TOKENS, peer, WORLD_SIZE, tl.uint8) + tl.cast(row, tl.int64) * HIDDEN
            tl.store(tl.multiple_of(target, 16) + offsets, bits, mask=mask)
            if UE8M0:
                scales = address(table, SCALES, peer, WORLD_SIZE, tl.uint8) + tl.cast(row, tl.int64) * num_groups
                tl.store(scales + groups, (scale_bits >> 23).to(tl.uint8), mask=groups < num_groups)
            else:
                scales = address(table, SCALES, peer, WORLD_SIZE, tl.int32) + tl.cast(row, tl.int64) * num_groups
                tl.store(scales + groups, scale_bits, mask=groups < num_groups)


@portable
def send_row_data(
    source, table, region: tl.constexpr, token, peer, row,
    WORLD_SIZE: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Copies one token's line of `source` [T, WIDTH] to a row of a region at a peer."""
    lanes = tl.arange(0, LANES)
    values = tl.load(source + tl.cast(token, tl.int64) * WIDTH + lanes, mask=lanes < WIDTH)
    target = address(table, region, peer, WORLD_SIZE, DTYPE) + tl.cast(row, tl.int64) * WIDTH
    tl.store(target + lanes, values, mask=lanes < WIDTH)


@portable
def pad_all_rows(ids, first, num_rows, pad_id, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr):
    """Gives `pad_id` to rows first ... num_rows - 1."""
    slots = tl.arange(0, TOPK_LANES)
    values = tl.full((PAD_ROWS, TOPK_LANES), 0, tl.int32) + pad_id
    for start in range(first, num_rows, PAD_ROWS):
        rows = start + tl.arange(0, PAD_ROWS)
        where = tl.cast(rows, tl.int64)[:, None] * TOPK + slots[None, :]
        tl.store(ids + where, values, mask=(rows < num_rows)[:, None] & (slots < TOPK)[None, :])


@portable
def pad_unused_rows(
    table, epoch, rank, new_counts, stride, pad_id, num_region_rows,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    COMPACT: tl.constexpr,
):  # fmt: skip
    """Gives `pad_id` to the rows that the previous step filled and this one did not; all others carry it already.

    The work is proportional to the rows of the previous step, and to all rows only when pad_id changes.
    """
    state = address(table, STATE, rank, WORLD_SIZE, tl.int32)
    ids = address(table, INDICES, rank, WORLD_SIZE, tl.int32)
    lanes = tl.arange(0, WORLD_LANES)
    old_counts = tl.load(
        address(table, RECV_COUNTS, rank, WORLD_SIZE, tl.int32) + lanes, mask=lanes < WORLD_SIZE, other=0
    )
    old_stride = tl.load(state + LAST_STRIDE)
    old_pad_id = tl.load(state + LAST_PAD_ID)
    if COMPACT:
        first, last = reduce_sum(new_counts, 0), reduce_sum(old_counts, 0)
        if old_pad_id != pad_id:
            last = num_region_rows + 0
        pad_all_rows(ids, first, last, pad_id, TOPK, TOPK_LANES)
    else:
        if (old_pad_id != pad_id) | (old_stride != stride):
            # rows lie elsewhere now: pad all that were used, but for the rows that this step has filled
            for block in range(WORLD_SIZE):
                pad_block_rows(
                    table, ids, epoch, rank, block, old_counts, old_stride, old_pad_id != pad_id, stride, pad_id,
                    num_region_rows, TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES,
                )  # fmt: skip
        else:
            # one block per source, all at once: steps of equal counts, the common case, have nothing to do
            num_left = reduce_max(old_counts - new_counts, 0)
            slots = tl.arange(0, TOPK_LANES)
            for offset in range(0, num_left, BLOCK_PAD_ROWS):
                index = new_counts[:, None] + offset + tl.arange(0, BLOCK_PAD_ROWS)[None, :]
                rows = lanes[:, None] * stride + index
                where = tl.cast(rows, tl.int64)[:, :, None] * TOPK + slots[None, None, :]
                inside = (index < old_counts[:, None])[:, :, None] & (slots < TOPK)[None, None, :]
                tl.store(
                    ids + where, tl.full((WORLD_LANES, BLOCK_PAD_ROWS, TOPK_LANES), 0, tl.int32) + pad_id, mask=inside
                )
    tl.store(state + LAST_PAD_ID, pad_id)
    tl.store(state + LAST_STRIDE, stride)


@portable
def pad_block_rows(
    table, ids, epoch, rank, block, old_counts, old_stride, all_rows, stride, pad_id, num_region_rows,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
):  # fmt: skip
    """Pads one source's rows of the previous step, or a W-th of all rows, where this step has put no token."""
    lanes, slots = tl.arange(0, WORLD_LANES), tl.arange(0, TOPK_LANES)
    share = num_region_rows // WORLD_SIZE
    first = tl.where(all_rows, block * share, block * old_stride)
    count = tl.where(all_rows, share, reduce_sum(tl.where(lanes == block, old_counts, 0), 0))
    lines = counts_of(table, rank, epoch, WORLD_SIZE) + rank
    for offset in range(0, count, PAD_ROWS):
        index = offset + tl.arange(0, PAD_ROWS)
        rows = first + index
        source = rows // stride
        filled = tl.load(lines + source * (WORLD_SIZE + 1), mask=source < WORLD_SIZE, other=0)
        unused = (index < count) & (rows % stride >= filled)
        where = tl.cast(rows, tl.int64)[:, None] * TOPK + slots[None, :]
        values = tl.full((PAD_ROWS, TOPK_LANES), 0, tl.int32) + pad_id
        tl.store(ids + where, values, mask=unused[:, None] & (slots < TOPK)[None, :])


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
                table, epoch, rank, counts, stride, pad_id, num_region_rows,
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
    poison = poison_of(table, rank, WORLD_SIZE)
    if (poison == 0) & (tl.load(state + PHASE) != IDLE):
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
            if GROUP > 0:
                send_quantized(
                    x, table, routes, token, rank, WORLD_SIZE, ROW_WORDS * 4, GROUP, GROUP_LANES, GROUPS_LANES, UE8M0
                )
            else:
                send_payload(x, table, routes, token, rank, WORLD_SIZE, ROW_WORDS, BLOCK_WORDS)
            for step in range(WORLD_SIZE):
                peer = (rank + step) % WORLD_SIZE
                row = tl.load(routes + tl.cast(token, tl.int64) * WORLD_SIZE + peer)
                if row >= 0:
                    if SCALE_WIDTH > 0:
                        send_row_data(
                            scales, table, SCALES, token, peer, row, WORLD_SIZE, SCALE_WIDTH, SCALE_LANES, SCALE_DTYPE
                        )
                    if HAS_WEIGHTS:
                        send_row_data(
                            weights, table, WEIGHTS, token, peer, row, WORLD_SIZE, TOPK, TOPK_LANES, tl.float32
                        )
                    send_row_data(ids, table, INDICES, token, peer, row, WORLD_SIZE, TOPK, TOPK_LANES, tl.int32)
                    positions = address(table, SOURCE_POSITIONS, peer, WORLD_SIZE, tl.int32)
                    tl.store(positions + row, first_position + token)
    last, any_poisoned = arrive_last(table, rank, num_programs, poison, WORLD_SIZE)
    if last:
        finish_dispatch(
            table, any_poisoned, epoch, stride, wire_word, pad_id, row_limit, num_region_rows, rank,
            TOPK, TOPK_LANES, WORLD_SIZE, WORLD_LANES, COMPACT,
        )  # fmt: skip


@portable(do_not_specialize=["rank", "stride", "first_expert"], do_not_specialize_on_alignment=["counts_out"])
def count_local_experts_kernel(
    table, rank, stride, first_expert, counts_out,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    COMPACT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """counts_out[e] = rows received with an id of this rank's expert e; one program per expert."""
    expert = first_expert + tl.program_id(0)
    ids = address(table, INDICES, rank, WORLD_SIZE, tl.int32)
    counts = address(table, RECV_COUNTS, rank, WORLD_SIZE, tl.int32)
    slots = tl.arange(0, TOPK_LANES)
    found = tl.full((BLOCK_ROWS, TOPK_LANES), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    for source in range(WORLD_SIZE):
        count = tl.load(counts + source)
        if not COMPACT:
            start = source * stride
        for offset in range(0, count, BLOCK_ROWS):
            rows = offset + tl.arange(0, BLOCK_ROWS)
            mask = (rows < count)[:, None] & (slots < TOPK)[None, :]
            where = tl.cast(start + rows, tl.int64)[:, None] * TOPK + slots[None, :]
            values = tl.load(ids + where, mask=mask, other=-1)
            found += (values == expert).to(tl.int32)
        start += count
    tl.store(counts_out + tl.program_id(0), reduce_sum(reduce_sum(found, 1), 0))
