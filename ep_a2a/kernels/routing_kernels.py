"""Device helpers that turn expert ids into destination ranks and row numbers."""

import triton.language as tl

from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import address, epoch_of, flagged, full_like, payload_of, reduce_sum, running_sum
from ep_a2a.kernels.target import volatile_load

CHUNK_COUNTS = tl.constexpr(Region.CHUNK_COUNTS.value)
DESTINATIONS = tl.constexpr(Region.DESTINATIONS.value)
ROUTES = tl.constexpr(Region.ROUTES.value)
SENT_INDICES = tl.constexpr(Region.SENT_INDICES.value)


@portable
def owner_of(experts, OWNERS: tl.constexpr):
    """The rank that each expert id's tokens go to under linear ownership, -1 for a dropped slot.

    Validity is decided before dividing: -1 // n is 0 in Triton.

    Args:
        OWNERS: ExpertPlacement (kernels/constants.py).
    """
    num_experts: tl.constexpr = OWNERS.NUM_EXPERTS
    num_ranks: tl.constexpr = OWNERS.NUM_OWNERS
    small: tl.constexpr = num_experts // num_ranks
    num_large: tl.constexpr = num_experts % num_ranks
    boundary: tl.constexpr = num_large * (small + 1)
    # without small experts the second branch is never taken, but its divisor must not be zero
    divisor: tl.constexpr = small if small > 0 else 1
    valid = (experts >= 0) & (experts < num_experts)
    safe = tl.where(valid, experts, 0)
    owner = tl.where(safe < boundary, safe // (small + 1), num_large + (safe - boundary) // divisor)
    return tl.where(valid, owner, -1)


@portable
def first_expert_of(rank, S: tl.constexpr):
    """The first expert that a rank owns, where received ids are local."""
    small: tl.constexpr = S.LOCAL_IDS_OF // S.WORLD_SIZE
    num_large: tl.constexpr = S.LOCAL_IDS_OF % S.WORLD_SIZE
    return rank * small + tl.minimum(rank, num_large)


@portable
def is_local(ids, rank, S: tl.constexpr):
    """Which ids are those of a rank's experts."""
    return (ids >= first_expert_of(rank, S)) & (ids < first_expert_of(rank + 1, S))


@portable
def ids_at(ids, rank, S: tl.constexpr):
    """A token's ids as that rank receives them: where they are local, -1 for other ranks' experts."""
    if S.LOCAL_IDS_OF > 0:
        ids = tl.where(is_local(ids, rank, S), ids - first_expert_of(rank, S), -1)
    return ids


@portable
def weights_at(weights, ids, rank, S: tl.constexpr):
    """A token's weights as that rank receives them: where ids are local, 0 for other ranks' experts."""
    if S.LOCAL_IDS_OF > 0:
        weights = tl.where(is_local(ids, rank, S), weights, 0)
    return weights


@portable
def either(left, right):
    """Bitwise or, as tl.reduce wants it."""
    return left | right


@portable
def fields_of(experts, first_peer, OWNERS: tl.constexpr, WORLD_SIZE: tl.constexpr,
              COUNT_BITS: tl.constexpr):  # fmt: skip
    """1 in the field of each expert's owner, as int64 of one field of COUNT_BITS bits per rank from first_peer on.

    Counts of rows per rank are kept so, in a tuple with as many words as the ranks take: one addition or reduction
    serves all ranks of a word, and a rank's count is a shift away, without a trip through memory.
    """
    place = owner_of(experts, OWNERS) - first_peer
    here = (place >= 0) & (place < 64 // COUNT_BITS) & (place < WORLD_SIZE - first_peer)
    bit = full_like(place, 1).to(tl.int64) << tl.where(here, place * COUNT_BITS, 0).to(tl.int64)
    return tl.where(here, bit, 0)


@portable
def word_of_tokens(
    ids, num_tokens, first_peer, S: tl.constexpr, OWNERS: tl.constexpr, TOKENS: tl.constexpr, COUNT_BITS: tl.constexpr
):
    """Which of the ranks of one word each of at most TOKENS tokens goes to: [TOKENS] of fields that are 0 or 1."""
    tokens = tl.arange(0, TOKENS)
    here = tl.full((TOKENS,), 0, tl.int64)
    for k in tl.static_range(S.TOPK):
        experts = tl.load(ids + tokens * S.TOPK + k, mask=tokens < num_tokens, other=-1)
        here = here | fields_of(experts, first_peer, OWNERS, S.WORLD_SIZE, COUNT_BITS)
    return here


@portable
def fields_of_token(token_ids, OWNERS: tl.constexpr, WORLD_SIZE: tl.constexpr, COUNT_BITS: tl.constexpr):
    """Which ranks the token with these ids [TOPK_LANES] goes to: words of fields that are 0 or 1."""
    fields = ()
    for first_peer in tl.static_range(0, WORLD_SIZE, 64 // COUNT_BITS):
        bits = fields_of(token_ids, first_peer, OWNERS, WORLD_SIZE, COUNT_BITS)
        fields = fields + (tl.reduce(bits, 0, either),)
    return fields


@portable
def fields_before(fields, token, WORLD_SIZE: tl.constexpr, TOKENS: tl.constexpr, COUNT_BITS: tl.constexpr):
    """Rows per rank of tokens 0 ... token - 1. fields: words [TOKENS]."""
    tokens = tl.arange(0, TOKENS)
    before = ()
    for word in tl.static_range((WORLD_SIZE * COUNT_BITS + 63) // 64):
        before = before + (reduce_sum(tl.where(tokens < token, fields[word], 0), 0),)
    return before


@portable
def count_rows(ids, first, last, S: tl.constexpr, OWNERS: tl.constexpr, TOKENS: tl.constexpr, COUNT_BITS: tl.constexpr):
    """Return rows per rank of tokens first ... last - 1, as fields; TOKENS are looked at at once."""
    sums = ()
    for _word in tl.static_range((S.WORLD_SIZE * COUNT_BITS + 63) // 64):
        sums = sums + (tl.full((TOKENS,), 0, tl.int64),)
    for start in range(first, last, TOKENS):
        tile, here = ids + tl.cast(start, tl.int64) * S.TOPK, ()
        for first_peer in tl.static_range(0, S.WORLD_SIZE, 64 // COUNT_BITS):
            here = here + (word_of_tokens(tile, last - start, first_peer, S, OWNERS, TOKENS, COUNT_BITS),)
        sums = plus(sums, here, S.WORLD_SIZE, COUNT_BITS)
    return fields_before(sums, TOKENS, S.WORLD_SIZE, TOKENS, COUNT_BITS)


@portable
def count_by_rank(
    ids, first, last, S: tl.constexpr, OWNERS: tl.constexpr, TOKENS: tl.constexpr, COUNT_BITS: tl.constexpr
):
    """Return rows per rank of tokens first ... last - 1, [WORLD_LANES]; the code is that of one word, for any W."""
    ranks = tl.arange(0, S.WORLD_LANES)
    counts = full_like(ranks, 0)
    for first_peer in range(0, S.WORLD_SIZE, 64 // COUNT_BITS):
        sums = tl.full((TOKENS,), 0, tl.int64)
        for start in range(first, last, TOKENS):
            tile = ids + tl.cast(start, tl.int64) * S.TOPK
            sums += word_of_tokens(tile, last - start, first_peer, S, OWNERS, TOKENS, COUNT_BITS)
        word = (reduce_sum(sums, 0),)
        # a word holds no ranks but its own
        counts += field_of(word, ranks - first_peer, 64 // COUNT_BITS, COUNT_BITS)
    return counts


@portable
def packed(counts, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, COUNT_BITS: tl.constexpr):
    """Counts [WORLD_LANES] as fields."""
    fields = ()
    for first_rank in tl.static_range(0, WORLD_SIZE, 64 // COUNT_BITS):
        place = tl.arange(0, WORLD_LANES) - first_rank
        here = (place >= 0) & (place < 64 // COUNT_BITS)
        shifted = counts.to(tl.int64) << tl.where(here, place * COUNT_BITS, 0).to(tl.int64)
        fields = fields + (reduce_sum(tl.where(here, shifted, 0), 0),)
    return fields


@portable
def plus(left, right, WORLD_SIZE: tl.constexpr, COUNT_BITS: tl.constexpr):
    """The sum of two tuples of fields."""
    total = ()
    for word in tl.static_range((WORLD_SIZE * COUNT_BITS + 63) // 64):
        total = total + (left[word] + right[word],)
    return total


@portable
def field_of(fields, ranks, WORLD_SIZE: tl.constexpr, COUNT_BITS: tl.constexpr):
    """The fields of the given ranks (a vector or a scalar), as int32."""
    per_word: tl.constexpr = 64 // COUNT_BITS
    found = full_like(ranks, 0).to(tl.int32)
    for word in tl.static_range((WORLD_SIZE * COUNT_BITS + 63) // 64):
        place = ranks - word * per_word
        here = (place >= 0) & (place < per_word)
        shift = tl.where(here, place * COUNT_BITS, 0).to(tl.int64)
        found += tl.where(here, ((fields[word] >> shift) & ((1 << COUNT_BITS) - 1)).to(tl.int32), 0)
    return found


@portable
def ranks_of_tokens(ids, num_tokens, S: tl.constexpr, OWNERS: tl.constexpr, TOKENS: tl.constexpr):
    """Return which ranks each of at most TOKENS tokens goes to: words [TOKENS] with a bit for each rank."""
    tokens, choices = tl.arange(0, TOKENS), tl.arange(0, S.TOPK_LANES)
    mask = (tokens < num_tokens)[:, None] & (choices < S.TOPK)[None, :]
    experts = tl.load(ids + tokens[:, None] * S.TOPK + choices[None, :], mask=mask, other=-1)
    owners = owner_of(experts, OWNERS)
    words = ()
    for first_rank in tl.static_range(0, S.WORLD_SIZE, 32):
        place = owners - first_rank
        here = (place >= 0) & (place < 32)
        bits = tl.where(here, full_like(place, 1) << tl.where(here, place, 0), 0)
        words = words + (tl.reduce(bits, 1, either),)
    return words


@portable
def rows_before_token(words, token, ranks, TOKENS: tl.constexpr):
    """Return how many of tokens 0 ... token - 1 go to each rank of a vector. words: from ranks_of_tokens."""
    place = (ranks & 31)[None, :]
    found = words[0][:, None] >> place
    for each in tl.static_range(1, len(words)):
        found = tl.where((ranks >= 32 * each)[None, :], words[each][:, None] >> place, found)
    counted = (tl.arange(0, TOKENS) < token)[:, None]
    return reduce_sum(tl.where(counted, found & 1, 0), 0)


@portable
def record_route(routes, sent_ids, token_ids, token, before, own, S: tl.constexpr, COUNT_BITS: tl.constexpr):
    """Record where a token went and its ids [TOPK_LANES], for combine.

    routes[token, rank] is the row's index among the rows that this rank sends to that rank, or -1.

    Args:
        before: fields, rows of the tokens before it; own: of the token itself.
    """
    lanes = tl.arange(0, S.WORLD_LANES)
    at = tl.arange(0, S.TOPK_LANES)
    goes = field_of(own, lanes, S.WORLD_SIZE, COUNT_BITS) > 0
    index = tl.where(goes, field_of(before, lanes, S.WORLD_SIZE, COUNT_BITS), -1)
    tl.store(routes + tl.cast(token, tl.int64) * S.WORLD_SIZE + lanes, index, mask=lanes < S.WORLD_SIZE)
    tl.store(sent_ids + tl.cast(token, tl.int64) * S.TOPK + at, token_ids, mask=at < S.TOPK)


@portable
def rows_of_programs_before(
    table, epoch, own, program, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, PROGRAM_LANES: tl.constexpr
):
    """Posts this program's rows per rank to the launch's other programs; returns the sum over the programs before it.

    Every program posts before it waits, failed or not, and waits only for programs that started before it.

    Args:
        own: [WORLD_LANES], rows that this program's tokens send to each rank.
        PROGRAM_LANES: programs looked at at once; times WORLD_LANES at least the threads of a program, so that one
            thread reads each word and the reduction is one verdict for all.
    """
    ranks = tl.arange(0, WORLD_LANES)
    posted_at = address(table, CHUNK_COUNTS, rank, WORLD_SIZE, tl.int64)
    words_at = posted_at + program * WORLD_SIZE + ranks
    tl.store(words_at, flagged(own, epoch), mask=ranks < WORLD_SIZE, cache_modifier=".wt")
    before = tl.full((PROGRAM_LANES, WORLD_LANES), 0, tl.int32)
    for start in range(0, program, PROGRAM_LANES):
        programs = start + tl.arange(0, PROGRAM_LANES)
        mask = (programs < program)[:, None] & (ranks < WORLD_SIZE)[None, :]
        where = posted_at + programs[:, None] * WORLD_SIZE + ranks[None, :]
        words = volatile_load(where, mask=mask, other=0)
        while reduce_sum(reduce_sum(((epoch_of(words) != epoch) & mask).to(tl.int32), 1), 0) > 0:
            words = volatile_load(where, mask=mask, other=0)
        before += payload_of(words)
    return reduce_sum(before, 0)


@portable
def record_routes(ids, step, start, last, index, bases, OWNERS: tl.constexpr, S: tl.constexpr, TOKENS: tl.constexpr):
    """Record where tokens `start` and on go, at most TOKENS of them: for combine, and for the stores of this program.

    Args:
        ids: [num_tokens, TOPK]. step: DispatchStep.
        index: [WORLD_LANES], rows that this rank's tokens before `start` send to each rank.
        bases: [WORLD_LANES], where this rank's rows begin at each rank.

    Returns:
        `index` for the token behind these.
    """
    ranks = tl.arange(0, S.WORLD_LANES)
    tokens = start + tl.arange(0, TOKENS)
    present = tokens < last
    cells = tl.cast(tokens, tl.int64) * S.TOPK
    sent_ids = address(step.table, SENT_INDICES, step.rank, S.WORLD_SIZE, tl.int32)
    goes = tl.full((TOKENS, S.WORLD_LANES), 0, tl.int32)
    for k in tl.static_range(S.TOPK):
        experts = tl.load(ids + cells + k, mask=present, other=-1)
        tl.store(sent_ids + cells + k, experts, mask=present)
        goes = goes | (owner_of(experts, OWNERS)[:, None] == ranks[None, :]).to(tl.int32)
    indices = index[None, :] + running_sum(goes, 0) - goes
    routes = address(step.table, ROUTES, step.rank, S.WORLD_SIZE, tl.int32)
    at = tl.cast(tokens, tl.int64)[:, None] * S.WORLD_SIZE + ranks[None, :]
    tl.store(routes + at, tl.where(goes > 0, indices, -1), mask=present[:, None] & (ranks < S.WORLD_SIZE)[None, :])
    rows = bases[None, :] + indices
    list_destinations(step, tokens, present, rows, (goes > 0) & (rows < step.row_limit) & present[:, None], S)
    return index + reduce_sum(goes, 0)


@portable
def list_destinations(step, tokens, present, rows, sent, S: tl.constexpr):
    """Write the line of DESTINATIONS of each token: words (row, rank) of its rows, -1 behind them.

    The ranks of a line follow each other from this rank on, which spreads the load over the links.

    Args:
        step: DispatchStep. tokens: [T]; present: which of them there are.
        rows: [T, WORLD_LANES], of each token at each rank. sent: whether it goes there.
    """
    ranks, places = tl.arange(0, S.WORLD_LANES), tl.arange(0, S.TOPK_LANES)
    most: tl.constexpr = min(S.WORLD_SIZE, S.TOPK)
    is_sent, is_below = sent.to(tl.int32), (ranks < step.rank).to(tl.int32)[None, :]
    num_sent, num_below = reduce_sum(is_sent, 1)[:, None], reduce_sum(is_sent * is_below, 1)[:, None]
    place = running_sum(is_sent, 1) - is_sent - num_below + is_below * num_sent
    listed = address(step.table, DESTINATIONS, step.rank, S.WORLD_SIZE, tl.int64)
    lines = (listed + tl.cast(tokens, tl.int64) * most)[:, None]
    tl.store(lines + place, flagged(rows, ranks[None, :]), mask=sent)
    unused = (places[None, :] >= num_sent) & (places < most)[None, :] & present[:, None]
    tl.store(lines + places[None, :], full_like(places, -1).to(tl.int64)[None, :], mask=unused)
