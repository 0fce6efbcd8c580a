"""Device helpers that send experts' results back to where their tokens came from."""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels.cast_kernels import e4m3_bits, quantize_tile
from ep_a2a.kernels.layout import Region, State
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import EMPTY, NUM_TOKENS, address, full_like, reduce_max, reduce_sum

COMBINE_ROWS = tl.constexpr(Region.COMBINE_ROWS.value)
COMBINE_SCALES = tl.constexpr(Region.COMBINE_SCALES.value)
COMBINE_WEIGHTS = tl.constexpr(Region.COMBINE_WEIGHTS.value)
LAST_STEP_TOKENS = tl.constexpr(State.LAST_STEP_TOKENS.value)

LARGEST_INT16 = tl.constexpr((1 << 15) - 1)
LARGEST_INT32 = tl.constexpr((1 << 31) - 1)


class CombineStep(NamedTuple):
    """One combine as a program sees it.

    table: addresses (kernels/layout.py). rank: this rank. epoch: of the step. num_tokens: of this rank.
    step_tokens: the step's bound, rows per source in layout rank_major; the same on all ranks.
    M: rows that each peer may send back. counts: received rows by source [WORLD_LANES].
    signals, is_sender: whether this program exchanges flags with the peers, or sends rows.
    pause_ns: time between two looks at rows that have not arrived.
    """

    table: tl.tensor
    rank: tl.tensor
    epoch: tl.tensor
    num_tokens: tl.tensor
    step_tokens: tl.tensor
    M: tl.tensor
    counts: tl.tensor
    signals: tl.tensor
    is_sender: tl.tensor
    pause_ns: tl.tensor


class Operands(NamedTuple):
    """Tensors of a combine, as combine_kernel describes them."""

    rows: tl.tensor
    weights: tl.tensor
    result: tl.tensor
    ids: tl.tensor
    bias_0: tl.tensor
    bias_1: tl.tensor


class Share(NamedTuple):
    """A program's share of the units of work: every num_programs-th from `program` on, none where that is negative."""

    program: tl.tensor
    num_programs: tl.tensor


@portable
def never_empty(elements):
    """Return integer elements with EMPTY, which is a NaN of every float format, replaced by another NaN."""
    if elements.dtype == tl.int16:
        other = tl.full(elements.shape, LARGEST_INT16, tl.int16)
    else:
        other = tl.full(elements.shape, LARGEST_INT32, tl.int32)
    return tl.where(elements == EMPTY, other, elements)


@portable
def block_offsets(first, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr):
    """Return elements `first` and on as a tile [GROUPS_LANES, GROUP]."""
    return first + tl.arange(0, GROUPS_LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@portable
def unit_of(unit, step, NUM_BLOCKS: tl.constexpr, S: tl.constexpr, OWN_IN_PLACE: tl.constexpr):
    """Return a sender's unit of work, as an Aim.

    Rows are sent back in the order in which they lie. One row for each source in turn, beginning after this rank,
    spreads the load over the links. OWN_IN_PLACE leaves out this rank's own rows.
    """
    destinations: tl.constexpr = max(1, S.WORLD_SIZE - 1 if OWN_IN_PLACE else S.WORLD_SIZE)
    turn = unit // NUM_BLOCKS
    destination = (step.rank + 1 + turn % destinations) % S.WORLD_SIZE
    index = turn // destinations
    row = destination * step.step_tokens + index
    if S.COMPACT:
        row = reduce_sum(tl.where(tl.arange(0, S.WORLD_LANES) < destination, step.counts, 0), 0) + index
    return Aim(destination, index, row)


@portable
def load_block(rows_in, row, first, B: tl.constexpr):
    """Load one block of a row to send back; read nothing of row -1."""
    offsets = block_offsets(first, B.GROUPS_LANES, B.GROUP)
    source = tl.multiple_of(rows_in + tl.cast(row, tl.int64) * B.WIDTH, 16)
    return tl.load(source + offsets, mask=(offsets < B.WIDTH) & (full_like(offsets, row) >= 0), other=0)


class ReturnPlaces(NamedTuple):
    """Where a rank takes results: rows, and as words scales and weights."""

    rows: tl.tensor
    scales: tl.tensor
    weights: tl.tensor


class Aim(NamedTuple):
    """A sender's unit of work: a row's destination, its index among the rows from there, and its number here."""

    destination: tl.tensor
    index: tl.tensor
    row: tl.tensor


@portable
def return_places(table, destination, WORLD_SIZE: tl.constexpr, ELEMENT: tl.constexpr):
    """Return where a rank takes results (ReturnPlaces)."""
    return ReturnPlaces(
        address(table, COMBINE_ROWS, destination, WORLD_SIZE, ELEMENT),
        address(table, COMBINE_SCALES, destination, WORLD_SIZE, tl.int32),
        address(table, COMBINE_WEIGHTS, destination, WORLD_SIZE, tl.int32),
    )


@portable
def push_block(values, places, slot, first, B: tl.constexpr):
    """Send one block of a row to the rank that its token came from, cast to fp8 if asked."""
    offsets = block_offsets(first, B.GROUPS_LANES, B.GROUP)
    inside = offsets < B.WIDTH
    target = tl.multiple_of(places.rows + tl.cast(slot, tl.int64) * B.WIDTH, 16)
    if B.QUANTIZED:
        if B.SCALED:
            bits, scale_bits = quantize_tile(values.to(tl.float32), False)
            num_groups: tl.constexpr = B.WIDTH // B.GROUP
            groups = first // B.GROUP + tl.arange(0, B.GROUPS_LANES)
            scales = places.scales + tl.cast(slot, tl.int64) * num_groups
            tl.store(scales + groups, scale_bits, mask=groups < num_groups, cache_modifier=".wt")
        else:
            bits = e4m3_bits(values.to(tl.float32))
        tl.store(target + offsets, bits, mask=inside, cache_modifier=".wt")
    else:
        tl.store(target + offsets, never_empty(values), mask=inside, cache_modifier=".wt")


@portable
def first_unit(rows_in, step, share, S: tl.constexpr, B: tl.constexpr, OWN_IN_PLACE: tl.constexpr):
    """Load a sender's first block before the program waits for anything. Returns (Aim, ReturnPlaces, values).

    Counts are read only in layout compact. In the other layouts the row may be one that was not received; push_results
    compares its index with the counts before it sends.
    """
    num_blocks: tl.constexpr = (B.WIDTH + B.GROUPS_LANES * B.GROUP - 1) // (B.GROUPS_LANES * B.GROUP)
    aim = unit_of(share.program, step, num_blocks, S, OWN_IN_PLACE)
    places = return_places(step.table, aim.destination, S.WORLD_SIZE, B.ELEMENT)
    # in layout compact rows end with the last received one, so that counts decide; else there is room for all
    num_rows = step.step_tokens
    if S.COMPACT:
        num_rows = reduce_sum(tl.where(tl.arange(0, S.WORLD_LANES) == aim.destination, step.counts, 0), 0)
    known = aim.index < num_rows
    first = (share.program % num_blocks) * (B.GROUPS_LANES * B.GROUP)
    row = tl.where(known & step.is_sender, aim.row, -1)
    return aim, places, load_block(rows_in, row, first, B)


@portable
def push_results(
    first, given, step, share, S: tl.constexpr, B: tl.constexpr, HAS_WEIGHTS: tl.constexpr, OWN_IN_PLACE: tl.constexpr
):
    """Send back this program's share of the rows that this rank has received.

    Args:
        first: from first_unit. given: Operands. step: CombineStep. share: Share.
    """
    destinations: tl.constexpr = max(1, S.WORLD_SIZE - 1 if OWN_IN_PLACE else S.WORLD_SIZE)
    block: tl.constexpr = B.GROUPS_LANES * B.GROUP
    num_blocks: tl.constexpr = (B.WIDTH + block - 1) // block
    lanes = tl.arange(0, S.WORLD_LANES)
    topk_slots = tl.arange(0, S.TOPK_LANES)
    num_units = reduce_max(step.counts, 0) * (destinations * num_blocks)
    if OWN_IN_PLACE and S.WORLD_SIZE == 1:
        num_units = num_units * 0
    aim, places, values = first
    for unit in range(share.program, num_units, share.num_programs):
        is_there = aim.index < reduce_sum(tl.where(lanes == aim.destination, step.counts, 0), 0)
        following = unit + share.num_programs
        next_aim = unit_of(following, step, num_blocks, S, OWN_IN_PLACE)
        next_places = return_places(step.table, next_aim.destination, S.WORLD_SIZE, B.ELEMENT)
        next_is_there = next_aim.index < reduce_sum(tl.where(lanes == next_aim.destination, step.counts, 0), 0)
        # while this block leaves
        next_row = tl.where(next_is_there, next_aim.row, -1)
        next_values = load_block(given.rows, next_row, (following % num_blocks) * block, B)
        if is_there:
            slot = step.rank * step.M + aim.index
            push_block(values, places, slot, (unit % num_blocks) * block, B)
            if HAS_WEIGHTS:
                mask = (topk_slots < S.TOPK) & (full_like(topk_slots, unit % num_blocks) == 0)
                weights = tl.load(given.weights + tl.cast(aim.row, tl.int64) * S.TOPK + topk_slots, mask=mask, other=0)
                target = places.weights + tl.cast(slot, tl.int64) * S.TOPK
                tl.store(target + topk_slots, never_empty(weights), mask=mask, cache_modifier=".wt")
        aim, places, values = next_aim, next_places, next_values


@portable
def unlike_dispatch(state, num_tokens, step_tokens, IS_COMPACT: tl.constexpr):
    """Return a number other than 0 where a combine does not fit the dispatch before, as in a graph of other steps.

    With another number of tokens rows would be left behind that nobody takes. With another bound step_tokens, which
    says where rows lie in layouts other than compact, other rows would be read.
    """
    difference = tl.load(state + NUM_TOKENS) - num_tokens
    if not IS_COMPACT:
        difference = difference | (tl.load(state + LAST_STEP_TOKENS) - step_tokens)
    return tl.cast(difference, tl.int64)
