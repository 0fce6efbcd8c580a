"""Device helpers that turn expert ids into destination ranks and row numbers."""

import triton.language as tl

from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import address, epoch_of, flagged, payload_of, reduce_sum, running_sum

CHUNK_COUNTS = tl.constexpr(Region.CHUNK_COUNTS.value)

LARGE_TILE = tl.constexpr(8)


@portable
def owner_of(experts, NUM_EXPERTS: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Rank that owns each expert id under linear ownership, -1 for a dropped slot.

    Validity is decided before dividing: -1 // n is 0 in Triton.
    """
    small: tl.constexpr = NUM_EXPERTS // WORLD_SIZE
    num_large: tl.constexpr = NUM_EXPERTS % WORLD_SIZE
    boundary: tl.constexpr = num_large * (small + 1)
    # without small experts the second branch is never taken, but its divisor must not be zero
    divisor: tl.constexpr = small if small > 0 else 1
    valid = (experts >= 0) & (experts < NUM_EXPERTS)
    safe = tl.where(valid, experts, 0)
    owner = tl.where(safe < boundary, safe // (small + 1), num_large + (safe - boundary) // divisor)
    return tl.where(valid, owner, -1)


@portable
def destinations(
    ids, first, last, TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """[TOKENS, WORLD_LANES] of 0 and 1: which ranks tokens first, first + 1, ... below last go to."""
    tokens = first + tl.arange(0, TOKENS)
    ranks = tl.arange(0, WORLD_LANES)
    hits = tl.full((TOKENS, WORLD_LANES), 0, tl.int32)
    for k in tl.static_range(TOPK):
        experts = tl.load(ids + tl.cast(tokens, tl.int64) * TOPK + k, mask=tokens < last, other=-1)
        owners = owner_of(experts, NUM_EXPERTS, WORLD_SIZE)
        hits = hits | (owners[:, None] == ranks[None, :]).to(tl.int32)
    return hits


@portable
def count_rows(
    ids, first, last, TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """[WORLD_LANES]: how many of tokens first ... last - 1 go to each rank.

    Large tiles keep more loads in flight where there are many tokens; a small one finishes.
    """
    large: tl.constexpr = TOKENS * LARGE_TILE
    tiled = last - (last - first) % large
    large_sums = tl.full((large, WORLD_LANES), 0, tl.int32)
    for start in range(first, tiled, large):
        large_sums += destinations(ids, start, tiled, TOPK, NUM_EXPERTS, WORLD_SIZE, WORLD_LANES, large)
    sums = tl.full((TOKENS, WORLD_LANES), 0, tl.int32)
    for start in range(tiled, last, TOKENS):
        sums += destinations(ids, start, last, TOPK, NUM_EXPERTS, WORLD_SIZE, WORLD_LANES, TOKENS)
    return reduce_sum(large_sums, 0) + reduce_sum(sums, 0)


@portable
def destination_bytes(
    ids, num_tokens, TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr, WORLD_SIZE: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Which ranks at most TOKENS < 256 tokens go to: a byte (0 or 1) per rank, eight ranks in each int64 of a tuple."""
    tokens = tl.arange(0, TOKENS)
    hits = ()
    for first_rank in tl.static_range(0, WORLD_SIZE, 8):
        here = tl.full((TOKENS,), 0, tl.int64)
        for k in tl.static_range(TOPK):
            experts = tl.load(ids + tokens * TOPK + k, mask=tokens < num_tokens, other=-1)
            place = owner_of(experts, NUM_EXPERTS, WORLD_SIZE) - first_rank
            is_here = (place >= 0) & (place < 8)
            bit = tl.full((TOKENS,), 1, tl.int64) << tl.where(is_here, place * 8, 0).to(tl.int64)
            here = here | tl.where(is_here, bit, 0)
        hits = hits + (here,)
    return hits


@portable
def byte_counts(hits, token, WORLD_SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """(rows per rank of tokens 0 ... token - 1, rows (0 or 1) of `token` itself), bytes as in destination_bytes.

    One reduction serves eight ranks, and a rank's count is a shift away, without a trip through memory.
    """
    tokens = tl.arange(0, TOKENS)
    before = ()
    own = ()
    for group in tl.static_range((WORLD_SIZE + 7) // 8):
        before = before + (reduce_sum(tl.where(tokens < token, hits[group], 0), 0),)
        own = own + (reduce_sum(tl.where(tokens == token, hits[group], 0), 0),)
    return before, own


@portable
def byte_of(counts, rank_lanes, WORLD_SIZE: tl.constexpr):
    """The counts of the given ranks (a vector or a scalar) out of byte_counts's tuple."""
    found = (rank_lanes * 0).to(tl.int32)
    for group in tl.static_range((WORLD_SIZE + 7) // 8):
        place = rank_lanes - group * 8
        here = (place >= 0) & (place < 8)
        shift = tl.where(here, place * 8, 0).to(tl.int64)
        found += tl.where(here, ((counts[group] >> shift) & 0xFF).to(tl.int32), 0)
    return found


@portable
def record_route(
    routes, sent_ids, token_ids, token, before, own, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
):  # fmt: skip
    """Records where a token went and its ids [TOPK_LANES], for combine; before, own: from byte_counts."""
    lanes = tl.arange(0, WORLD_LANES)
    at = tl.arange(0, TOPK_LANES)
    index = tl.where(byte_of(own, lanes, WORLD_SIZE) > 0, byte_of(before, lanes, WORLD_SIZE), -1)
    tl.store(routes + token * WORLD_SIZE + lanes, index, mask=lanes < WORLD_SIZE)
    tl.store(sent_ids + token * TOPK + at, token_ids, mask=at < TOPK)


@portable
def record_routes(
    routes, sent_ids, ids, first, last, next_index, TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes routes[token, rank] for tokens first ... last - 1, and copies their ids.

    A route is the row's index among the rows that this rank sends to that rank, or -1.

    Args:
        next_index: [WORLD_LANES], index that the next token for each rank gets.
    """
    ranks = tl.arange(0, WORLD_LANES)
    for start in range(first, last, TOKENS):
        hits = destinations(ids, start, last, TOPK, NUM_EXPERTS, WORLD_SIZE, WORLD_LANES, TOKENS)
        indices = next_index[None, :] + running_sum(hits, 0) - hits
        tokens = start + tl.arange(0, TOKENS)
        where = tl.cast(tokens[:, None], tl.int64) * WORLD_SIZE + ranks[None, :]
        inside = (tokens < last)[:, None] & (ranks < WORLD_SIZE)[None, :]
        tl.store(routes + where, tl.where(hits > 0, indices, -1), mask=inside)
        for k in tl.static_range(TOPK):
            slot = tl.cast(tokens, tl.int64) * TOPK + k
            tl.store(sent_ids + slot, tl.load(ids + slot, mask=tokens < last, other=-1), mask=tokens < last)
        next_index += reduce_sum(hits, 0)


@portable
def rows_of_programs_before(
    table, epoch, own, program, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, PROGRAM_LANES: tl.constexpr
):
    """Tells the other programs of this launch this one's rows per rank; returns the sum over the programs before it.

    Every program tells before it waits, failed or not, and waits only for programs that started before it.

    Args:
        own: [WORLD_LANES], rows that this program's tokens send to each rank.
        PROGRAM_LANES: programs looked at at once; times WORLD_LANES at least the threads of a program, so that one
            thread reads each word and the reduction is one verdict for all.
    """
    ranks = tl.arange(0, WORLD_LANES)
    told = address(table, CHUNK_COUNTS, rank, WORLD_SIZE, tl.int64)
    tl.store(told + program * WORLD_SIZE + ranks, flagged(own, epoch), mask=ranks < WORLD_SIZE)
    before = tl.full((PROGRAM_LANES, WORLD_LANES), 0, tl.int32)
    for start in range(0, program, PROGRAM_LANES):
        programs = start + tl.arange(0, PROGRAM_LANES)
        mask = (programs < program)[:, None] & (ranks < WORLD_SIZE)[None, :]
        where = told + programs[:, None] * WORLD_SIZE + ranks[None, :]
        words = tl.load(where, mask=mask, other=0, volatile=True)
        while reduce_sum(reduce_sum(((epoch_of(words) != epoch) & mask).to(tl.int32), 1), 0) > 0:
            words = tl.load(where, mask=mask, other=0, volatile=True)
        before += payload_of(words)
    return reduce_sum(before, 0)
