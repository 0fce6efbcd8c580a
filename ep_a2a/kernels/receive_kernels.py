"""Device helpers about received rows: how many there are, where they begin, and the rows that hold no token."""

import triton.language as tl

from ep_a2a.kernels.layout import Region, State
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import STATE, address, post_all, reduce_max, reduce_sum

COUNT_FLAGS = tl.constexpr(Region.COUNT_FLAGS.value)
COUNTS = tl.constexpr(Region.COUNTS.value)
INDICES = tl.constexpr(Region.INDICES.value)
RECV_COUNTS = tl.constexpr(Region.RECV_COUNTS.value)
LAST_PAD_ID = tl.constexpr(State.LAST_PAD_ID.value)
LAST_STRIDE = tl.constexpr(State.LAST_STRIDE.value)

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
    table, epoch, rank, old_counts, old_stride, old_pad_id, new_counts, stride, pad_id, num_region_rows,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    COMPACT: tl.constexpr,
):  # fmt: skip
    """Gives `pad_id` to the rows that the previous step filled and this one did not; all others carry it already.

    The work is proportional to the rows of the previous step, and to all rows only when pad_id changes.
    """
    state = address(table, STATE, rank, WORLD_SIZE, tl.int32)
    ids = address(table, INDICES, rank, WORLD_SIZE, tl.int32)
    lanes = tl.arange(0, WORLD_LANES)
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
