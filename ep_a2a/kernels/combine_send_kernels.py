"""Device helpers that send experts' results back to where their tokens came from."""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels.cast_kernels import e4m3_bits, quantize_tile
from ep_a2a.kernels.layout import Region, State
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import EMPTY, NUM_TOKENS, address, like, reduce_max, reduce_sum

COMBINE_ROWS = tl.constexpr(Region.COMBINE_ROWS.value)
COMBINE_SCALES = tl.constexpr(Region.COMBINE_SCALES.value)
COMBINE_WEIGHTS = tl.constexpr(Region.COMBINE_WEIGHTS.value)
LAST_STRIDE = tl.constexpr(State.LAST_STRIDE.value)

LARGEST_INT16 = tl.constexpr((1 << 15) - 1)
LARGEST_INT32 = tl.constexpr((1 << 31) - 1)


@portable
def never_empty(elements):
    """Integer elements with EMPTY, which is a NaN of every float format, replaced by another NaN."""
    if elements.dtype == tl.int16:
        other = tl.full(elements.shape, LARGEST_INT16, tl.int16)
    else:
        other = tl.full(elements.shape, LARGEST_INT32, tl.int32)
    return tl.where(elements == EMPTY, other, elements)


@portable
def block_offsets(first, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr):
    """Elements `first` and on as a tile [GROUPS_LANES, GROUP]."""
    return first + tl.arange(0, GROUPS_LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@portable
def unit_of(unit, counts, stride, rank, NUM_BLOCKS: tl.constexpr, S: tl.constexpr, OWN_IN_PLACE: tl.constexpr):
    """A sender's unit of work, as an Aim.

    Rows are sent back in the order in which they lie. One row for each source in turn, beginning after this rank,
    spreads the load over the links. OWN_IN_PLACE leaves out this rank's own rows.
    """
    destinations: tl.constexpr = max(1, S.WORLD_SIZE - 1 if OWN_IN_PLACE else S.WORLD_SIZE)
    turn = unit // NUM_BLOCKS
    destination = (rank + 1 + turn % destinations) % S.WORLD_SIZE
    index = turn // destinations
    row = destination * stride + index
    if S.COMPACT:
        row = reduce_sum(tl.where(tl.arange(0, S.WORLD_LANES) < destination, counts, 0), 0) + index
    return Aim(destination, index, row)


@portable
def load_block(rows_in, row, first, HIDDEN: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr):
    """One block of a row to send back; nothing is read of row -1."""
    offsets = block_offsets(first, GROUPS_LANES, GROUP)
    source = tl.multiple_of(rows_in + tl.cast(row, tl.int64) * HIDDEN, 16)
    return tl.load(source + offsets, mask=(offsets < HIDDEN) & (like(offsets, row) >= 0), other=0)


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
    """Where a rank takes results (ReturnPlaces)."""
    return ReturnPlaces(
        address(table, COMBINE_ROWS, destination, WORLD_SIZE, ELEMENT),
        address(table, COMBINE_SCALES, destination, WORLD_SIZE, tl.int32),
        address(table, COMBINE_WEIGHTS, destination, WORLD_SIZE, tl.int32),
    )


@portable
def push_block(
    values, places, slot, first, HIDDEN: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr,
    QUANTIZED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Sends one block of a row to the rank that its token came from, cast to fp8 if asked."""
    offsets = block_offsets(first, GROUPS_LANES, GROUP)
    inside = offsets < HIDDEN
    target = tl.multiple_of(places.rows + tl.cast(slot, tl.int64) * HIDDEN, 16)
    if QUANTIZED:
        if SCALED:
            bits, scale_bits = quantize_tile(values.to(tl.float32), False)
            num_groups: tl.constexpr = HIDDEN // GROUP
            groups = first // GROUP + tl.arange(0, GROUPS_LANES)
            scales = places.scales + tl.cast(slot, tl.int64) * num_groups
            tl.store(scales + groups, scale_bits, mask=groups < num_groups, cache_modifier=".wt")
        else:
            bits = e4m3_bits(values.to(tl.float32))
        tl.store(target + offsets, bits, mask=inside, cache_modifier=".wt")
    else:
        tl.store(target + offsets, never_empty(values), mask=inside, cache_modifier=".wt")


@portable
def first_unit(
    rows_in, table, counts, stride, rank, sender, is_sender, S: tl.constexpr, B: tl.constexpr,
    OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Loads a sender's first block before the program waits for anything. Returns (Aim, ReturnPlaces, values).

    Counts are read only in layout compact. In the other layouts the row may be one that was not received; push_results
    compares its index with the counts before it sends.
    """
    num_blocks: tl.constexpr = (B.WIDTH + B.GROUPS_LANES * B.GROUP - 1) // (B.GROUPS_LANES * B.GROUP)
    aim = unit_of(sender, counts, stride, rank, num_blocks, S, OWN_IN_PLACE)
    places = return_places(table, aim.destination, S.WORLD_SIZE, B.ELEMENT)
    # in layout compact rows end with the last received one, so that counts decide; else there is room for all
    num_rows = stride
    if S.COMPACT:
        num_rows = reduce_sum(tl.where(tl.arange(0, S.WORLD_LANES) == aim.destination, counts, 0), 0)
    known = aim.index < num_rows
    first = (sender % num_blocks) * (B.GROUPS_LANES * B.GROUP)
    row = tl.where(known & is_sender, aim.row, -1)
    values = load_block(rows_in, row, first, B.WIDTH, B.GROUPS_LANES, B.GROUP)
    return aim, places, values


@portable
def push_results(
    first, rows_in, weights_in, table, counts, stride, slots_per_rank, rank, sender, num_senders,
    S: tl.constexpr, B: tl.constexpr, HAS_WEIGHTS: tl.constexpr, OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Sends back this program's share of the rows that this rank has received.

    Args:
        first: from first_unit.
    """
    destinations: tl.constexpr = max(1, S.WORLD_SIZE - 1 if OWN_IN_PLACE else S.WORLD_SIZE)
    block: tl.constexpr = B.GROUPS_LANES * B.GROUP
    num_blocks: tl.constexpr = (B.WIDTH + block - 1) // block
    lanes = tl.arange(0, S.WORLD_LANES)
    topk_slots = tl.arange(0, S.TOPK_LANES)
    num_units = reduce_max(counts, 0) * (destinations * num_blocks)
    if OWN_IN_PLACE and S.WORLD_SIZE == 1:
        num_units = num_units * 0
    aim, places, values = first
    for unit in range(sender, num_units, num_senders):
        is_there = aim.index < reduce_sum(tl.where(lanes == aim.destination, counts, 0), 0)
        following = unit + num_senders
        next_aim = unit_of(following, counts, stride, rank, num_blocks, S, OWN_IN_PLACE)
        next_places = return_places(table, next_aim.destination, S.WORLD_SIZE, B.ELEMENT)
        next_is_there = next_aim.index < reduce_sum(tl.where(lanes == next_aim.destination, counts, 0), 0)
        # while this block leaves
        next_row = tl.where(next_is_there, next_aim.row, -1)
        next_first = (following % num_blocks) * block
        next_values = load_block(rows_in, next_row, next_first, B.WIDTH, B.GROUPS_LANES, B.GROUP)
        if is_there:
            slot = rank * slots_per_rank + aim.index
            push_block(
                values, places, slot, (unit % num_blocks) * block, B.WIDTH, B.GROUPS_LANES, B.GROUP, B.QUANTIZED,
                B.SCALED,
            )  # fmt: skip
            if HAS_WEIGHTS:
                mask = (topk_slots < S.TOPK) & (like(topk_slots, unit % num_blocks) == 0)
                weights = tl.load(weights_in + tl.cast(aim.row, tl.int64) * S.TOPK + topk_slots, mask=mask, other=0)
                target = places.weights + tl.cast(slot, tl.int64) * S.TOPK
                tl.store(target + topk_slots, never_empty(weights), mask=mask, cache_modifier=".wt")
        aim, places, values = next_aim, next_places, next_values


@portable
def unlike_dispatch(state, num_tokens, stride, IS_COMPACT: tl.constexpr):
    """Not 0 where a combine does not fit the dispatch before, as of a graph that was captured for other steps.

    With another number of tokens rows would be left behind that nobody takes. With another stride, which says where
    rows lie in layouts other than compact, other rows would be read.
    """
    difference = tl.load(state + NUM_TOKENS) - num_tokens
    if not IS_COMPACT:
        difference = difference | (tl.load(state + LAST_STRIDE) - stride)
    return tl.cast(difference, tl.int64)
