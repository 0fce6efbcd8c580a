"""Device helpers about received rows: how many there are, where they begin, and the rows that hold no token."""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels.layout import BOUND_SHIFT, Checksum, FailureCode, Region, State, StepPhase
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import NOBODY, POLLS_PER_CLOCK
from ep_a2a.kernels.target import barrier, volatile_load


class DispatchStep(NamedTuple):
    """One dispatch as its device functions see it.

    op: OpContext. epoch: of the step. num_tokens: that this rank sends.
    step_tokens: the bound of every rank; where bounds differ, their checksum, below 0 (ops/bounds.py).
    wire_word: this rank's bound and the wire format, compared with every peer's. bound_mask: the bound's bits in it.
    first_row: where this rank's rows begin at every rank, but for layout compact. pad_id: id of rows without a token.
    row_limit: rows that a rank may receive. num_region_rows: rows of the regions.
    first_position: source position of this rank's token 0, rank * W * M.
    program: this one, of num_programs.
    """

    op: OpContext
    epoch: tl.tensor
    num_tokens: tl.tensor
    step_tokens: tl.tensor
    wire_word: tl.tensor
    pad_id: tl.tensor
    row_limit: tl.tensor
    first_row: tl.tensor
    bound_mask: tl.tensor
    num_region_rows: tl.tensor
    first_position: tl.tensor
    program: tl.tensor
    num_programs: tl.tensor


STEP_NUMBERS = DispatchStep._fields[2:-2]
"""The numbers of a step that dispatch kernels take: one variant serves all their values."""


class DispatchInputs(NamedTuple):
    """Tensors given to a dispatch, as bulk_dispatch_kernel describes them."""

    x: tl.tensor
    scales: tl.tensor
    weights: tl.tensor
    ids: tl.tensor


class Received(NamedTuple):
    """State of the previous step: rows by source, behind them where each source's begin [lanes]; and its pad_id."""

    rows: tl.tensor
    pad_id: tl.tensor


# Ids that are padded at once, of one gap or of all gaps: not timed. They are off the path of rows, since the last
# program pads while rows are on their way (2 us at EP2 and 1024 tokens when it did so behind the flags).
PADDED_IDS = tl.constexpr(512)
# More rows than a rank can have received.
MOVED = tl.constexpr((1 << 31) - 1)
# This stands for a word of a masked rank, told or not.
UNTOLD = tl.constexpr(-(1 << 31))
# Words of COUNTS that are added at once: not timed.
MOST_COUNTS = tl.constexpr(256)


@portable
def post_counts(op, counts, first_row, wire_word, epoch):
    """Posts to every rank how many rows this rank sends to it, where they begin, and its wire word.

    In layout compact it posts how many go to each rank. The words are flagged: line `rank` of COUNTS [W, W + 2] at
    every peer, which ends in `first_row` and `wire_word`.
    """
    lanes = tl.arange(0, op.WORLD_LANES)
    present = lanes < op.WORLD_SIZE
    words = prim.flagged(counts, epoch)
    nothing = prim.full_like(lanes, 0)
    counts_there = prim.address_at(op, Region.COUNTS, tl.where(present, lanes, op.rank), tl.int64)
    lines = counts_there + op.rank * (op.WORLD_SIZE + 2)
    tl.store(lines + op.WORLD_SIZE, prim.flagged(nothing + first_row, epoch), mask=present, cache_modifier=".wt")
    tl.store(lines + op.WORLD_SIZE + 1, prim.flagged(nothing + wire_word, epoch), mask=present, cache_modifier=".wt")
    if op.COMPACT:
        num_peers: tl.constexpr = min(op.WORLD_LANES, max(1, MOST_COUNTS // op.WORLD_LANES))
        for first in range(0, op.WORLD_SIZE, num_peers):
            peers = first + tl.arange(0, num_peers)
            regions = prim.address_at(op, Region.COUNTS, tl.where(peers < op.WORLD_SIZE, peers, op.rank), tl.int64)
            where = regions[:, None] + op.rank * (op.WORLD_SIZE + 2) + lanes[None, :]
            mask = (peers < op.WORLD_SIZE)[:, None] & present[None, :]
            tl.store(where, words[None, :] + prim.full_like(peers, 0)[:, None], mask=mask, cache_modifier=".wt")
    else:
        tl.store(lines + lanes, words, mask=present, cache_modifier=".wt")


@portable
def look_at_counts(lines, epoch, index, op, ALL: tl.constexpr, WITHIN: tl.constexpr):
    """(1 for words of COUNTS that are not of this epoch, their payload, the rank that posts them).

    Args:
        index: which words, a vector: those of wait_counts, or with ALL the words of all lines in their order.
    """
    if ALL:
        source, where, inside = index // (op.WORLD_SIZE + 2), index, index < op.WORLD_SIZE * (op.WORLD_SIZE + 2)
    else:
        source, column = index % op.WORLD_SIZE, index // op.WORLD_SIZE
        where = source * (op.WORLD_SIZE + 2) + tl.where(column == 0, op.rank, op.WORLD_SIZE - 1 + column)
        inside = index < 3 * op.WORLD_SIZE
    if WITHIN:
        inside = inside & (source // WITHIN == op.rank // WITHIN)
    seen = volatile_load(lines + where, mask=inside, other=0)
    late = ((prim.epoch_of(seen) != epoch) & inside).to(tl.int32)
    return late, prim.payload_of(seen), source


@portable
def wait_counts(
    op, epoch, COUNT_LANES: tl.constexpr, ALL: tl.constexpr, PATIENCE: tl.constexpr = 1, WITHIN: tl.constexpr = 0,
    masked=0,
):  # fmt: skip
    """Waits until every rank has told this one how many rows it sends here, where they begin, and its wire word.

    ALL: how many rows it sends to each rank, too; only who needs rows_before waits for so many words.

    COUNT_LANES must be at least the threads of a program: each lane is read by one thread then, and a reduction over
    the lanes is one verdict for all. PATIENCE: as in overdue. WITHIN: ranks of a node, of which only this rank's is
    waited for; 0 for all ranks. masked: from masked_of; nobody waits for a rank that is masked.

    Returns:
        (words [COUNT_LANES], poison): lane s has the rows from rank s, lane W + s where they begin but for layout
        compact, lane 2 * W + s its wire word, UNTOLD of masked ranks; the poison word when they did not come. With ALL
        the words are not to be used.
    """
    lanes = tl.arange(0, COUNT_LANES)
    lines = prim.address(op, Region.COUNTS, tl.int64)
    words, gone = prim.full_like(lanes, 0), tl.full((), 0, tl.int32) + masked
    first, end = tl.full((), 0, tl.int32), op.WORLD_SIZE * (op.WORLD_SIZE + 2) if ALL else COUNT_LANES
    poison, polls, deadline = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    while (first < end) & (poison == 0):
        late, words, source = look_at_counts(lines, epoch, first + lanes if ALL else lanes, op, ALL, WITHIN)
        if op.MASKS:
            is_live = prim.is_live(gone, source)
            words, late = tl.where(is_live & (late == 0), words, UNTOLD), tl.where(is_live, late, 0)
        if prim.reduce_sum(late, 0) == 0:
            first += COUNT_LANES
        else:
            prim.pause(0)
            polls = prim.next_poll(polls)
            if polls % POLLS_PER_CLOCK == 0:
                if op.MASKS:
                    gone = prim.masked_now(op)
                accused = prim.reduce_min(tl.where(late > 0, source, op.WORLD_SIZE), 0)
                suspects = tl.where(late > 0, source, -1)
                poison, deadline = prim.overdue(op, polls, deadline, accused, PATIENCE, suspects)
    return words, poison


@portable
def absent_ranks(op, epoch, none: tl.constexpr):
    """[WORLD_LANES] the ranks whose counts have not come, `none` in the other lanes."""
    lanes = tl.arange(0, op.WORLD_LANES)
    lines = prim.address(op, Region.COUNTS, tl.int64) + lanes * (op.WORLD_SIZE + 2)
    words = volatile_load(lines + op.WORLD_SIZE + 1, mask=lanes < op.WORLD_SIZE, other=0)
    absent = (prim.epoch_of(words) != epoch) & (lanes < op.WORLD_SIZE)
    return tl.where(absent, lanes, none)


@portable
def absent_rank(op, epoch, otherwise):
    """The first rank whose counts have not come, or `otherwise`. A rank that waits for it is not to blame."""
    first = prim.reduce_min(absent_ranks(op, epoch, op.WORLD_SIZE), 0)
    return tl.where(first < op.WORLD_SIZE, first, otherwise)


@portable
def counts_from(step):
    """Once every line has come, by source [WORLD_LANES]: rows for this rank, where they begin, wire words.

    Of a masked rank that has not told them, they are what accept_rows takes in their place.
    """
    op = step.op
    lanes = tl.arange(0, op.WORLD_LANES)
    lines = prim.address(op, Region.COUNTS, tl.int64) + lanes * (op.WORLD_SIZE + 2)
    present = lanes < op.WORLD_SIZE
    counts = volatile_load(lines + op.rank, mask=present, other=0)
    starts = volatile_load(lines + op.WORLD_SIZE, mask=present, other=0)
    wire_words = volatile_load(lines + op.WORLD_SIZE + 1, mask=present, other=0)
    if op.MASKS:
        # with a common bound all ranks have the same wire word
        stands_for = prim.full_like(lanes, 0), lanes * step.step_tokens, prim.full_like(lanes, step.wire_word)
        told = (
            tl.where(prim.epoch_of(counts) == step.epoch, prim.payload_of(counts), stands_for[0]),
            tl.where(prim.epoch_of(starts) == step.epoch, prim.payload_of(starts), stands_for[1]),
            tl.where(prim.epoch_of(wire_words) == step.epoch, prim.payload_of(wire_words), stands_for[2]),
        )
    else:
        told = prim.payload_of(counts), prim.payload_of(starts), prim.payload_of(wire_words)
    return told


@portable
def rows_before(op, source):
    """[WORLD_LANES]: at each destination, the rows of all sources below `source` (layout compact).

    All counts must have come (wait_counts).
    """
    lanes = tl.arange(0, op.WORLD_LANES)
    num_lines: tl.constexpr = max(1, MOST_COUNTS // op.WORLD_LANES)
    first_line = prim.address(op, Region.COUNTS, tl.int64)
    rows = prim.full_like(lanes, 0)
    for first in range(0, source, num_lines):
        sources = first + tl.arange(0, num_lines)
        lines = first_line + sources[:, None] * (op.WORLD_SIZE + 2) + lanes[None, :]
        mask = (sources < source)[:, None] & (lanes < op.WORLD_SIZE)[None, :]
        rows += prim.reduce_sum(prim.payload_of(volatile_load(lines, mask=mask, other=0)), 0)
    return rows


@portable
def last_received(op, LANES: tl.constexpr):
    """State of the previous step (Received), until accept_rows; loaded before the wait for this one."""
    state = prim.address(op, Region.STATE, tl.int32)
    lanes = tl.arange(0, LANES)
    rows = prim.address(op, Region.RECV_COUNTS, tl.int32)
    rows = tl.load(rows + lanes, mask=lanes < 2 * op.WORLD_SIZE, other=0)
    return Received(rows, tl.load(state + State.LAST_PAD_ID))


@portable
def disagrees(step, words, COUNT_LANES: tl.constexpr):
    """Return 1 if the ranks' wire words do not fit this rank's step, else 0.

    Words of a common bound are equal. Of bounds that differ the rest of each word is, the first row of this rank
    is the sum of the bounds below it and R that of all, which makes the places of all ranks exact together, and the
    checksum compares all bounds with those that this rank was given.

    Args:
        step: DispatchStep. words: from wait_counts.
    """
    op = step.op
    lanes = tl.arange(0, COUNT_LANES)
    is_wire_word = (lanes >= 2 * op.WORLD_SIZE) & (lanes < 3 * op.WORLD_SIZE)
    compared = tl.where(step.step_tokens < 0, ~step.bound_mask, -1)
    differs = is_wire_word & (((words ^ step.wire_word) & compared) != 0)
    found = prim.reduce_max(differs.to(tl.int32), 0)
    if step.step_tokens < 0:
        ranks = tl.arange(0, op.WORLD_LANES)
        _, _, wire_words = counts_from(step)
        bounds = (wire_words & step.bound_mask) >> BOUND_SHIFT
        first_row = prim.reduce_sum(tl.where(ranks < op.rank, bounds, 0), 0)
        num_rows = tl.minimum(prim.reduce_sum(bounds, 0), step.num_region_rows)
        mixed = ((ranks + 1).to(tl.int64) * Checksum.FACTOR) & Checksum.MASK
        weights = mixed ^ (mixed >> Checksum.SHIFT) | 1
        checksum = -1 - (prim.reduce_sum(bounds.to(tl.int64) * weights, 0) & Checksum.MASK)
        places = (first_row != step.first_row) | (num_rows != step.row_limit)
        found = found | (places | (checksum != step.step_tokens)).to(tl.int32)
    return found


@portable
def accept_rows(step, old, words, COUNT_LANES: tl.constexpr):
    """Publishes what this rank receives, once every rank's counts are there. Returns the poison word of a failure.

    Args:
        step: DispatchStep. old: from last_received. words: from wait_counts.
    """
    op = step.op
    lanes = tl.arange(0, COUNT_LANES)
    if op.MASKS:
        # no rows of a masked rank, at the place that the common bound gives; and no disagreement
        start = (lanes - op.WORLD_SIZE) * step.step_tokens
        stands_for = tl.where(lanes < op.WORLD_SIZE, 0, tl.where(lanes < 2 * op.WORLD_SIZE, start, step.wire_word))
        words = tl.where(words == UNTOLD, stands_for, words)
    is_count = lanes < op.WORLD_SIZE
    received = prim.address(op, Region.RECV_COUNTS, tl.int32) + lanes
    counts = tl.where(is_count, words, 0)
    total = prim.reduce_sum(counts, 0)
    mismatch = disagrees(step, words, COUNT_LANES) != 0
    poison = tl.where(total > step.row_limit, (op.rank | (FailureCode.CAPACITY << 16)).to(tl.int32), 0)
    poison = tl.where(mismatch, NOBODY | (FailureCode.STEP_TOKENS_MISMATCH << 16), poison)
    if poison != 0:
        sent, _, wire_words = counts_from(step)
        found, by_rank = tl.where(mismatch, 1, total), tl.where(mismatch, wire_words, sent)
        prim.fail(op, poison, StepPhase.DISPATCH, step.epoch, found, by_rank)
    else:
        pad_unused_rows(step, old, words, total, COUNT_LANES)
    # every thread has read the previous rows before they are replaced
    barrier()
    tl.store(received, tl.where(poison == 0, counts, 0), mask=is_count)
    if op.COMPACT:
        tl.store(received + op.WORLD_SIZE, prim.running_sum(counts, 0) - counts, mask=is_count)
    else:
        tl.store(received, words, mask=(lanes >= op.WORLD_SIZE) & (lanes < 2 * op.WORLD_SIZE))
    tl.store(prim.address(op, Region.TOTAL_RECV, tl.int32), tl.where(poison == 0, total, 0))
    return poison


@portable
def receive_nothing(op):
    """Publishes that a failed step has brought nothing.

    Whoever has read the previous counts has taken part in a reduction since.
    """
    lanes = tl.arange(0, op.WORLD_LANES)
    received = prim.address(op, Region.RECV_COUNTS, tl.int32)
    tl.store(received + lanes, prim.full_like(lanes, 0), mask=lanes < op.WORLD_SIZE)
    tl.store(prim.address(op, Region.TOTAL_RECV, tl.int32), 0)


@portable
def pad_rows(ids, first, num_rows, pad_id, TOPK: tl.constexpr):
    """Gives `pad_id` to rows first ... num_rows - 1."""
    lanes = tl.arange(0, PADDED_IDS)
    end = tl.cast(num_rows, tl.int64) * TOPK
    for start in range(tl.cast(first, tl.int64) * TOPK, end, PADDED_IDS):
        tl.store(ids + start + lanes, prim.full_like(lanes, pad_id), mask=start + lanes < end)


@portable
def pad_unused_rows(step, old, words, total, COUNT_LANES: tl.constexpr):
    """Gives `pad_id` to the rows that the previous step filled and this one does not; all others carry it already.

    The work is proportional to the rows of the previous step, and to all rows only when pad_id changes.

    Args:
        step: DispatchStep. old: Received of the previous step. words: from wait_counts. total: rows of all.
    """
    op = step.op
    state = prim.address(op, Region.STATE, tl.int32)
    ids = prim.address(op, Region.INDICES, tl.int32)
    lanes = tl.arange(0, COUNT_LANES)
    if op.COMPACT:
        last = prim.reduce_sum(tl.where(lanes < op.WORLD_SIZE, old.rows, 0), 0)
        if old.pad_id != step.pad_id:
            last = step.num_region_rows + 0
        pad_rows(ids, total, last, step.pad_id, op.TOPK)
    else:
        has_moved = ((old.rows != words) & (lanes < 2 * op.WORLD_SIZE)) | (old.pad_id != step.pad_id)
        left = tl.where(lanes < op.WORLD_SIZE, old.rows - words, tl.where(has_moved, MOVED, 0))
        most_left = prim.reduce_max(left, 0)
        # steps of equal counts, the common case, have nothing to do
        if most_left > 0:
            pad_gaps(step, old, ids, most_left == MOVED)
    tl.store(state + State.LAST_PAD_ID, step.pad_id)
    tl.store(state + State.LAST_STEP_TOKENS, step.step_tokens)


@portable
def pad_gaps(step, old, ids, moved):
    """Pads the rows that follow each source's, up to those of the previous step; one gap per source, all at once.

    Args:
        moved: whether rows of the previous step may lie elsewhere, in gaps of any size and behind all of this step's.
    """
    op = step.op
    lanes = tl.arange(0, op.WORLD_LANES)
    num_ids: tl.constexpr = max(1, PADDED_IDS // op.WORLD_LANES)
    present = lanes < op.WORLD_SIZE
    rows_at = prim.address(op, Region.RECV_COUNTS, tl.int32) + lanes
    old_counts = tl.load(rows_at, mask=present, other=0)
    counts, starts, words = counts_from(step)
    ends = starts + old_counts
    if moved:
        old_ends = tl.load(rows_at + op.WORLD_SIZE, mask=present, other=0) + old_counts
        last = prim.reduce_max(tl.where(old_counts > 0, old_ends, 0), 0)
        if old.pad_id != step.pad_id:
            last = step.num_region_rows + 0
        ends = starts + ((words & step.bound_mask) >> BOUND_SHIFT)
        pad_rows(ids, prim.reduce_max(ends, 0), last, step.pad_id, op.TOPK)
        ends = tl.minimum(ends, last)
    num_left = (ends - starts - counts)[:, None] * op.TOPK
    gaps = ids + tl.cast(starts + counts, tl.int64)[:, None] * op.TOPK
    for first in range(0, prim.reduce_max(ends - starts - counts, 0) * op.TOPK, num_ids):
        index = first + tl.arange(0, num_ids)[None, :]
        tl.store(gaps + index, prim.full_like(num_left + index, step.pad_id), mask=index < num_left)


@portable(do_not_specialize=["rank", "first_expert"], do_not_specialize_on_alignment=["counts_out"])
def count_local_experts_kernel(table, rank, first_expert, counts_out, S: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """counts_out[e] = slots of received rows with the id of this rank's expert e; one program per expert."""
    op = OpContext(table, rank, S)
    expert = first_expert + tl.program_id(0)
    ids = prim.address(op, Region.INDICES, tl.int32)
    received = prim.address(op, Region.RECV_COUNTS, tl.int32)
    slots = tl.arange(0, S.TOPK_LANES)
    found = tl.full((BLOCK_ROWS, S.TOPK_LANES), 0, tl.int32)
    for source in range(S.WORLD_SIZE):
        count, start = tl.load(received + source), tl.load(received + S.WORLD_SIZE + source)
        for offset in range(0, count, BLOCK_ROWS):
            rows = offset + tl.arange(0, BLOCK_ROWS)
            mask = (rows < count)[:, None] & (slots < S.TOPK)[None, :]
            where = tl.cast(start + rows, tl.int64)[:, None] * S.TOPK + slots[None, :]
            values = tl.load(ids + where, mask=mask, other=-1)
            found += (values == expert).to(tl.int32)
    tl.store(counts_out + tl.program_id(0), prim.reduce_sum(prim.reduce_sum(found, 1), 0))
