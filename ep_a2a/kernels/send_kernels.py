"""Device helpers that write one token's row and what belongs to it into the memory of the ranks it goes to."""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import quantize_tile
from ep_a2a.kernels.constants import GIVEN_SCALE
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import address, full_like, reduce_sum
from ep_a2a.kernels.routing_kernels import field_of

TOKENS = tl.constexpr(Region.TOKENS.value)
SCALES = tl.constexpr(Region.SCALES.value)


@portable
def first_rows_of(bases, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """A vector [WORLD_LANES] over ranks as a tuple of scalars that begins with this rank."""
    lanes = tl.arange(0, WORLD_LANES)
    first_rows = ()
    for step in tl.static_range(WORLD_SIZE):
        first_rows = first_rows + (reduce_sum(tl.where(lanes == (rank + step) % WORLD_SIZE, bases, 0), 0),)
    return first_rows


@portable
def rows_of(before, own, first_rows, row_limit, rank, WORLD_SIZE: tl.constexpr, COUNT_BITS: tl.constexpr):
    """A token's row at every rank, -1 for none, as a tuple that begins with this rank.

    Beginning elsewhere on each rank spreads the load over the links.

    Args:
        before: fields (routing_kernels), rows per rank of the tokens before it; own: of the token itself.
        first_rows: where this rank's rows begin at every rank, a tuple of the same order.
        row_limit: rows at or beyond it do not exist.
    """
    rows = ()
    for step in tl.static_range(WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        row = first_rows[step] + field_of(before, peer, WORLD_SIZE, COUNT_BITS)
        goes = field_of(own, peer, WORLD_SIZE, COUNT_BITS) > 0
        rows = rows + (tl.where(goes & (row < row_limit), row, -1),)
    return rows


@portable
def targets_of(
    table, region: tl.constexpr, rows, rank, WIDTH: tl.constexpr, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr
):
    """Where those rows of a region with WIDTH elements per row begin, in the same order."""
    targets = ()
    # the hint must be given here: on the result of a call it would be lost
    aligned: tl.constexpr = 16 if WIDTH * DTYPE.primitive_bitwidth % 128 == 0 else 1
    for step in tl.static_range(WORLD_SIZE):
        base = address(table, region, (rank + step) % WORLD_SIZE, WORLD_SIZE, DTYPE)
        targets = targets + (tl.multiple_of(base + tl.cast(rows[step], tl.int64) * WIDTH, aligned),)
    return targets


@portable
def store_at_all(targets, rows, offsets, values, mask, WORLD_SIZE: tl.constexpr):
    """Writes values to every rank that the token goes to."""
    for step in tl.static_range(WORLD_SIZE):
        if rows[step] >= 0:
            tl.store(targets[step] + offsets, values, mask=mask)


@portable
def load_choices(ids, weights, token, end, S: tl.constexpr, HAS_WEIGHTS: tl.constexpr):
    """Load a token's expert ids and router weights, both as int32 [TOPK_LANES]; read nothing from token `end` on."""
    lanes = tl.arange(0, S.TOPK_LANES)
    where = tl.cast(token, tl.int64) * S.TOPK + lanes
    mask = (lanes < S.TOPK) & (full_like(lanes, token) < end)
    token_ids = tl.load(ids + where, mask=mask, other=-1)
    token_weights = token_ids
    if HAS_WEIGHTS:
        token_weights = tl.load(weights + where, mask=mask, other=0)
    return token_ids, token_weights


@portable
def load_line(source, token, end, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """A token's line of `source` [T, WIDTH]; nothing is read from token `end` on."""
    lanes = tl.arange(0, LANES)
    return tl.load(
        source + tl.cast(token, tl.int64) * WIDTH + lanes, mask=(lanes < WIDTH) & (full_like(lanes, token) < end)
    )


@portable
def send_payload(
    x, table, token, rows, rank, WORLD_SIZE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr
):
    """Sends a token's row as 4-byte words; each word is read once."""
    targets = targets_of(table, TOKENS, rows, rank, ROW_WORDS, WORLD_SIZE, tl.int32)
    source = tl.multiple_of(x + tl.cast(token, tl.int64) * ROW_WORDS, 16)
    for first_word in tl.static_range(0, ROW_WORDS, BLOCK_WORDS):
        words = first_word + tl.arange(0, BLOCK_WORDS)
        data = tl.load(source + words, mask=words < ROW_WORDS)
        for step in tl.static_range(WORLD_SIZE):
            if rows[step] >= 0:
                tl.store(targets[step] + words, data, mask=words < ROW_WORDS)


@portable
def copy_row(x, token, target, ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr):
    """Copies a token's row of 4-byte words to `target`."""
    source = tl.multiple_of(x + tl.cast(token, tl.int64) * ROW_WORDS, 16)
    for first_word in tl.static_range(0, ROW_WORDS, BLOCK_WORDS):
        words = first_word + tl.arange(0, BLOCK_WORDS)
        tl.store(target + words, tl.load(source + words, mask=words < ROW_WORDS), mask=words < ROW_WORDS)


@portable
def load_for_cast(
    x, token, end, HIDDEN: tl.constexpr, GROUP: tl.constexpr, GROUP_LANES: tl.constexpr, GROUPS_LANES: tl.constexpr
):
    """A token's row as a tile [groups, elements]; zeros from token `end` on, which is not read."""
    groups = tl.arange(0, GROUPS_LANES)
    elements = tl.arange(0, GROUP_LANES)
    mask = (groups < HIDDEN // GROUP)[:, None] & (elements < GROUP)[None, :]
    row_start = tl.multiple_of(x + tl.cast(token, tl.int64) * HIDDEN, 16)
    offsets = groups[:, None] * GROUP + elements[None, :]
    return tl.load(row_start + offsets, mask=mask & (full_like(offsets, token) < end), other=0.0)


@portable
def load_tile(x, token, end, ROW: tl.constexpr):
    """load_for_cast of the rows that are described by ROW."""
    return load_for_cast(x, token, end, ROW.ROW_WORDS * 4, ROW.GROUP, ROW.GROUP_LANES, ROW.GROUPS_LANES)


@portable
def send_quantized(
    values, scales, scale_targets, table, rows, rank, WORLD_SIZE: tl.constexpr, ROW: tl.constexpr
):  # fmt: skip
    """Casts a row's tile to fp8 and sends bytes and scales. scales: those that dispatch is given."""
    groups = tl.arange(0, ROW.GROUPS_LANES)
    elements = tl.arange(0, ROW.GROUP_LANES)
    num_groups: tl.constexpr = ROW.ROW_WORDS * 4 // ROW.GROUP
    offsets = groups[:, None] * ROW.GROUP + elements[None, :]
    mask = (groups < num_groups)[:, None] & (elements < ROW.GROUP)[None, :]
    targets = targets_of(table, TOKENS, rows, rank, ROW.ROW_WORDS * 4, WORLD_SIZE, tl.uint8)
    bits, scale_bits = quantize_tile(values, scales, ROW.SCALING)
    for step in tl.static_range(WORLD_SIZE):
        if rows[step] >= 0:
            tl.store(targets[step] + offsets, bits, mask=mask)
    if ROW.BYTE_SCALES:
        store_at_all(scale_targets, rows, groups, (scale_bits >> 23).to(tl.uint8), groups < num_groups, WORLD_SIZE)
    elif ROW.SCALING != GIVEN_SCALE:
        store_at_all(scale_targets, rows, groups, scale_bits, groups < num_groups, WORLD_SIZE)
