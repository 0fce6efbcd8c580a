"""Device helpers that turn expert ids into destination ranks and row numbers."""

import triton.language as tl

from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import reduce_sum, running_sum

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
def record_routes(
    routes, sent_ids, ids, first, last, next_row, row_limit, TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes routes[token, rank] = row at that rank, or -1, for tokens first ... last - 1, and copies their ids.

    Args:
        next_row: [WORLD_LANES], row that the next token for each rank gets.
        row_limit: rows at or beyond it do not exist; they are recorded as -1.

    Returns:
        The number of rows that fell beyond the limit.
    """
    ranks = tl.arange(0, WORLD_LANES)
    num_lost = tl.full((), 0, tl.int32)
    for start in range(first, last, TOKENS):
        hits = destinations(ids, start, last, TOPK, NUM_EXPERTS, WORLD_SIZE, WORLD_LANES, TOKENS)
        rows = next_row[None, :] + running_sum(hits, 0) - hits
        lost = (hits > 0) & (rows >= row_limit)
        tokens = start + tl.arange(0, TOKENS)
        where = tl.cast(tokens[:, None], tl.int64) * WORLD_SIZE + ranks[None, :]
        inside = (tokens < last)[:, None] & (ranks < WORLD_SIZE)[None, :]
        tl.store(routes + where, tl.where((hits > 0) & (rows < row_limit), rows, -1), mask=inside)
        for k in tl.static_range(TOPK):
            slot = tl.cast(tokens, tl.int64) * TOPK + k
            tl.store(sent_ids + slot, tl.load(ids + slot, mask=tokens < last, other=-1), mask=tokens < last)
        next_row += reduce_sum(hits, 0)
        num_lost += reduce_sum(reduce_sum(lost.to(tl.int32), 0), 0)
    return num_lost
