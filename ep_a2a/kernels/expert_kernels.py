"""Layout expert_major: local launches behind dispatch and before combine. Nothing here reaches other ranks.

On the wire a token travels once per rank, as in layout rank_major, and the received rows lie by source. The steps:

- E1. Behind dispatch number_expert_rows_kernel gives every local expert of a received row a row in the expert's block.
- E2. expand_kernel copies each received row, its scales and weights to its experts' rows.
- E3. expand_kernel writes zeros behind each expert's rows, up to the alignment.
- E4. Before combine reduce_experts_kernel adds the experts' results for a received row, each times its weight.

An id that is repeated within a token has one row, which counts with the sum of its weights: a block has room for each
token once. All work is bounded by received counts that are read on the device.
"""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import round_to
from ep_a2a.kernels.layout import Region, Span, State
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import address, full_like, reduce_max, reduce_sum, running_sum
from ep_a2a.kernels.span_kernels import note_span


@portable
def received_of(op):
    """By source [WORLD_LANES]: the numbers of its first row and behind its last one, and how far behind they lie."""
    lanes = tl.arange(0, op.WORLD_LANES)
    received = address(op, Region.RECV_COUNTS, tl.int32) + lanes
    counts = tl.load(received, mask=lanes < op.WORLD_SIZE, other=0)
    starts = tl.load(received + op.WORLD_SIZE, mask=lanes < op.WORLD_SIZE, other=0)
    ends = running_sum(counts, 0)
    return ends - counts, ends, starts - (ends - counts)


@portable
def row_of(index, received):
    """Where the received row number `index` lies. received: from received_of."""
    firsts, ends, behind = received
    number = full_like(firsts, index)
    return index + reduce_sum(tl.where((number >= firsts) & (number < ends), behind, 0), 0)


@portable
def rows_of(index, op):
    """row_of for a vector: a loop, since all sources beside many rows would not fit into registers."""
    received = address(op, Region.RECV_COUNTS, tl.int32)
    rows = index + 0
    end = tl.full((), 0, tl.int32)
    for source in range(op.WORLD_SIZE - 1):
        end += tl.load(received + source)
        rows = tl.where(index >= end, tl.load(received + op.WORLD_SIZE + source + 1) + index - end, rows)
    return rows


@portable
def topk_of(values, row, TOPK: tl.constexpr):
    """A row's line of a region [rows, TOPK] as a tuple."""
    line = values + tl.cast(row, tl.int64) * TOPK
    found = ()
    for k in tl.static_range(TOPK):
        found = found + (tl.load(line + k),)
    return found


@portable(do_not_specialize=["block_rows", "rank", "first_expert", "num_local_experts"])
def number_expert_rows_kernel(
    table, block_rows, rank, first_expert, num_local_experts,
    S: tl.constexpr, BLOCK_ROWS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """EXPERT_SLOTS and EXPERT_RECV_COUNT of one step, one program per local expert.

    Each program looks at all received rows in order, so that an expert's rows are numbered by (source, token). Slots
    are rows of [num_local_experts, block_rows], and -1 where the id is none of this rank's.

    Args:
        block_rows: rows for each expert, R. first_expert: id of this rank's expert 0.
        BLOCK_ROWS: received rows looked at at once.
        SPANS: programs note when they begin and end, here and below.
    """
    op = OpContext(table, rank, S)
    # E1
    note_span(SPANS, op, begun=Span.NUMBER_ROWS)
    expert = tl.program_id(0)
    ids = tl.multiple_of(address(op, Region.INDICES, tl.int32), 16)
    slots_out = address(op, Region.EXPERT_SLOTS, tl.int32)
    total = tl.load(address(op, Region.TOTAL_RECV, tl.int32))
    topk = tl.arange(0, S.TOPK_LANES)
    next_slot = expert * block_rows
    found = tl.full((), 0, tl.int32)
    for start in range(0, total, BLOCK_ROWS):
        index = start + tl.arange(0, BLOCK_ROWS)
        rows = rows_of(index, op)
        where = tl.cast(rows, tl.int64)[:, None] * S.TOPK + topk[None, :]
        inside = (index < total)[:, None] & (topk < S.TOPK)[None, :]
        local = tl.load(ids + where, mask=inside, other=-1) - first_expert
        hits = (local == expert) & inside
        has_row = reduce_max(hits.to(tl.int32), 1)
        slots = next_slot + found + running_sum(has_row, 0) - has_row
        tl.store(slots_out + where, slots[:, None] + full_like(topk, 0)[None, :], mask=hits)
        if expert == 0:
            elsewhere = (local < 0) | (local >= num_local_experts)
            tl.store(slots_out + where, tl.full((BLOCK_ROWS, S.TOPK_LANES), -1, tl.int32), mask=inside & elsewhere)
        found += reduce_sum(has_row, 0)
    tl.store(address(op, Region.EXPERT_RECV_COUNT, tl.int32) + expert, found)
    note_span(SPANS, op, ended=Span.NUMBER_ROWS)


@portable
def copy_words(op, row, slots, first, E: tl.constexpr):
    """Copies the words of a received row from `first` on, a block of them, to all its experts' rows."""
    offsets = first + tl.arange(0, E.BLOCK_WORDS)
    source = address(op, Region.TOKENS, tl.int32) + tl.cast(row, tl.int64) * E.ROW_WORDS
    words = tl.load(tl.multiple_of(source, 16) + offsets, mask=offsets < E.ROW_WORDS, other=0)
    targets = address(op, Region.EXPERT_ROWS, tl.int32)
    for k in tl.static_range(op.TOPK):
        if slots[k] >= 0:
            target = targets + tl.cast(slots[k], tl.int64) * E.ROW_WORDS
            tl.store(tl.multiple_of(target, 16) + offsets, words, mask=offsets < E.ROW_WORDS)


@portable
def scales_at(op, slot, block_rows, E: tl.constexpr):
    """Where an expert's row has its scales: pointers [SCALE_LANES]."""
    lanes = tl.arange(0, E.SCALE_LANES)
    base = address(op, Region.EXPERT_SCALES, E.SCALE_DTYPE)
    if E.COLUMN_MULTIPLE > 0:
        stride = (block_rows + (E.COLUMN_MULTIPLE - 1)) // E.COLUMN_MULTIPLE * E.COLUMN_MULTIPLE
        columns = tl.cast(slot // block_rows, tl.int64) * E.SCALE_WIDTH + lanes
        places = base + columns * stride + slot % block_rows
    else:
        places = base + tl.cast(slot, tl.int64) * E.SCALE_WIDTH + lanes
    return places


@portable
def copy_scales(op, row, slots, block_rows, E: tl.constexpr):
    """Copies the scales of a received row to all its experts' rows."""
    lanes = tl.arange(0, E.SCALE_LANES)
    source = address(op, Region.SCALES, E.SCALE_DTYPE) + tl.cast(row, tl.int64) * E.SCALE_WIDTH
    scales = tl.load(source + lanes, mask=lanes < E.SCALE_WIDTH, other=0)
    for k in tl.static_range(op.TOPK):
        if slots[k] >= 0:
            tl.store(scales_at(op, slots[k], block_rows, E), scales, mask=lanes < E.SCALE_WIDTH)


@portable
def place_weights(op, row, slots):
    """Writes the weight of each of a received row's expert rows: the sum over the ids that name the expert."""
    topk = tl.arange(0, op.TOPK_LANES)
    slots_at = address(op, Region.EXPERT_SLOTS, tl.int32) + tl.cast(row, tl.int64) * op.TOPK
    own_slots = tl.load(slots_at + topk, mask=topk < op.TOPK, other=-1)
    weights = topk_of(address(op, Region.WEIGHTS, tl.float32), row, op.TOPK)
    sums = tl.full((op.TOPK_LANES,), 0.0, tl.float32)
    for k in tl.static_range(op.TOPK):
        sums += tl.where(own_slots == slots[k], weights[k], 0.0)
    target = address(op, Region.EXPERT_WEIGHTS, tl.float32)
    tl.store(target + tl.cast(own_slots, tl.int64), sums, mask=own_slots >= 0)


@portable
def clear_row(op, slot, block_rows, E: tl.constexpr):
    """Writes zeros to an expert's row, its scales and its weight."""
    target = address(op, Region.EXPERT_ROWS, tl.int32) + tl.cast(slot, tl.int64) * E.ROW_WORDS
    for first in tl.static_range(0, E.ROW_WORDS, E.BLOCK_WORDS):
        offsets = first + tl.arange(0, E.BLOCK_WORDS)
        zeros = tl.full((E.BLOCK_WORDS,), 0, tl.int32)
        tl.store(tl.multiple_of(target, 16) + offsets, zeros, mask=offsets < E.ROW_WORDS)
    if E.SCALE_WIDTH > 0:
        zeros = tl.full((E.SCALE_LANES,), 0, E.SCALE_DTYPE)
        inside = tl.arange(0, E.SCALE_LANES) < E.SCALE_WIDTH
        tl.store(scales_at(op, slot, block_rows, E), zeros, mask=inside)
    tl.store(address(op, Region.EXPERT_WEIGHTS, tl.float32) + slot, 0.0)


@portable
def clear_padding(op, block_rows, num_local_experts, program, num_programs, E: tl.constexpr):
    """Writes this program's share of the zeros behind each expert's rows."""
    recv_count = address(op, Region.EXPERT_RECV_COUNT, tl.int32)
    most = tl.minimum(E.ALIGNMENT - 1, block_rows)
    for unit in range(program, num_local_experts * most, num_programs):
        expert = unit % num_local_experts
        count = tl.load(recv_count + expert)
        index = count + unit // num_local_experts
        end = tl.minimum((count + (E.ALIGNMENT - 1)) // E.ALIGNMENT * E.ALIGNMENT, block_rows)
        if index < end:
            clear_row(op, expert * block_rows + index, block_rows, E)


@portable(do_not_specialize=["block_rows", "rank", "num_local_experts"])
def expand_kernel(
    table, block_rows, rank, num_local_experts, S: tl.constexpr, E: tl.constexpr, SPANS: tl.constexpr
):  # fmt: skip
    """Copies every received row, read once, to its experts' rows, with scales and weights; any number of programs.

    Args:
        block_rows: rows for each expert, R.
        S: Shape. E: Expand.
    """
    op = OpContext(table, rank, S)
    # E2
    note_span(SPANS, op, begun=Span.COPY_ROWS)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_blocks: tl.constexpr = (E.ROW_WORDS + E.BLOCK_WORDS - 1) // E.BLOCK_WORDS
    total = tl.load(address(op, Region.TOTAL_RECV, tl.int32))
    received = received_of(op)
    slots_at = address(op, Region.EXPERT_SLOTS, tl.int32)
    for unit in range(program, total * num_blocks, num_programs):
        row = row_of(unit // num_blocks, received)
        slots = topk_of(slots_at, row, S.TOPK)
        block = unit % num_blocks
        copy_words(op, row, slots, block * E.BLOCK_WORDS, E)
        if block == 0:
            if E.SCALE_WIDTH > 0:
                copy_scales(op, row, slots, block_rows, E)
            place_weights(op, row, slots)
    # E3
    if E.ALIGNMENT > 1:
        clear_padding(op, block_rows, num_local_experts, program, num_programs, E)
    note_span(SPANS, op, ended=Span.COPY_ROWS)


@portable(do_not_specialize=["step_tokens", "rank"])
def reduce_experts_kernel(
    rows_in, table, step_tokens, rank,
    S: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """REDUCED_ROWS: for every received row the weighted sum of its experts' rows; any number of programs.

    Added in ascending order of the token's ids, in float32 from 0, each product rounded, and the sum rounded to DTYPE.

    Args:
        rows_in: the experts' results, [num_local_experts, R, HIDDEN] of DTYPE.
        step_tokens: the step's, as in DispatchStep.
    """
    op = OpContext(table, rank, S)
    # E4
    note_span(SPANS, op, begun=Span.WEIGH_ROWS)
    num_blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    total = tl.load(address(op, Region.TOTAL_RECV, tl.int32))
    # slots of another bound may lie beyond rows_in; combine, launched behind this, records the mistake
    if tl.load(address(op, Region.STATE, tl.int32) + State.LAST_STEP_TOKENS) != step_tokens:
        total = total * 0
    received = received_of(op)
    slots_at = address(op, Region.EXPERT_SLOTS, tl.int32)
    weights_at = address(op, Region.WEIGHTS, tl.float32)
    reduced = address(op, Region.REDUCED_ROWS, DTYPE)
    for unit in range(tl.program_id(0), total * num_blocks, tl.num_programs(0)):
        row = row_of(unit // num_blocks, received)
        slots = topk_of(slots_at, row, S.TOPK)
        weights = topk_of(weights_at, row, S.TOPK)
        offsets = (unit % num_blocks) * BLOCK + tl.arange(0, BLOCK)
        sums = tl.full((BLOCK,), 0.0, tl.float32)
        for k in tl.static_range(S.TOPK):
            line = tl.multiple_of(rows_in + tl.cast(slots[k], tl.int64) * HIDDEN, 16)
            # masked instead of branched over, so that all loads are in flight together; a vector of the slot number:
            # the interpreter mistypes a scalar condition that meets a vector
            present = (offsets < HIDDEN) & (full_like(offsets, slots[k]) >= 0)
            values = tl.load(line + offsets, mask=present, other=0.0).to(tl.float32)
            sums += tl.where(present, weights[k] * values, 0.0)
        target = tl.multiple_of(reduced + tl.cast(row, tl.int64) * HIDDEN, 16)
        tl.store(target + offsets, round_to(sums, DTYPE), mask=offsets < HIDDEN)
    note_span(SPANS, op, ended=Span.WEIGH_ROWS)
