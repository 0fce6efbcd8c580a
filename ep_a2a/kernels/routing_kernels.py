"""Device helpers that turn expert ids into destination ranks and row numbers."""

import triton.language as tl

from ep_a2a.config.op_config import MAX_TOPK
from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.target import on_amd, volatile_load

# A token has so many experts at most; ids and bits of them fit into 32 bits.
MAX_SLOTS = tl.constexpr(MAX_TOPK)


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
def first_expert_of(rank, op):
    """The first expert that a rank owns, where received ids are local."""
    small: tl.constexpr = op.LOCAL_IDS_OF // op.WORLD_SIZE
    num_large: tl.constexpr = op.LOCAL_IDS_OF % op.WORLD_SIZE
    return rank * small + tl.minimum(rank, num_large)


@portable
def is_local(ids, rank, op):
    """Which ids are those of a rank's experts."""
    return (ids >= first_expert_of(rank, op)) & (ids < first_expert_of(rank + 1, op))


@portable
def ids_at(ids, rank, op):
    """A token's ids as that rank receives them: where they are local, -1 for other ranks' experts."""
    if op.LOCAL_IDS_OF > 0:
        ids = tl.where(is_local(ids, rank, op), ids - first_expert_of(rank, op), -1)
    return ids


@portable
def weights_at(weights, ids, rank, op):
    """A token's weights as that rank receives them: where ids are local, 0 for other ranks' experts."""
    if op.LOCAL_IDS_OF > 0:
        weights = tl.where(is_local(ids, rank, op), weights, 0)
    return weights


@portable
def either(left, right):
    """Bitwise or, as tl.reduce wants it."""
    return left | right


@portable
def first_slots(owners, op, masked):
    """Return by rank [WORLD_LANES] the first of a token's slots whose expert it owns; MAX_SLOTS and more for none.

    Slot by slot, each in a register of all threads: of a tile of slots and ranks, whose code would grow with the ranks,
    warps would exchange parts. owners: from owner_of. masked: from masked_of.
    """
    ranks = tl.arange(0, op.WORLD_LANES)
    keys = owners * MAX_SLOTS + tl.arange(0, op.TOPK_LANES)
    first = prim.full_like(ranks, -1).to(tl.uint32, bitcast=True)
    for slot in tl.static_range(op.TOPK):
        # how far a slot lies behind the first one that the rank could own, as if unsigned: far where another owns it
        first = tl.minimum(first, (prim.pick(keys, slot) - ranks * MAX_SLOTS).to(tl.uint32, bitcast=True))
    if op.MASKS:
        first = tl.where(prim.is_live(masked, ranks), first, MAX_SLOTS)
    return first


@portable(interpreted=lambda values: values)
def computed_once(values):
    """Return `values`, int64. The compiler would compute them anew for each arrangement of threads that reads them."""
    if not on_amd():
        values = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [values], dtype=tl.int64, is_pure=False, pack=1)
    return values


@portable
def ranks_in_turn(op):
    """Return the ranks [WORLD_LANES] in the order in which what is known of each is kept while tokens are sent.

    Where rows are sent in this order, it begins with this rank, which spreads the load over the links.
    """
    ranks = tl.arange(0, op.WORLD_LANES)
    if op.WORLD_SIZE <= op.TOPK:
        ranks = (op.rank + ranks) % op.WORLD_SIZE
    return ranks


@portable
def destinations_of(token_ids, rows, op, OWNERS: tl.constexpr, masked):
    """Find where a token goes. Where ranks are more than a token has experts, there is a place for each expert.

    Args:
        rows: of ranks_in_turn, the row of a token that goes there. masked: from masked_of.

    Returns:
        (ranks, its row there or -1), vectors with a place for each of the most ranks that it may go to; and 1 for the
        ranks that it goes to, of ranks_in_turn.
    """
    owners = owner_of(token_ids, OWNERS)
    if op.WORLD_SIZE <= op.TOPK:
        peers = ranks_in_turn(op)
        distances = tl.where(owners >= 0, owners - op.rank + op.WORLD_SIZE, 0) % op.WORLD_SIZE
        bits = tl.reduce(tl.where(owners >= 0, prim.full_like(owners, 1) << distances, 0), 0, either)
        goes = ((bits >> tl.arange(0, op.WORLD_LANES)) & 1) > 0
        if op.MASKS:
            goes = goes & prim.is_live(masked, peers)
        sent, rows = goes.to(tl.int32), tl.where(goes, rows, -1)
    else:
        # one row for several experts of a rank: the first of them counts
        first, peers = first_slots(owners, op, masked), tl.maximum(owners, 0)
        found = tl.gather(prim.flagged(rows, first), peers, 0)
        goes = prim.epoch_of(found) == tl.arange(0, op.TOPK_LANES)
        found = computed_once(prim.flagged(tl.where(goes, prim.payload_of(found), -1), peers))
        sent, peers, rows = (first < MAX_SLOTS).to(tl.int32), prim.epoch_of(found), prim.payload_of(found)
    return peers, rows, sent


@portable
def ranks_of_tokens(ids, num_tokens, op, OWNERS: tl.constexpr, TOKENS: tl.constexpr):
    """Return which ranks each of at most TOKENS tokens goes to: words [TOKENS] with a bit for each rank."""
    tokens, choices = tl.arange(0, TOKENS), tl.arange(0, op.TOPK_LANES)
    mask = (tokens < num_tokens)[:, None] & (choices < op.TOPK)[None, :]
    experts = tl.load(ids + tokens[:, None] * op.TOPK + choices[None, :], mask=mask, other=-1)
    owners = owner_of(experts, OWNERS)
    words = ()
    for first_rank in tl.static_range(0, op.WORLD_SIZE, 32):
        place = owners - first_rank
        here = (place >= 0) & (place < 32)
        bits = tl.where(here, prim.full_like(place, 1) << tl.where(here, place, 0), 0)
        words = words + (tl.reduce(bits, 1, either),)
    return words


@portable
def goes_to(words, ranks):
    """Return 1 where a token goes to a rank of a vector [R], as [TOKENS, R]. words: from ranks_of_tokens."""
    place = (ranks & 31)[None, :]
    found = words[0][:, None] >> place
    for each in tl.static_range(1, len(words)):
        found = tl.where((ranks >= 32 * each)[None, :], words[each][:, None] >> place, found)
    return found & 1


@portable
def rows_before_token(words, token, ranks, TOKENS: tl.constexpr):
    """Return how many of tokens 0 ... token - 1 go to each rank of a vector. words: from ranks_of_tokens."""
    return prim.reduce_sum(tl.where((tl.arange(0, TOKENS) < token)[:, None], goes_to(words, ranks), 0), 0)


@portable
def count_by_rank(ids, first, last, op, OWNERS: tl.constexpr, TOKENS: tl.constexpr):
    """Return rows per rank of tokens first ... last - 1, [WORLD_LANES]; TOKENS are looked at at once."""
    ranks = tl.arange(0, op.WORLD_LANES)
    counts = tl.full((TOKENS, op.WORLD_LANES), 0, tl.int32)
    for start in range(first, last, TOKENS):
        words = ranks_of_tokens(ids + tl.cast(start, tl.int64) * op.TOPK, last - start, op, OWNERS, TOKENS)
        counts += goes_to(words, ranks)
    return tl.where(ranks < op.WORLD_SIZE, prim.reduce_sum(counts, 0), 0)


@portable
def rows_of_programs_before(op, epoch, own, program, PROGRAM_LANES: tl.constexpr):
    """Posts this program's rows per rank to the launch's other programs; returns the sum over the programs before it.

    Every program posts before it waits, failed or not, and waits only for programs that started before it.

    Args:
        own: [WORLD_LANES], rows that this program's tokens send to each rank.
        PROGRAM_LANES: programs looked at at once; times WORLD_LANES at least the threads of a program, so that one
            thread reads each word and the reduction is one verdict for all.
    """
    ranks = tl.arange(0, op.WORLD_LANES)
    posted_at = prim.address(op, Region.CHUNK_COUNTS, tl.int64)
    words_at = posted_at + program * op.WORLD_SIZE + ranks
    tl.store(words_at, prim.flagged(own, epoch), mask=ranks < op.WORLD_SIZE, cache_modifier=".wt")
    before = tl.full((PROGRAM_LANES, op.WORLD_LANES), 0, tl.int32)
    for start in range(0, program, PROGRAM_LANES):
        programs = start + tl.arange(0, PROGRAM_LANES)
        mask = (programs < program)[:, None] & (ranks < op.WORLD_SIZE)[None, :]
        where = posted_at + programs[:, None] * op.WORLD_SIZE + ranks[None, :]
        words = volatile_load(where, mask=mask, other=0)
        while prim.reduce_sum(prim.reduce_sum(((prim.epoch_of(words) != epoch) & mask).to(tl.int32), 1), 0) > 0:
            words = volatile_load(where, mask=mask, other=0)
        before += prim.payload_of(words)
    return prim.reduce_sum(before, 0)


@portable
def record_routes(ids, op, start, last, index, OWNERS: tl.constexpr, TOKENS: tl.constexpr, masked=0):
    """Record where tokens `start` and on go, at most TOKENS of them, for combine.

    routes[token, rank] is the row's index among the rows that this rank sends to that rank, or -1.

    Args:
        ids: [num_tokens, TOPK]. index: [WORLD_LANES], rows that tokens before `start` send to each rank.
        masked: from masked_of.

    Returns:
        (1 for the ranks that each token goes to, its row's index there [TOKENS, WORLD_LANES], `index` for the token
        behind these).
    """
    ranks = tl.arange(0, op.WORLD_LANES)
    tokens = start + tl.arange(0, TOKENS)
    present = tokens < last
    cells = tl.cast(tokens, tl.int64) * op.TOPK
    sent_ids = prim.address(op, Region.SENT_INDICES, tl.int32)
    goes = tl.full((TOKENS, op.WORLD_LANES), 0, tl.int32)
    for k in tl.static_range(op.TOPK):
        experts = tl.load(ids + cells + k, mask=present, other=-1)
        tl.store(sent_ids + cells + k, experts, mask=present)
        goes = goes | (owner_of(experts, OWNERS)[:, None] == ranks[None, :]).to(tl.int32)
    if op.MASKS:
        goes = goes * prim.is_live(masked, ranks).to(tl.int32)[None, :]
    indices = index[None, :] + prim.running_sum(goes, 0) - goes
    at = tl.cast(tokens, tl.int64)[:, None] * op.WORLD_SIZE + ranks[None, :]
    routes = prim.address(op, Region.ROUTES, tl.int32)
    tl.store(routes + at, tl.where(goes > 0, indices, -1), mask=present[:, None] & (ranks < op.WORLD_SIZE)[None, :])
    return goes, indices, index + prim.reduce_sum(goes, 0)


@portable
def list_destinations(step, start, last, goes, rows):
    """Write the line of DESTINATIONS of each token: words (row, rank) of its rows, -1 behind them.

    The ranks of a line follow each other from this rank on, which spreads the load over the links.

    Args:
        step: DispatchStep. goes: of tokens `start` and on, from record_routes. rows: of each at each rank.
    """
    op = step.op
    ranks, places = tl.arange(0, op.WORLD_LANES), tl.arange(0, op.TOPK_LANES)
    most: tl.constexpr = min(op.WORLD_SIZE, op.TOPK)
    tokens = start + tl.arange(0, goes.shape[0])
    sent = (goes > 0) & (rows < step.row_limit) & (tokens < last)[:, None]
    is_sent, is_below = sent.to(tl.int32), (ranks < op.rank).to(tl.int32)[None, :]
    num_sent, num_below = prim.reduce_sum(is_sent, 1)[:, None], prim.reduce_sum(is_sent * is_below, 1)[:, None]
    place = prim.running_sum(is_sent, 1) - is_sent - num_below + is_below * num_sent
    listed = prim.address(op, Region.DESTINATIONS, tl.int64)
    lines = (listed + tl.cast(tokens, tl.int64) * most)[:, None]
    tl.store(lines + place, prim.flagged(rows, ranks[None, :]), mask=sent)
    unused = (places[None, :] >= num_sent) & (places < most)[None, :] & (tokens < last)[:, None]
    tl.store(lines + places[None, :], prim.full_like(places, -1).to(tl.int64)[None, :], mask=unused)
