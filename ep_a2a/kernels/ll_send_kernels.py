"""Device helpers that send low-latency rows: they push a token's row, and the words beside it, to where it goes.

A token has a place for each of the most ranks that it may go to: PLACES, a power of two. One store writes to all of
them, so the code is the same for any number of ranks.
"""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import EMPTY, address_at, flagged, full_like, reduce_max, reduce_sum
from ep_a2a.kernels.routing_kernels import destinations_of, ids_at, rows_before_token, weights_at
from ep_a2a.kernels.send_kernels import cast_row, load_row
from ep_a2a.kernels.target import barrier

WRITTEN_IN_FULL = tl.constexpr(-(1 << 31))


class SentToken(NamedTuple):
    """A token of this rank: its number, and the parts that are loaded. tiles: from load_row."""

    number: tl.tensor
    tiles: tuple
    ids: tl.tensor
    weights: tl.tensor


class Targets(NamedTuple):
    """Where a token goes: vectors [PLACES].

    peers: ranks. index: its row among those that this rank sends there. rows: where the row begins there; goes: whether
    it goes there. sides: where the words beside it begin; far: whether they go there, those of an own row only in
    layout compact. own_slot: a scalar, its row at this rank, -1 for none.
    """

    peers: tl.tensor
    index: tl.tensor
    rows: tl.tensor
    goes: tl.tensor
    sides: tl.tensor
    far: tl.tensor
    own_slot: tl.tensor


@portable
def targets_of(step, token, going, poison, masked):
    """Return Targets of a token, with nowhere to go when poisoned.

    Args:
        step: DispatchStep. token: SentToken. going: from ranks_of_tokens, of all tokens of this rank.
        masked: from masked_of.
    """
    op = step.op
    side_words: tl.constexpr = op.LL.SCALE_WORDS + 2 * op.TOPK + 1
    own_region: tl.constexpr = Region.LOW_LATENCY_ROWS if op.COMPACT else Region.TOKENS
    # low-latency rows have no number yet: at each rank poison stands for it, and -1 where the token does not go
    poison_there = full_like(tl.arange(0, op.WORLD_LANES), poison)
    peers, poison_there, _ = destinations_of(token.ids, poison_there, op, op.OWNERS, masked)
    goes = poison_there == 0
    is_own = peers == op.rank
    # own rows go straight to where the experts read them, unless it takes all counts to know where that is
    regions = tl.where(is_own, own_region, Region.LOW_LATENCY_ROWS)
    rows = tl.load(op.table + regions * op.WORLD_SIZE + peers).to(tl.pointer_type(tl.int32))
    sides = address_at(op, Region.LOW_LATENCY_SIDES, peers, tl.int64)
    index = rows_before_token(going, token.number, peers, op.LL.TOKEN_LANES)
    first = op.rank * op.LL.SLOTS
    slots = index + (first if op.COMPACT else tl.where(is_own, step.first_row, first))
    lines = tl.cast(slots, tl.int64)
    own_slot = reduce_max(tl.where(is_own & goes, slots, -1), 0)
    far = goes if op.COMPACT else goes & (peers != op.rank)
    return Targets(peers, index, rows + lines * op.ROW.ROW_WORDS, goes, sides + lines * side_words, far, own_slot)


@portable
def record_slots(places, token, to, op):
    """Record where a token goes and its ids [TOPK_LANES] for combine: routes of send_one_by_one (bulk_send_kernels).

    Args:
        places: OwnPlaces. token: SentToken. to: Targets.
    """
    lanes, choices = tl.arange(0, op.WORLD_LANES), tl.arange(0, op.TOPK_LANES)
    here = (to.peers[:, None] == lanes[None, :]) & to.goes[:, None]
    index = reduce_max(tl.where(here, to.index[:, None], -1), 0)
    number = tl.cast(token.number, tl.int64)
    tl.store(places.routes + number * op.WORLD_SIZE + lanes, index, mask=lanes < op.WORLD_SIZE)
    tl.store(places.sent_ids + number * op.TOPK + choices, token.ids, mask=choices < op.TOPK)


@portable
def push(words, first_word, to, op):
    """Push words of a token's row to Targets, from first_word on, past all caches of this GPU."""
    offsets = first_word + tl.arange(0, words.shape[0])
    mask = to.goes[:, None] & (offsets < op.ROW.ROW_WORDS)[None, :]
    rows = tl.multiple_of(to.rows[:, None], (16, 16))
    tl.store(rows + offsets[None, :], words[None, :], mask=mask, cache_modifier=".wt")


@portable
def push_row(x, words, token, to, op):
    """Push a token's row as it is to Targets. words: its first block. Returns whether it contains EMPTY."""
    num_empty = tl.full((), 0, tl.int32)
    for first_word in tl.static_range(0, op.ROW.ROW_WORDS, op.ROW.BLOCK_WORDS):
        if first_word > 0:
            words = load_row(x, token, token + 1, first_word, op.ROW)[0]
        push(words, first_word, to, op)
        num_empty += reduce_sum((words == EMPTY).to(tl.int32), 0)
    return num_empty > 0


@portable
def push_beside(own_lines, own_values, values, to, epoch, FIRST_WORD: tl.constexpr, COUNT: tl.constexpr, op):
    """Push COUNT values that travel beside a row to Targets.

    Those of an own row go straight to its line of `own_lines`, unless layout compact takes all counts to know where
    that is.

    Args:
        own_values: for this rank, [lanes]. values: for the ranks of all places, [PLACES or 1, lanes].
    """
    lanes = tl.arange(0, own_values.shape[0])
    mask = to.far[:, None] & (lanes < COUNT)[None, :]
    words_at = to.sides[:, None] + (FIRST_WORD + lanes)[None, :]
    tl.store(words_at, flagged(values, epoch), mask=mask, cache_modifier=".wt")
    if not op.COMPACT:
        if to.own_slot >= 0:
            line = own_lines + tl.cast(to.own_slot, tl.int64) * COUNT
            tl.store(line + lanes, own_values.to(own_lines.dtype.element_ty), mask=lanes < COUNT)


@portable
def push_position(own_positions, to, position, written_in_full, epoch, POSITION: tl.constexpr, op):
    """Push the word that says where a row comes from, behind a fence when the row could not be its own flag."""
    if not op.COMPACT:
        if to.own_slot >= 0:
            tl.store(own_positions + to.own_slot, position)
    positions = full_like(to.peers, position)
    if written_in_full:
        barrier()
        words = flagged(positions | WRITTEN_IN_FULL, epoch)
        tl.atomic_xchg(to.sides + POSITION, words, mask=to.far, sem="release", scope="sys")
    else:
        tl.store(to.sides + POSITION, flagged(positions, epoch), mask=to.far, cache_modifier=".wt")


@portable
def send_token(given, step, places, token, going, poison, masked):
    """Push a token's row and the words beside it to the ranks it goes to; nothing when poisoned.

    Args:
        given: DispatchInputs. step: DispatchStep. places: OwnPlaces. token: SentToken. going, masked: as of
            targets_of.
    """
    epoch, op = step.epoch, step.op
    to = targets_of(step, token, going, poison, masked)
    written_in_full = step.num_tokens < 0
    if op.ROW.GROUP > 0:
        words, scales = cast_row(token.tiles, given.scales, given.x.dtype.element_ty, op.ROW)
        push(words, 0, to, op)
    else:
        written_in_full = push_row(given.x, token.tiles[0], token.number, to, op)
        if op.LL.HAS_SCALES:
            lanes = tl.arange(0, op.LL.SIDE_LANES)
            line = given.scales + token.number * op.LL.SCALE_WORDS
            scales = tl.load(line + lanes, mask=lanes < op.LL.SCALE_WORDS, other=0).to(tl.int32)
    if op.LL.HAS_SCALES:
        push_beside(places.scales, scales, scales[None, :], to, epoch, 0, op.LL.SCALE_WORDS, op)
    token_ids, peers = token.ids[None, :], to.peers[:, None]
    own_ids, ids = ids_at(token.ids, op.rank, op), ids_at(token_ids, peers, op)
    push_beside(places.ids, own_ids, ids, to, epoch, op.LL.SCALE_WORDS, op.TOPK, op)
    if op.FORM.HAS_WEIGHTS:
        own_weights = weights_at(token.weights, token.ids, op.rank, op)
        weights = weights_at(token.weights[None, :], token_ids, peers, op)
        push_beside(places.weights, own_weights, weights, to, epoch, op.LL.SCALE_WORDS + op.TOPK, op.TOPK, op)
    position = step.first_position + token.number
    push_position(places.positions, to, position, written_in_full, epoch, op.LL.SCALE_WORDS + 2 * op.TOPK, op)
    record_slots(places, token, to, op)
