"""Device helpers that load what dispatch sends of a token, and cast its row."""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import scales_of
from ep_a2a.kernels.line_cast_kernels import largest_of_tiles, scaled_words
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import full_like, reduce_max

# Words that a thread loads at once of a row that is cast. It takes two such runs that follow each other: cast from two
# bytes an element, they are the 16 bytes of one store.
RUN = tl.constexpr(4)


@portable
def load_choices(ids, weights, token, end, op, HAS_WEIGHTS: tl.constexpr):
    """Load a token's expert ids and router weights, both as int32 [TOPK_LANES]; read nothing from token `end` on."""
    lanes = tl.arange(0, op.TOPK_LANES)
    where = tl.cast(token, tl.int64) * op.TOPK + lanes
    mask = (lanes < op.TOPK) & (full_like(lanes, token) < end)
    token_ids = tl.load(ids + where, mask=mask, other=-1)
    token_weights = token_ids
    if HAS_WEIGHTS:
        token_weights = tl.load(weights + where, mask=mask, other=0)
    return token_ids, token_weights


@portable
def load_line(source, token, end, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """A token's line of `source` [T, WIDTH]; nothing is read from token `end` on."""
    lanes = tl.arange(0, LANES)
    inside = (lanes < WIDTH) & (full_like(lanes, token) < end)
    return tl.load(source + tl.cast(token, tl.int64) * WIDTH + lanes, mask=inside)


@portable
def load_row(x, token, end, first_word, ROW: tl.constexpr):
    """Load BLOCK_WORDS words of a token's row, or the whole row for a cast; nothing is read from token `end` on.

    Returns:
        A tuple of one vector, or with a cast of two tiles [GROUPS_LANES, half of a group's words]: every other run of
        words, and those between.
    """
    if ROW.GROUP > 0:
        per_word: tl.constexpr = 32 // x.dtype.element_ty.primitive_bitwidth
        words: tl.constexpr = ROW.GROUP // per_word
        num_groups: tl.constexpr = ROW.ROW_WORDS * 4 // ROW.GROUP
        groups, lanes = tl.arange(0, ROW.GROUPS_LANES)[:, None], tl.arange(0, ROW.GROUP_LANES // per_word // 2)[None, :]
        line = x.to(tl.pointer_type(tl.int32)) + tl.cast(token, tl.int64) * (num_groups * words)
        line = tl.multiple_of(line, 16)
        runs = lanes // RUN * (2 * RUN) + lanes % RUN
        offsets = groups * words + runs
        inside = (groups < num_groups) & (runs < words) & (full_like(offsets, token) < end)
        tiles = tl.load(line + offsets, mask=inside, other=0), tl.load(line + (offsets + RUN), mask=inside, other=0)
    else:
        line = tl.multiple_of(x + tl.cast(token, tl.int64) * ROW.ROW_WORDS, 16)
        offsets = first_word + tl.arange(0, ROW.BLOCK_WORDS)
        inside = (offsets < ROW.ROW_WORDS) & (full_like(offsets, token) < end)
        tiles = (tl.load(line + offsets, mask=inside, other=0),)
    return tiles


@portable
def cast_row(tiles, scales, DTYPE: tl.constexpr, ROW: tl.constexpr):
    """Cast the tiles of load_row: (e4m3 words of the row, bits of the groups' scales [GROUPS_LANES]).

    scales: those that dispatch is given.
    """
    scale_bits, reciprocals = scales_of(reduce_max(largest_of_tiles(tiles, DTYPE), 1), scales, ROW.SCALING)
    even, odd = scaled_words(tiles[0], reciprocals, DTYPE), scaled_words(tiles[1], reciprocals, DTYPE)
    run: tl.constexpr = RUN * 8 // DTYPE.primitive_bitwidth
    words: tl.constexpr = ROW.GROUP_LANES // 4
    pairs = tl.reshape(tl.join(even, odd), (ROW.GROUPS_LANES, words // (2 * run), run, 2))
    if ROW.BYTE_SCALES:
        scale_bits = scale_bits >> 23
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (ROW.GROUPS_LANES * words,)), scale_bits
