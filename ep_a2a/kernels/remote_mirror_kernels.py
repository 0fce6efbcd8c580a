"""Puts mirrors (REMOTE_MIRRORS) to the ranks that no store reaches.

Kernels store counts, flags and failures into the memory of all ranks alike. For a rank of another node the address
table leads to a mirror in this rank's memory. A small launch behind the kernel puts it where it belongs. The steps of a
program, one for each such rank:

- M1. It puts this rank's poison word, if it is set.
- M2. It puts the counts of a dispatch.
- M3. It puts the epoch of a combine's weights, then behind a fence the flag.
"""

import triton.language as tl

from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import address
from ep_a2a.kernels.put_kernels import fence, put_and_count


@portable
def put_mirror(op, region: tl.constexpr, mirror: tl.constexpr, first_byte, num_bytes: tl.constexpr, remote):
    """Puts bytes of a mirror to the same place of the region at rank `remote`."""
    target = tl.load(op.table + region * op.WORLD_SIZE + op.rank) + first_byte
    source = tl.load(op.table + mirror * op.WORLD_SIZE + op.rank) + first_byte
    unread = tl.load(op.table + Region.UNREAD * op.WORLD_SIZE + op.rank)
    put_and_count(target, source, num_bytes, unread, tl.load(op.table + Region.ELEMENTS * op.WORLD_SIZE + remote))


@portable(do_not_specialize=["rank"])
def put_mirrors_kernel(
    table, rank, GPUS: tl.constexpr, S: tl.constexpr, TELLS_COUNTS: tl.constexpr, TELLS_FLAGS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Puts this rank's mirrors to one rank of another node; a program each. Failures are always put.

    Args:
        GPUS: ranks of a node. S: Shape. TELLS_COUNTS: how many rows this rank sends. TELLS_FLAGS: that it has begun a
            combine, HAS_WEIGHTS with weights.
    """
    op = OpContext(table, rank, S)
    remote = ((rank // GPUS + 1) * GPUS + tl.program_id(0)) % S.WORLD_SIZE
    # M1
    if tl.load(address(op, Region.MIRROR_POISON, tl.int32)) != 0:
        put_mirror(op, Region.POISON, Region.MIRROR_POISON, 0, 4, remote)
    # M2
    if TELLS_COUNTS:
        # flagged words, which need no order
        line_bytes: tl.constexpr = (S.WORLD_SIZE + 2) * 8
        put_mirror(op, Region.COUNTS, Region.MIRROR_COUNTS, rank * line_bytes, line_bytes, remote)
    # M3
    if TELLS_FLAGS:
        if HAS_WEIGHTS:
            put_mirror(op, Region.WEIGHT_EPOCHS, Region.MIRROR_WEIGHT_EPOCHS, rank * 4, 4, remote)
            fence()
        put_mirror(op, Region.COMBINE_FLAGS, Region.MIRROR_COMBINE_FLAGS, rank * 4, 4, remote)
