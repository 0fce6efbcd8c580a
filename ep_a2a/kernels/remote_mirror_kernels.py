"""Puts mirrors (REMOTE_MIRRORS) to the ranks that no store reaches.

Kernels store counts, flags and failures into the memory of all ranks alike. For a rank of another node the address
table leads to a mirror in this rank's memory. A small launch behind the kernel puts it where it belongs. The steps of a
program, one for each such rank:

- M1. It puts this rank's poison word, if it is set.
- M2. It puts the counts of a dispatch.
- M3. It puts the epoch of a combine's weights, then behind a fence the flag.
"""

import triton.language as tl

from ep_a2a.kernels.layout import REMOTE_MIRRORS, Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import POISON, address
from ep_a2a.kernels.put_kernels import fence, put_and_count

COUNTS = tl.constexpr(Region.COUNTS.value)
COMBINE_FLAGS = tl.constexpr(Region.COMBINE_FLAGS.value)
WEIGHT_EPOCHS = tl.constexpr(Region.WEIGHT_EPOCHS.value)
MIRROR_COUNTS = tl.constexpr(REMOTE_MIRRORS[Region.COUNTS].value)
MIRROR_COMBINE_FLAGS = tl.constexpr(REMOTE_MIRRORS[Region.COMBINE_FLAGS].value)
MIRROR_WEIGHT_EPOCHS = tl.constexpr(REMOTE_MIRRORS[Region.WEIGHT_EPOCHS].value)
MIRROR_POISON = tl.constexpr(REMOTE_MIRRORS[Region.POISON].value)
UNREAD = tl.constexpr(Region.UNREAD.value)
ELEMENTS = tl.constexpr(Region.ELEMENTS.value)


@portable
def put_mirror(
    table, region: tl.constexpr, mirror: tl.constexpr, first_byte, num_bytes: tl.constexpr, remote, rank,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Puts bytes of a mirror to the same place of the region at rank `remote`."""
    target = tl.load(table + region * WORLD_SIZE + rank) + first_byte
    source = tl.load(table + mirror * WORLD_SIZE + rank) + first_byte
    unread = tl.load(table + UNREAD * WORLD_SIZE + rank)
    put_and_count(target, source, num_bytes, unread, tl.load(table + ELEMENTS * WORLD_SIZE + remote))


@portable(do_not_specialize=["rank"])
def put_mirrors_kernel(
    table, rank, GPUS: tl.constexpr, WORLD_SIZE: tl.constexpr, TELLS_COUNTS: tl.constexpr, TELLS_FLAGS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Puts this rank's mirrors to one rank of another node; a program each. Failures are always put.

    Args:
        TELLS_COUNTS: how many rows this rank sends. TELLS_FLAGS: that it has begun a combine, HAS_WEIGHTS with weights.
    """
    remote = ((rank // GPUS + 1) * GPUS + tl.program_id(0)) % WORLD_SIZE
    # M1
    if tl.load(address(table, MIRROR_POISON, rank, WORLD_SIZE, tl.int32)) != 0:
        put_mirror(table, POISON, MIRROR_POISON, 0, 4, remote, rank, WORLD_SIZE)
    # M2
    if TELLS_COUNTS:
        # flagged words, which need no order
        line_bytes: tl.constexpr = (WORLD_SIZE + 2) * 8
        put_mirror(table, COUNTS, MIRROR_COUNTS, rank * line_bytes, line_bytes, remote, rank, WORLD_SIZE)
    # M3
    if TELLS_FLAGS:
        if HAS_WEIGHTS:
            put_mirror(table, WEIGHT_EPOCHS, MIRROR_WEIGHT_EPOCHS, rank * 4, 4, remote, rank, WORLD_SIZE)
            fence()
        put_mirror(table, COMBINE_FLAGS, MIRROR_COMBINE_FLAGS, rank * 4, 4, remote, rank, WORLD_SIZE)
