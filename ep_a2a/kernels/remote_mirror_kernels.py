"""Tells ranks that only puts reach what kernels have written for them into copies of this rank's own (FAR_COPIES).

Kernels store what every rank is to know (counts, flags, failures) into all ranks' memory alike; the address table leads
those for ranks out of reach to one copy, which a small launch behind the kernel puts where it belongs.
"""

import triton.language as tl

from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import FAR_COPIES, Region
from ep_a2a.kernels.primitives import POISON, address
from ep_a2a.kernels.put_kernels import fence, put_and_count

COUNTS = tl.constexpr(Region.COUNTS.value)
COMBINE_FLAGS = tl.constexpr(Region.COMBINE_FLAGS.value)
WEIGHT_EPOCHS = tl.constexpr(Region.WEIGHT_EPOCHS.value)
FAR_COUNTS = tl.constexpr(FAR_COPIES[Region.COUNTS].value)
FAR_COMBINE_FLAGS = tl.constexpr(FAR_COPIES[Region.COMBINE_FLAGS].value)
FAR_WEIGHT_EPOCHS = tl.constexpr(FAR_COPIES[Region.WEIGHT_EPOCHS].value)
FAR_POISON = tl.constexpr(FAR_COPIES[Region.POISON].value)
FAR_UNREAD = tl.constexpr(Region.FAR_UNREAD.value)
ELEMENTS = tl.constexpr(Region.ELEMENTS.value)


@portable
def put_copy(
    table, region: tl.constexpr, copy: tl.constexpr, first_byte, num_bytes: tl.constexpr, far, rank,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Puts bytes of a copy to the same place of the region at rank `far`."""
    target = tl.load(table + region * WORLD_SIZE + rank) + first_byte
    source = tl.load(table + copy * WORLD_SIZE + rank) + first_byte
    unread = tl.load(table + FAR_UNREAD * WORLD_SIZE + rank)
    put_and_count(target, source, num_bytes, unread, tl.load(table + ELEMENTS * WORLD_SIZE + far))


@portable(do_not_specialize=["rank"])
def tell_far_kernel(
    table, rank, GPUS: tl.constexpr, WORLD_SIZE: tl.constexpr, TELLS_COUNTS: tl.constexpr, TELLS_FLAGS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Tells one rank of another node; a program each. Failures are always told.

    Args:
        TELLS_COUNTS: how many rows this rank sends. TELLS_FLAGS: that it has begun a combine, HAS_WEIGHTS with weights.
    """
    far = ((rank // GPUS + 1) * GPUS + tl.program_id(0)) % WORLD_SIZE
    if tl.load(address(table, FAR_POISON, rank, WORLD_SIZE, tl.int32)) != 0:
        put_copy(table, POISON, FAR_POISON, 0, 4, far, rank, WORLD_SIZE)
    if TELLS_COUNTS:
        # flagged words, which need no order
        line_bytes: tl.constexpr = (WORLD_SIZE + 1) * 8
        put_copy(table, COUNTS, FAR_COUNTS, rank * line_bytes, line_bytes, far, rank, WORLD_SIZE)
    if TELLS_FLAGS:
        if HAS_WEIGHTS:
            put_copy(table, WEIGHT_EPOCHS, FAR_WEIGHT_EPOCHS, rank * 4, 4, far, rank, WORLD_SIZE)
            fence()
        put_copy(table, COMBINE_FLAGS, FAR_COMBINE_FLAGS, rank * 4, 4, far, rank, WORLD_SIZE)
