"""Device helpers that send low-latency rows: they push a token's row, and the words beside it, to where it goes."""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels.cast_kernels import quantize_tile
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.ll_receive_kernels import received_places
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import EMPTY, address, flagged, full_like, reduce_min, reduce_sum
from ep_a2a.kernels.routing_kernels import field_of, fields_of_token, ids_at, owner_of, weights_at
from ep_a2a.kernels.target import barrier

LOW_LATENCY_ROWS = tl.constexpr(Region.LOW_LATENCY_ROWS.value)
LOW_LATENCY_SIDES = tl.constexpr(Region.LOW_LATENCY_SIDES.value)
TOKENS = tl.constexpr(Region.TOKENS.value)

WRITTEN_IN_FULL = tl.constexpr(-(1 << 31))

# Above any word that holds a rank and a row.
NO_WORD = tl.constexpr((1 << 31) - 1)

# Ranks of which a sender holds all addresses from its start on. Of 8, a cast took all 128 registers that 8 warps have
# each (compute capability 9.0), 16 bytes of stack without one; loaded where they are needed, 109 and none.
MOST_HELD = tl.constexpr(4)


class SendPlaces(NamedTuple):
    """Where a sender writes.

    peers: from fixed_peers. rows, sides: where regions begin there, from bases_of; of few ranks, else empty. own: from
    received_places. routes, ids: this rank's record of what it sends.
    """

    peers: tuple
    rows: tuple
    sides: tuple
    own: tuple
    routes: tl.tensor
    ids: tl.tensor


class SentToken(NamedTuple):
    """A token of this rank: its number, the parts that are loaded, and the rows per rank of the tokens before it.

    before: fields (routing_kernels).
    """

    number: tl.tensor
    tile: tl.tensor
    ids: tl.tensor
    weights: tl.tensor
    before: tuple


class Targets(NamedTuple):
    """Where a token goes, this rank first.

    slots: of its row there, -1 for none. starts: where its row there, or the words beside it, begin.
    """

    slots: tuple
    starts: tuple


@portable
def fixed_peers(rank, S: tl.constexpr):
    """Return all ranks, this one first; only this one where there are more others than a token can go to.

    Beginning elsewhere on each rank spreads the load over the links.
    """
    num_fixed: tl.constexpr = S.WORLD_SIZE if S.WORLD_SIZE - 1 <= S.TOPK else 1
    peers = ()
    for step in tl.static_range(num_fixed):
        peers = peers + ((rank + step) % S.WORLD_SIZE,)
    return peers


@portable
def slots_of(token, fixed, healthy, rank, own_first, S: tl.constexpr, OWNERS: tl.constexpr, LL: tl.constexpr):
    """Return (ranks, slots): where a token may go, this rank first, and the slot of its row there, -1 for none.

    Args:
        token: SentToken. fixed: from fixed_peers. healthy: nothing is sent without it.
        own_first: the slot of this rank's first own row.
    """
    peers, slots = fixed, ()
    if len(fixed) == S.WORLD_SIZE:
        own = fields_of_token(token.ids, OWNERS, S.WORLD_SIZE, LL.COUNT_BITS)
        for step in tl.static_range(S.WORLD_SIZE):
            goes = (field_of(own, fixed[step], S.WORLD_SIZE, LL.COUNT_BITS) > 0) & healthy
            row = field_of(token.before, fixed[step], S.WORLD_SIZE, LL.COUNT_BITS)
            slots = slots + (tl.where(goes, (own_first if step == 0 else rank * LL.SLOTS) + row, -1),)
    else:
        # a word for each expert: how far behind this rank its owner comes, and the row; in ascending order each once
        owners = owner_of(token.ids, OWNERS)
        behind = (owners - rank + S.WORLD_SIZE) % S.WORLD_SIZE
        goes = (owners >= 0) & (full_like(owners, healthy.to(tl.int32)) > 0)
        words = tl.where(goes, behind << 16 | field_of(token.before, owners, S.WORLD_SIZE, LL.COUNT_BITS), NO_WORD)
        word = reduce_min(words, 0)
        slots = (tl.where(word < 1 << 16, own_first + word, -1),)
        word = full_like(word, (1 << 16) - 1)
        for _ in tl.static_range(S.TOPK):
            word = reduce_min(tl.where(words > word, words, NO_WORD), 0)
            peer = rank + (word >> 16)
            peers = peers + (tl.where(word == NO_WORD, rank, tl.where(peer < S.WORLD_SIZE, peer, peer - S.WORLD_SIZE)),)
            slots = slots + (tl.where(word == NO_WORD, -1, rank * LL.SLOTS + (word & 0xFFFF)),)
    return peers, slots


@portable
def record_slots(places, token, peers, slots, rank, own_first, S: tl.constexpr, SLOTS: tl.constexpr):
    """Record where a token goes and its ids [TOPK_LANES] for combine, as record_route does.

    Args:
        places: SendPlaces. token: SentToken. peers, slots: from slots_of.
    """
    lanes = tl.arange(0, S.WORLD_LANES)
    choices = tl.arange(0, S.TOPK_LANES)
    index = full_like(lanes, -1)
    for step in tl.static_range(len(slots)):
        row = slots[step] - (own_first if step == 0 else rank * SLOTS)
        index = tl.where((lanes == peers[step]) & (full_like(lanes, slots[step]) >= 0), row, index)
    number = tl.cast(token.number, tl.int64)
    tl.store(places.routes + number * S.WORLD_SIZE + lanes, index, mask=lanes < S.WORLD_SIZE)
    tl.store(places.ids + number * S.TOPK + choices, token.ids, mask=choices < S.TOPK)


@portable
def bases_of(
    table, own_region: tl.constexpr, region: tl.constexpr, peers, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr
):
    """Return where a region begins at those ranks, of which the first is this one: `own_region` there."""
    bases = (address(table, own_region, peers[0], WORLD_SIZE, DTYPE),)
    for step in tl.static_range(1, len(peers)):
        bases = bases + (address(table, region, peers[step], WORLD_SIZE, DTYPE),)
    return bases


@portable
def own_places(places, table, rank, WORLD_SIZE: tl.constexpr, BYTE_SCALES: tl.constexpr):
    """Return `places.own`; loaded anew where the addresses at many ranks take the registers."""
    own = places.own
    if WORLD_SIZE > MOST_HELD:
        own = received_places(table, rank, WORLD_SIZE, tl.uint8 if BYTE_SCALES else tl.int32)
    return own


@portable
def targets_of(
    table, held, own_region: tl.constexpr, region: tl.constexpr, peers, slots, WIDTH: tl.constexpr,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return Targets for a region with WIDTH elements per line.

    Args:
        held: where it begins at those ranks, if all are held; else only these addresses are loaded.
        own_region, region: as in bases_of. peers, slots: from slots_of.
    """
    bases = held
    if len(held) < len(peers):
        bases = bases_of(table, own_region, region, peers, WORLD_SIZE, DTYPE)
    # the hint must be given here: on the result of a call it would be lost
    aligned: tl.constexpr = 16 if WIDTH * DTYPE.primitive_bitwidth % 128 == 0 else 8
    starts = ()
    for step in tl.static_range(len(peers)):
        starts = starts + (tl.multiple_of(bases[step] + tl.cast(slots[step], tl.int64) * WIDTH, aligned),)
    return Targets(slots, starts)


@portable
def same_for_all(values, to):
    """A tuple with `values` for each of Targets."""
    found = ()
    for _ in tl.static_range(len(to.slots)):
        found = found + (values,)
    return found


@portable
def push(to, offsets, words, mask, FIRST: tl.constexpr):
    """Write words, a tuple, to Targets from the FIRST in order on, past all caches of this GPU."""
    for step in tl.static_range(FIRST, len(to.slots)):
        if to.slots[step] >= 0:
            tl.store(to.starts[step] + offsets, words[step], mask=mask, cache_modifier=".wt")


@portable
def push_beside(own_lines, values, lanes, to, epoch, FIRST_WORD: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr):
    """Push COUNT values that travel beside a row, a tuple, to Targets.

    Those of an own row go straight to its line of `own_lines`, unless layout compact takes all counts to know where
    that is.
    """
    first_peer: tl.constexpr = 0 if S.COMPACT else 1
    words = ()
    for step in tl.static_range(len(to.slots)):
        words = words + (flagged(values[step], epoch),)
    push(to, FIRST_WORD + lanes, words, lanes < COUNT, first_peer)
    if first_peer == 1:
        if to.slots[0] >= 0:
            line = own_lines + tl.cast(to.slots[0], tl.int64) * COUNT
            tl.store(line + lanes, values[0].to(own_lines.dtype.element_ty), mask=lanes < COUNT)


@portable
def push_cast_row(values, scales, to, ROW: tl.constexpr):
    """Cast a row's tile to fp8 and push it to Targets. Returns the bits of its scales, [GROUPS_LANES].

    scales: those that dispatch is given.
    """
    groups = tl.arange(0, ROW.GROUPS_LANES)
    num_groups: tl.constexpr = ROW.ROW_WORDS * 4 // ROW.GROUP
    elements = tl.arange(0, ROW.GROUP_LANES)
    mask = (groups < num_groups)[:, None] & (elements < ROW.GROUP)[None, :]
    bits, scale_bits = quantize_tile(values, scales, ROW.SCALING)
    push(to, groups[:, None] * ROW.GROUP + elements[None, :], same_for_all(bits, to), mask, 0)
    if ROW.BYTE_SCALES:
        scale_bits = scale_bits >> 23
    return scale_bits


@portable
def push_row(x, to, token, ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr):
    """Push a token's row as it is to Targets. Returns whether it contains EMPTY."""
    source = tl.multiple_of(x + tl.cast(token, tl.int64) * ROW_WORDS, 16)
    num_empty = tl.full((), 0, tl.int32)
    for first_word in tl.static_range(0, ROW_WORDS, BLOCK_WORDS):
        offsets = first_word + tl.arange(0, BLOCK_WORDS)
        words = tl.load(source + offsets, mask=offsets < ROW_WORDS, other=0)
        push(to, offsets, same_for_all(words, to), offsets < ROW_WORDS, 0)
        num_empty += reduce_sum((words == EMPTY).to(tl.int32), 0)
    return num_empty > 0


@portable
def push_position(own_positions, to, position, written_in_full, epoch, POSITION: tl.constexpr, S: tl.constexpr):
    """Push the word that says where a row comes from, behind a fence when the row could not be its own flag."""
    first_peer: tl.constexpr = 0 if S.COMPACT else 1
    if first_peer == 1:
        if to.slots[0] >= 0:
            tl.store(own_positions + to.slots[0], position)
    if written_in_full:
        word = flagged(position | WRITTEN_IN_FULL, epoch)
        barrier()
        for step in tl.static_range(first_peer, len(to.slots)):
            if to.slots[step] >= 0:
                tl.atomic_xchg(to.starts[step] + POSITION, word, sem="release", scope="sys")
    else:
        word = flagged(position, epoch)
        for step in tl.static_range(first_peer, len(to.slots)):
            if to.slots[step] >= 0:
                tl.store(to.starts[step] + POSITION, word, cache_modifier=".wt")


@portable
def send_token(
    given, step, places, token, poison, OWNERS: tl.constexpr, S: tl.constexpr, ROW: tl.constexpr, LL: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Push a token's row and the words beside it to the ranks it goes to; nothing when poisoned.

    Args:
        given: DispatchInputs. step: DispatchStep. places: SendPlaces. token: SentToken.
    """
    row_dtype: tl.constexpr = tl.uint8 if ROW.GROUP > 0 else tl.int32
    row_width: tl.constexpr = ROW.ROW_WORDS * 4 if ROW.GROUP > 0 else ROW.ROW_WORDS
    side_words: tl.constexpr = LL.SCALE_WORDS + 2 * S.TOPK + 1
    own_region: tl.constexpr = LOW_LATENCY_ROWS if S.COMPACT else TOKENS
    table, epoch = step.table, step.epoch
    # own rows go straight to where the experts read them, unless it takes all counts to know where that is
    own_first = step.rank * LL.SLOTS if S.COMPACT else step.first_row
    peers, slots = slots_of(token, places.peers, poison == 0, step.rank, own_first, S, OWNERS, LL)
    to = targets_of(table, places.rows, own_region, LOW_LATENCY_ROWS, peers, slots, row_width, S.WORLD_SIZE, row_dtype)
    written_in_full = step.num_tokens < 0
    scale_lanes = tl.arange(0, LL.SIDE_LANES)
    if ROW.GROUP > 0:
        scale_lanes = tl.arange(0, ROW.GROUPS_LANES)
        scales = push_cast_row(token.tile, given.scales, to, ROW)
    else:
        written_in_full = push_row(given.x, to, token.number, ROW.ROW_WORDS, ROW.BLOCK_WORDS)
        if LL.HAS_SCALES:
            line = given.scales + token.number * LL.SCALE_WORDS
            scales = tl.load(line + scale_lanes, mask=scale_lanes < LL.SCALE_WORDS, other=0).to(tl.int32)
    to = targets_of(
        table, places.sides, LOW_LATENCY_SIDES, LOW_LATENCY_SIDES, peers, slots, side_words, S.WORLD_SIZE, tl.int64
    )
    own = own_places(places, table, step.rank, S.WORLD_SIZE, ROW.BYTE_SCALES)
    if LL.HAS_SCALES:
        push_beside(own.scales, same_for_all(scales, to), scale_lanes, to, epoch, 0, LL.SCALE_WORDS, S)
    choices = tl.arange(0, S.TOPK_LANES)
    ids, weights = (), ()
    for place in tl.static_range(len(peers)):
        ids = ids + (ids_at(token.ids, peers[place], S),)
        weights = weights + (weights_at(token.weights, token.ids, peers[place], S),)
    push_beside(own.ids, ids, choices, to, epoch, LL.SCALE_WORDS, S.TOPK, S)
    if FORM.HAS_WEIGHTS:
        push_beside(own.weights, weights, choices, to, epoch, LL.SCALE_WORDS + S.TOPK, S.TOPK, S)
    position = step.first_position + token.number
    push_position(own.positions, to, position, written_in_full, epoch, LL.SCALE_WORDS + 2 * S.TOPK, S)
    record_slots(places, token, peers, slots, step.rank, own_first, S, LL.SLOTS)
