"""Device helpers that send experts' results back to where their tokens came from."""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import e4m3_bits, quantize_tile
from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.primitives import EMPTY, address, reduce_max, reduce_sum

COMBINE_ROWS = tl.constexpr(Region.COMBINE_ROWS.value)
COMBINE_SCALES = tl.constexpr(Region.COMBINE_SCALES.value)
COMBINE_WEIGHTS = tl.constexpr(Region.COMBINE_WEIGHTS.value)

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
def unit_of(
    unit, counts, stride, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    COMPACT: tl.constexpr, OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """(destination, index of the row among those from there, the row's number here) of a sender's unit of work.

    Rows are sent back in the order in which they lie. One row for each source in turn, beginning after this rank,
    spreads the load over the links. OWN_IN_PLACE leaves out this rank's own rows.
    """
    destinations: tl.constexpr = max(1, WORLD_SIZE - 1 if OWN_IN_PLACE else WORLD_SIZE)
    turn = unit // NUM_BLOCKS
    destination = (rank + 1 + turn % destinations) % WORLD_SIZE
    index = turn // destinations
    row = destination * stride + index
    if COMPACT:
        row = reduce_sum(tl.where(tl.arange(0, WORLD_LANES) < destination, counts, 0), 0) + index
    return destination, index, row


@portable
def load_block(rows_in, row, first, HIDDEN: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr):
    """One block of a row to send back; nothing is read of row -1."""
    offsets = block_offsets(first, GROUPS_LANES, GROUP)
    source = tl.multiple_of(rows_in + tl.cast(row, tl.int64) * HIDDEN, 16)
    return tl.load(source + offsets, mask=(offsets < HIDDEN) & (offsets * 0 + row >= 0), other=0)


@portable
def return_places(table, destination, WORLD_SIZE: tl.constexpr, ELEMENT: tl.constexpr):
    """Where a rank takes results: (rows, scales as words, weights as words)."""
    return (
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
    target = tl.multiple_of(places[0] + tl.cast(slot, tl.int64) * HIDDEN, 16)
    if QUANTIZED:
        if SCALED:
            bits, scale_bits = quantize_tile(values.to(tl.float32), False)
            num_groups: tl.constexpr = HIDDEN // GROUP
            groups = first // GROUP + tl.arange(0, GROUPS_LANES)
            scales = places[1] + tl.cast(slot, tl.int64) * num_groups
            tl.store(scales + groups, scale_bits, mask=groups < num_groups, cache_modifier=".wt")
        else:
            bits = e4m3_bits(values.to(tl.float32))
        tl.store(target + offsets, bits, mask=inside, cache_modifier=".wt")
    else:
        tl.store(target + offsets, never_empty(values), mask=inside, cache_modifier=".wt")


@portable
def first_unit(
    rows_in, table, counts, stride, rank, sender, is_sender, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    HIDDEN: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr, ELEMENT: tl.constexpr,
    COMPACT: tl.constexpr, OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """What a sender sends first and where, asked for before anything has been waited for: (unit_of, places, values).

    But in layout compact, the values may be those of a row that was not received: the counts need not be there yet.
    """
    num_blocks: tl.constexpr = (HIDDEN + GROUPS_LANES * GROUP - 1) // (GROUPS_LANES * GROUP)
    aim = unit_of(sender, counts, stride, rank, WORLD_SIZE, WORLD_LANES, num_blocks, COMPACT, OWN_IN_PLACE)
    destination, index, row = aim
    places = return_places(table, destination, WORLD_SIZE, ELEMENT)
    # in layout compact rows end with the last received one, so that counts decide; else there is room for all
    num_rows = stride
    if COMPACT:
        num_rows = reduce_sum(tl.where(tl.arange(0, WORLD_LANES) == destination, counts, 0), 0)
    known = index < num_rows
    first = (sender % num_blocks) * (GROUPS_LANES * GROUP)
    values = load_block(rows_in, tl.where(known & is_sender, row, -1), first, HIDDEN, GROUPS_LANES, GROUP)
    return aim, places, values


@portable
def push_results(
    first, rows_in, weights_in, table, counts, stride, slots_per_rank, rank, sender, num_senders,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    HIDDEN: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr, ELEMENT: tl.constexpr,
    QUANTIZED: tl.constexpr, SCALED: tl.constexpr, HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr,
    OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Sends back this program's share of the rows that this rank has received.

    Args:
        first: from first_unit.
    """
    destinations: tl.constexpr = max(1, WORLD_SIZE - 1 if OWN_IN_PLACE else WORLD_SIZE)
    block: tl.constexpr = GROUPS_LANES * GROUP
    num_blocks: tl.constexpr = (HIDDEN + block - 1) // block
    lanes = tl.arange(0, WORLD_LANES)
    topk_slots = tl.arange(0, TOPK_LANES)
    num_units = reduce_max(counts, 0) * (destinations * num_blocks)
    if OWN_IN_PLACE and WORLD_SIZE == 1:
        num_units = num_units * 0
    aim, places, values = first
    destination, index, row = aim
    for unit in range(sender, num_units, num_senders):
        is_there = index < reduce_sum(tl.where(lanes == destination, counts, 0), 0)
        following = unit + num_senders
        next_destination, next_index, next_row = unit_of(
            following, counts, stride, rank, WORLD_SIZE, WORLD_LANES, num_blocks, COMPACT, OWN_IN_PLACE
        )  # fmt: skip
        next_places = return_places(table, next_destination, WORLD_SIZE, ELEMENT)
        next_is_there = next_index < reduce_sum(tl.where(lanes == next_destination, counts, 0), 0)
        # while this block leaves
        next_values = load_block(
            rows_in, tl.where(next_is_there, next_row, -1), (following % num_blocks) * block, HIDDEN, GROUPS_LANES,
            GROUP,
        )  # fmt: skip
        if is_there:
            slot = rank * slots_per_rank + index
            push_block(
                values, places, slot, (unit % num_blocks) * block, HIDDEN, GROUPS_LANES, GROUP, QUANTIZED, SCALED
            )
            if HAS_WEIGHTS:
                mask = (topk_slots < TOPK) & (topk_slots * 0 + unit % num_blocks == 0)
                weights = tl.load(weights_in + tl.cast(row, tl.int64) * TOPK + topk_slots, mask=mask, other=0)
                target = places[2] + tl.cast(slot, tl.int64) * TOPK
                tl.store(target + topk_slots, never_empty(weights), mask=mask, cache_modifier=".wt")
        destination, index, row, places, values = next_destination, next_index, next_row, next_places, next_values
