"""Device helpers that send experts' results back to where their tokens came from."""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import e4m3_bits, quantize_tile
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
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
def push_block(
    rows_in, table, row_in, slot, destination, first, WORLD_SIZE: tl.constexpr, HIDDEN: tl.constexpr,
    GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr, ELEMENT: tl.constexpr, QUANTIZED: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Sends one block of a row to the rank that its token came from, cast to fp8 if asked."""
    offsets = block_offsets(first, GROUPS_LANES, GROUP)
    inside = offsets < HIDDEN
    source = tl.multiple_of(rows_in + tl.cast(row_in, tl.int64) * HIDDEN, 16)
    target = address(table, COMBINE_ROWS, destination, WORLD_SIZE, ELEMENT) + tl.cast(slot, tl.int64) * HIDDEN
    target = tl.multiple_of(target, 16)
    values = tl.load(source + offsets, mask=inside, other=0)
    if QUANTIZED:
        if SCALED:
            bits, scale_bits = quantize_tile(values.to(tl.float32), False)
            num_groups: tl.constexpr = HIDDEN // GROUP
            scales = address(table, COMBINE_SCALES, destination, WORLD_SIZE, tl.int32)
            scales += tl.cast(slot, tl.int64) * num_groups
            groups = first // GROUP + tl.arange(0, GROUPS_LANES)
            tl.store(scales + groups, scale_bits, mask=groups < num_groups, cache_modifier=".wt")
        else:
            bits = e4m3_bits(values.to(tl.float32))
        tl.store(target + offsets, bits, mask=inside, cache_modifier=".wt")
    else:
        tl.store(target + offsets, never_empty(values), mask=inside, cache_modifier=".wt")


@portable
def push_results(
    rows_in, weights_in, table, counts, stride, slots_per_rank, rank, sender, num_senders,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    HIDDEN: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr, ELEMENT: tl.constexpr,
    QUANTIZED: tl.constexpr, SCALED: tl.constexpr, HAS_WEIGHTS: tl.constexpr, COMPACT: tl.constexpr,
    OWN_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """This program's share of the rows that this rank has received, sent back in the order in which they lie.

    One row for each source in turn, beginning after this rank, spreads the load over the links. OWN_IN_PLACE leaves out
    this rank's own rows.
    """
    destinations: tl.constexpr = WORLD_SIZE - 1 if OWN_IN_PLACE else WORLD_SIZE
    block: tl.constexpr = GROUPS_LANES * GROUP
    num_blocks: tl.constexpr = (HIDDEN + block - 1) // block
    lanes = tl.arange(0, WORLD_LANES)
    topk_slots = tl.arange(0, TOPK_LANES)
    for unit in range(sender, reduce_max(counts, 0) * destinations * num_blocks, num_senders):
        turn = unit // num_blocks
        destination = (rank + 1 + turn % max(1, destinations)) % WORLD_SIZE
        index = turn // max(1, destinations)
        if index < reduce_sum(tl.where(lanes == destination, counts, 0), 0):
            row_in = destination * stride + index
            if COMPACT:
                row_in = reduce_sum(tl.where(lanes < destination, counts, 0), 0) + index
            slot = rank * slots_per_rank + index
            push_block(
                rows_in, table, row_in, slot, destination, (unit % num_blocks) * block, WORLD_SIZE, HIDDEN,
                GROUPS_LANES, GROUP, ELEMENT, QUANTIZED, SCALED,
            )  # fmt: skip
            if HAS_WEIGHTS:
                mask = (topk_slots < TOPK) & (topk_slots * 0 + unit % num_blocks == 0)
                values = tl.load(weights_in + tl.cast(row_in, tl.int64) * TOPK + topk_slots, mask=mask, other=0)
                target = address(table, COMBINE_WEIGHTS, destination, WORLD_SIZE, tl.int32)
                target += tl.cast(slot, tl.int64) * TOPK
                tl.store(target + topk_slots, never_empty(values), mask=mask, cache_modifier=".wt")
