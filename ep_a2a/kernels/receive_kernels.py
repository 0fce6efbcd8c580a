"""Device helpers about received rows: how many there are, where they begin, and the rows that hold no token."""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels.layout import Region, State
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    CAPACITY,
    DISPATCH_PHASE,
    NOBODY,
    POLLS_PER_CLOCK,
    STATE,
    STEP_TOKENS_MISMATCH,
    address,
    epoch_of,
    fail,
    flagged,
    full_like,
    next_poll,
    overdue,
    pause,
    payload_of,
    reduce_max,
    reduce_min,
    reduce_sum,
)
from ep_a2a.kernels.target import barrier, volatile_load

COUNTS = tl.constexpr(Region.COUNTS.value)
INDICES = tl.constexpr(Region.INDICES.value)
RECV_COUNTS = tl.constexpr(Region.RECV_COUNTS.value)
TOTAL_RECV = tl.constexpr(Region.TOTAL_RECV.value)
LAST_PAD_ID = tl.constexpr(State.LAST_PAD_ID.value)
LAST_STEP_TOKENS = tl.constexpr(State.LAST_STEP_TOKENS.value)


class DispatchStep(NamedTuple):
    """One dispatch as its device functions see it.

    table: addresses (kernels/layout.py). rank: this rank. epoch: of the step. num_tokens: that this rank sends.
    step_tokens: the step's bound, rows per source in layout rank_major; the same on all ranks.
    wire_word: that bound and the wire format, compared with every peer's. pad_id: id of rows without a token.
    row_limit: rows that a rank may receive. num_region_rows: rows of the regions.
    first_position: source position of this rank's token 0, rank * W * M.
    program: this one, of num_programs.
    """

    table: tl.tensor
    rank: tl.tensor
    epoch: tl.tensor
    num_tokens: tl.tensor
    step_tokens: tl.tensor
    wire_word: tl.tensor
    pad_id: tl.tensor
    row_limit: tl.tensor
    num_region_rows: tl.tensor
    first_position: tl.tensor
    program: tl.tensor
    num_programs: tl.tensor


class DispatchInputs(NamedTuple):
    """Tensors given to a dispatch, as bulk_dispatch_kernel describes them."""

    x: tl.tensor
    scales: tl.tensor
    weights: tl.tensor
    ids: tl.tensor


class Received(NamedTuple):
    """State of the previous step: rows by source [lanes], its bound and pad_id."""

    counts: tl.tensor
    step_tokens: tl.tensor
    pad_id: tl.tensor


# Rows of one source that are padded at once, and rows of all sources: not timed. They are off the path of rows, since
# the last program pads while rows are on their way (2 us at EP2 and 1024 tokens when it did so behind the flags).
PAD_ROWS = tl.constexpr(64)
PADDED_ROWS = tl.constexpr(128)
# Words of COUNTS that are added at once: not timed.
MOST_COUNTS = tl.constexpr(256)


@portable
def post_counts(table, counts, wire_word, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """Posts to every rank how many rows this rank sends to each rank, and the word on which all ranks must agree.

    The words are flagged: line `rank` of COUNTS [W, W + 1] at every peer, the last word of a line being `wire_word`.
    """
    lanes = tl.arange(0, WORLD_LANES)
    num_peers: tl.constexpr = min(WORLD_LANES, max(1, MOST_COUNTS // WORLD_LANES))
    wire_words = full_like(tl.arange(0, num_peers), wire_word)
    for first in range(0, WORLD_SIZE, num_peers):
        peers = first + tl.arange(0, num_peers)
        present = peers < WORLD_SIZE
        lines = address(table, COUNTS, tl.where(present, peers, rank), WORLD_SIZE, tl.int64) + rank * (WORLD_SIZE + 1)
        words = flagged(counts, epoch)[None, :] + full_like(peers, 0)[:, None]
        mask = present[:, None] & (lanes < WORLD_SIZE)[None, :]
        tl.store(lines[:, None] + lanes[None, :], words, mask=mask, cache_modifier=".wt")
        tl.store(lines + WORLD_SIZE, flagged(wire_words, epoch), mask=present, cache_modifier=".wt")


@portable
def look_at_counts(lines, epoch, index, rank, WORLD_SIZE: tl.constexpr, ALL: tl.constexpr, WITHIN: tl.constexpr):
    """(1 for words of COUNTS that are not of this epoch, their payload, the rank that posts them).

    Args:
        index: which words, a vector: those of wait_counts, or with ALL the words of all lines in their order.
    """
    if ALL:
        source, where, inside = index // (WORLD_SIZE + 1), index, index < WORLD_SIZE * (WORLD_SIZE + 1)
    else:
        is_count = index < WORLD_SIZE
        source = tl.where(is_count, index, index - WORLD_SIZE)
        where = source * (WORLD_SIZE + 1) + tl.where(is_count, rank, WORLD_SIZE)
        inside = index < 2 * WORLD_SIZE
    if WITHIN:
        inside = inside & (source // WITHIN == rank // WITHIN)
    seen = volatile_load(lines + where, mask=inside, other=0)
    late = ((epoch_of(seen) != epoch) & inside).to(tl.int32)
    return late, payload_of(seen), source


@portable
def wait_counts(
    table, epoch, rank, WORLD_SIZE: tl.constexpr, COUNT_LANES: tl.constexpr, PATIENCE: tl.constexpr = 1,
    WITHIN: tl.constexpr = 0,
):  # fmt: skip
    """Waits until every rank has told this one how many rows it sends here, and its wire word.

    COUNT_LANES must be at least the threads of a program: each lane is read by one thread then, and a reduction over
    the lanes is one verdict for all. PATIENCE: as in overdue. WITHIN: ranks of a node, of which only this rank's is
    waited for; 0 for all ranks.

    Returns:
        (words [COUNT_LANES], poison): lane s has the rows from rank s, lane W + s its wire word; the poison word when
        they did not come.
    """
    index = tl.arange(0, COUNT_LANES)
    lines = address(table, COUNTS, rank, WORLD_SIZE, tl.int64)
    late, words, source = look_at_counts(lines, epoch, index, rank, WORLD_SIZE, False, WITHIN)
    num_late = reduce_sum(late, 0)
    poison = tl.full((), 0, tl.int32)
    polls = tl.full((), 0, tl.int32)
    deadline = tl.full((), 0, tl.int64)
    while (num_late > 0) & (poison == 0):
        pause(0)
        late, words, source = look_at_counts(lines, epoch, index, rank, WORLD_SIZE, False, WITHIN)
        num_late = reduce_sum(late, 0)
        polls = next_poll(polls)
        if (polls % POLLS_PER_CLOCK == 0) & (num_late > 0):
            accused = reduce_min(tl.where(late > 0, source, WORLD_SIZE), 0)
            poison, deadline = overdue(table, polls, deadline, accused, rank, WORLD_SIZE, PATIENCE)
    return words, poison


@portable
def wait_all_counts(
    table, epoch, rank, WORLD_SIZE: tl.constexpr, COUNT_LANES: tl.constexpr, PATIENCE: tl.constexpr = 1,
    WITHIN: tl.constexpr = 0,
):  # fmt: skip
    """Waits until every rank has told this one how many rows it sends to each rank. Returns the poison word.

    Only who needs rows_before waits for so many words. Arguments: as in wait_counts.
    """
    lanes = tl.arange(0, COUNT_LANES)
    lines = address(table, COUNTS, rank, WORLD_SIZE, tl.int64)
    poison = tl.full((), 0, tl.int32)
    polls = tl.full((), 0, tl.int32)
    deadline = tl.full((), 0, tl.int64)
    first = tl.full((), 0, tl.int32)
    while (first < WORLD_SIZE * (WORLD_SIZE + 1)) & (poison == 0):
        late, _, source = look_at_counts(lines, epoch, first + lanes, rank, WORLD_SIZE, True, WITHIN)
        if reduce_sum(late, 0) == 0:
            first += COUNT_LANES
        else:
            pause(0)
            polls = next_poll(polls)
            if polls % POLLS_PER_CLOCK == 0:
                accused = reduce_min(tl.where(late > 0, source, WORLD_SIZE), 0)
                poison, deadline = overdue(table, polls, deadline, accused, rank, WORLD_SIZE, PATIENCE)
    return poison


@portable
def absent_rank(table, epoch, otherwise, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """The first rank whose counts have not come, or `otherwise`. A rank that waits for it is not to blame."""
    lanes = tl.arange(0, WORLD_LANES)
    lines = address(table, COUNTS, rank, WORLD_SIZE, tl.int64) + lanes * (WORLD_SIZE + 1)
    words = volatile_load(lines + WORLD_SIZE, mask=lanes < WORLD_SIZE, other=0)
    absent = (epoch_of(words) != epoch) & (lanes < WORLD_SIZE)
    first = reduce_min(tl.where(absent, lanes, WORLD_SIZE), 0)
    return tl.where(first < WORLD_SIZE, first, otherwise)


@portable
def counts_from(table, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """([WORLD_LANES] rows for this rank by source, [WORLD_LANES] wire words), once every line has come."""
    lanes = tl.arange(0, WORLD_LANES)
    lines = address(table, COUNTS, rank, WORLD_SIZE, tl.int64) + lanes * (WORLD_SIZE + 1)
    present = lanes < WORLD_SIZE
    counts = volatile_load(lines + rank, mask=present, other=0)
    words = volatile_load(lines + WORLD_SIZE, mask=present, other=0)
    return payload_of(counts), payload_of(words)


@portable
def rows_before(table, rank, source, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """[WORLD_LANES]: at each destination, the rows of all sources below `source` (layout compact).

    All counts must have come (wait_all_counts).
    """
    lanes = tl.arange(0, WORLD_LANES)
    num_lines: tl.constexpr = max(1, MOST_COUNTS // WORLD_LANES)
    first_line = address(table, COUNTS, rank, WORLD_SIZE, tl.int64)
    rows = full_like(lanes, 0)
    for first in range(0, source, num_lines):
        sources = first + tl.arange(0, num_lines)
        lines = first_line + sources[:, None] * (WORLD_SIZE + 1) + lanes[None, :]
        mask = (sources < source)[:, None] & (lanes < WORLD_SIZE)[None, :]
        rows += reduce_sum(payload_of(volatile_load(lines, mask=mask, other=0)), 0)
    return rows


@portable
def last_counts(table, rank, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr):
    """[LANES]: the rows of the previous step, by source, until accept_rows replaces them."""
    lanes = tl.arange(0, LANES)
    return tl.load(address(table, RECV_COUNTS, rank, WORLD_SIZE, tl.int32) + lanes, mask=lanes < WORLD_SIZE, other=0)


@portable
def last_received(table, rank, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr):
    """State of the previous step (Received), loaded before the wait for this one."""
    state = address(table, STATE, rank, WORLD_SIZE, tl.int32)
    return Received(
        last_counts(table, rank, WORLD_SIZE, LANES),
        tl.load(state + LAST_STEP_TOKENS),
        tl.load(state + LAST_PAD_ID),
    )


@portable
def accept_counts(step, S: tl.constexpr, COUNT_LANES: tl.constexpr):
    """Waits for the counts of all ranks, and publishes what this rank receives. Returns the poison word of a failure.

    One program of a step does this. Rows may still be on their way: those that are padded here are none of them.

    Args:
        step: DispatchStep. COUNT_LANES: as in wait_counts.
    """
    old = last_received(step.table, step.rank, S.WORLD_SIZE, COUNT_LANES)
    words, poison = wait_counts(step.table, step.epoch, step.rank, S.WORLD_SIZE, COUNT_LANES)
    if poison == 0:
        poison = accept_rows(step, old, words, S, COUNT_LANES)
    return poison


@portable
def accept_rows(step, old, words, S: tl.constexpr, COUNT_LANES: tl.constexpr):
    """Publishes what this rank receives, once every rank's counts are there. Returns the poison word of a failure.

    Args:
        step: DispatchStep. old: from last_received. words: from wait_counts.
    """
    table, rank = step.table, step.rank
    lanes = tl.arange(0, COUNT_LANES)
    is_count, is_wire_word = lanes < S.WORLD_SIZE, (lanes >= S.WORLD_SIZE) & (lanes < 2 * S.WORLD_SIZE)
    recv_counts = address(table, RECV_COUNTS, rank, S.WORLD_SIZE, tl.int32) + lanes
    counts = tl.where(is_count, words, 0)
    poison = tl.full((), 0, tl.int32)
    total = reduce_sum(counts, 0)
    if reduce_max(((words != step.wire_word) & is_wire_word).to(tl.int32), 0) > 0:
        poison = tl.full((), (STEP_TOKENS_MISMATCH << 16) | NOBODY, tl.int32)
        _, wire_words = counts_from(table, rank, S.WORLD_SIZE, S.WORLD_LANES)
        fail(table, poison, DISPATCH_PHASE, step.epoch, step.wire_word, wire_words, rank, S.WORLD_SIZE, S.WORLD_LANES)
    elif total > step.row_limit:
        poison = (rank | (CAPACITY << 16)).to(tl.int32)
        sent, _ = counts_from(table, rank, S.WORLD_SIZE, S.WORLD_LANES)
        fail(table, poison, DISPATCH_PHASE, step.epoch, total, sent, rank, S.WORLD_SIZE, S.WORLD_LANES)
    else:
        pad_unused_rows(step, old, counts, total, S)
    # every thread has read the previous counts before they are replaced
    barrier()
    tl.store(recv_counts, tl.where(poison == 0, counts, 0), mask=is_count)
    tl.store(address(table, TOTAL_RECV, rank, S.WORLD_SIZE, tl.int32), tl.where(poison == 0, total, 0))
    return poison


@portable
def receive_nothing(table, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """Publishes that a failed step has brought nothing.

    Whoever has read the previous counts has taken part in a reduction since.
    """
    lanes = tl.arange(0, WORLD_LANES)
    tl.store(
        address(table, RECV_COUNTS, rank, WORLD_SIZE, tl.int32) + lanes, full_like(lanes, 0), mask=lanes < WORLD_SIZE
    )
    tl.store(address(table, TOTAL_RECV, rank, WORLD_SIZE, tl.int32), 0)


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
def pad_unused_rows(step, old, counts, total, S: tl.constexpr):
    """Gives `pad_id` to the rows that the previous step filled and this one does not; all others carry it already.

    The work is proportional to the rows of the previous step, and to all rows only when pad_id changes.

    Args:
        step: DispatchStep. old: Received of the previous step. counts: rows by source, in as many lanes. total: of all.
    """
    state = address(step.table, STATE, step.rank, S.WORLD_SIZE, tl.int32)
    ids = address(step.table, INDICES, step.rank, S.WORLD_SIZE, tl.int32)
    if S.COMPACT:
        last = reduce_sum(old.counts, 0)
        if old.pad_id != step.pad_id:
            last = step.num_region_rows + 0
        pad_all_rows(ids, total, last, step.pad_id, S.TOPK, S.TOPK_LANES)
    else:
        if (old.pad_id != step.pad_id) | (old.step_tokens != step.step_tokens):
            # rows lie elsewhere now: pad all that were used, but for the rows that this step fills
            for block in range(S.WORLD_SIZE):
                pad_block_rows(step, old, ids, block, S)
        else:
            pad_rows_behind(step, ids, reduce_max(old.counts - counts, 0), S)
    tl.store(state + LAST_PAD_ID, step.pad_id)
    tl.store(state + LAST_STEP_TOKENS, step.step_tokens)


@portable
def pad_rows_behind(step, ids, most_left, S: tl.constexpr):
    """Pads the rows of all sources that follow this step's, up to those of the previous step.

    One block per source, all at once: steps of equal counts, the common case, have nothing to do.

    Args:
        most_left: of any source, how many rows of the previous step follow this step's.
    """
    slots = tl.arange(0, S.TOPK_LANES)
    lanes = tl.arange(0, S.WORLD_LANES)
    num_rows: tl.constexpr = max(1, PADDED_ROWS // S.WORLD_LANES)
    if most_left > 0:
        old_counts = last_counts(step.table, step.rank, S.WORLD_SIZE, S.WORLD_LANES)
        counts, _ = counts_from(step.table, step.rank, S.WORLD_SIZE, S.WORLD_LANES)
        for offset in range(0, most_left, num_rows):
            index = counts[:, None] + offset + tl.arange(0, num_rows)[None, :]
            rows = lanes[:, None] * step.step_tokens + index
            where = tl.cast(rows, tl.int64)[:, :, None] * S.TOPK + slots[None, None, :]
            inside = (index < old_counts[:, None])[:, :, None] & (slots < S.TOPK)[None, None, :]
            values = tl.full((S.WORLD_LANES, num_rows, S.TOPK_LANES), 0, tl.int32) + step.pad_id
            tl.store(ids + where, values, mask=inside)


@portable
def pad_block_rows(step, old, ids, block, S: tl.constexpr):
    """Pads one source's rows of the previous step, or a W-th of all rows, where this step has put no token."""
    slots = tl.arange(0, S.TOPK_LANES)
    old_count = tl.load(address(step.table, RECV_COUNTS, step.rank, S.WORLD_SIZE, tl.int32) + block)
    all_rows = old.pad_id != step.pad_id
    share = step.num_region_rows // S.WORLD_SIZE
    first = tl.where(all_rows, block * share, block * old.step_tokens)
    count = tl.where(all_rows, share, old_count)
    lines = address(step.table, COUNTS, step.rank, S.WORLD_SIZE, tl.int64) + step.rank
    for offset in range(0, count, PAD_ROWS):
        index = offset + tl.arange(0, PAD_ROWS)
        rows = first + index
        source = rows // step.step_tokens
        filled = payload_of(volatile_load(lines + source * (S.WORLD_SIZE + 1), mask=source < S.WORLD_SIZE, other=0))
        unused = (index < count) & (rows % step.step_tokens >= filled)
        where = tl.cast(rows, tl.int64)[:, None] * S.TOPK + slots[None, :]
        values = tl.full((PAD_ROWS, S.TOPK_LANES), 0, tl.int32) + step.pad_id
        tl.store(ids + where, values, mask=unused[:, None] & (slots < S.TOPK)[None, :])


@portable(do_not_specialize=["rank", "step_tokens", "first_expert"], do_not_specialize_on_alignment=["counts_out"])
def count_local_experts_kernel(
    table, rank, step_tokens, first_expert, counts_out, S: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """counts_out[e] = slots of received rows with the id of this rank's expert e; one program per expert."""
    expert = first_expert + tl.program_id(0)
    ids = address(table, INDICES, rank, S.WORLD_SIZE, tl.int32)
    counts = address(table, RECV_COUNTS, rank, S.WORLD_SIZE, tl.int32)
    slots = tl.arange(0, S.TOPK_LANES)
    found = tl.full((BLOCK_ROWS, S.TOPK_LANES), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    for source in range(S.WORLD_SIZE):
        count = tl.load(counts + source)
        if not S.COMPACT:
            start = source * step_tokens
        for offset in range(0, count, BLOCK_ROWS):
            rows = offset + tl.arange(0, BLOCK_ROWS)
            mask = (rows < count)[:, None] & (slots < S.TOPK)[None, :]
            where = tl.cast(start + rows, tl.int64)[:, None] * S.TOPK + slots[None, :]
            values = tl.load(ids + where, mask=mask, other=-1)
            found += (values == expert).to(tl.int32)
        start += count
    tl.store(counts_out + tl.program_id(0), reduce_sum(reduce_sum(found, 1), 0))
