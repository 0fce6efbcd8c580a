"""Device helpers of bulk dispatch that send a tile of tokens at once, a warp or several each of them.

They read from DESTINATIONS where the tokens go (routing_kernels.list_destinations). The shapes of tensors give warps
their part: Triton spreads the lanes of a warp over the dimension whose addresses follow each other, then over the
first of the others, and warps over the rest.
"""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import e4m3_bits, elements_of, magnitudes_of, scales_of
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import address, address_at, epoch_of, payload_of, reduce_max
from ep_a2a.kernels.routing_kernels import ids_at, weights_at
from ep_a2a.kernels.send_kernels import RUN


@portable
def send_beside_rows(given, step, start, last):
    """Send ids, weights and source positions of TILE.LISTED tokens from `start` on, or fewer, to all their ranks."""
    op = step.op
    slots = tl.arange(0, op.TOPK_LANES)
    most: tl.constexpr = min(op.WORLD_SIZE, op.TOPK)
    tokens = start + tl.arange(0, op.TILE.LISTED)
    listed = address(op, Region.DESTINATIONS, tl.int64)
    at = tl.cast(tokens, tl.int64)[:, None] * most + slots[None, :]
    words = tl.load(listed + at, mask=(tokens < last)[:, None] & (slots < most)[None, :], other=-1)
    goes, rows = words >= 0, payload_of(words)
    peers = tl.where(goes, epoch_of(words), op.rank)
    positions = address_at(op, Region.SOURCE_POSITIONS, peers, tl.int32) + rows
    tl.store(positions, step.first_position + tokens[:, None] + slots[None, :] * 0, mask=goes)
    offsets = tl.cast(tokens, tl.int64)[:, None] * op.TOPK + slots[None, :]
    inside = (tokens < last)[:, None] & (slots < op.TOPK)[None, :]
    cells = tl.cast(rows, tl.int64)[:, :, None] * op.TOPK + slots[None, None, :]
    reached = goes[:, :, None] & (slots < op.TOPK)[None, None, :]
    targets = address_at(op, Region.INDICES, peers, tl.int32)[:, :, None] + cells
    ids = tl.load(given.ids + offsets, mask=inside, other=-1)[:, None, :]
    tl.store(targets, ids_at(ids, peers[:, :, None], op), mask=reached)
    if op.FORM.HAS_WEIGHTS:
        targets = address_at(op, Region.WEIGHTS, peers, tl.int32)[:, :, None] + cells
        weights = tl.load(given.weights + offsets, mask=inside, other=0)[:, None, :]
        tl.store(targets, weights_at(weights, ids, peers[:, :, None], op), mask=reached)


@portable
def aims_of(step, start, last):
    """Return where a tile of tokens goes: (rows, their scales, whether there is such a rank).

    Each is a tuple with a vector [TILE.TOKENS] for each of the most ranks that a token goes to.
    """
    op = step.op
    most: tl.constexpr = min(op.WORLD_SIZE, op.TOPK)
    element: tl.constexpr = tl.uint8 if op.ROW.GROUP > 0 else tl.int32
    width: tl.constexpr = op.ROW.ROW_WORDS * 32 // element.primitive_bitwidth
    tokens = start + tl.arange(0, op.TILE.TOKENS)
    listed = address(op, Region.DESTINATIONS, tl.int64)
    row_aims, scale_aims, all_go = (), (), ()
    for place in tl.static_range(most):
        words = tl.load(listed + tl.cast(tokens, tl.int64) * most + place, mask=tokens < last, other=-1)
        goes, rows = words >= 0, tl.cast(payload_of(words), tl.int64)
        peers = tl.where(goes, epoch_of(words), op.rank)
        row_aim = address_at(op, Region.TOKENS, peers, element) + rows * width
        row_aims, all_go = row_aims + (tl.multiple_of(row_aim, 16),), all_go + (goes,)
        if op.LINE.SCALE_WIDTH > 0:
            scale_aim = address_at(op, Region.SCALES, peers, op.LINE.SCALE_DTYPE) + rows * op.LINE.SCALE_WIDTH
            scale_aims = scale_aims + (scale_aim,)
    return row_aims, scale_aims, all_go


@portable
def load_words(x, start, last, first, op):
    """Load a part of the row of each token of a tile: words [TOKENS, WORDS]."""
    tokens, words = start + tl.arange(0, op.TILE.TOKENS), first + tl.arange(0, op.TILE.WORDS)
    lines = tl.multiple_of(x + tl.cast(tokens, tl.int64) * op.ROW.ROW_WORDS, 16)
    inside = (words < op.ROW.ROW_WORDS)[None, :] & (tokens < last)[:, None]
    return tl.load(lines[:, None] + words[None, :], mask=inside)


@portable
def send_words(values, first, aims, all_go, op):
    """Send a part of each row to all ranks that its token goes to."""
    words = first + tl.arange(0, op.TILE.WORDS)
    for place in tl.static_range(min(op.WORLD_SIZE, op.TOPK)):
        mask = (words < op.ROW.ROW_WORDS)[None, :] & all_go[place][:, None]
        tl.store(aims[place][:, None] + words[None, :], values, mask=mask)


@portable
def send_given_scales(scales, start, last, aims, all_go, op):
    """Send the given scales of a tile of tokens."""
    tokens, lanes = start + tl.arange(0, op.TILE.TOKENS), tl.arange(0, op.LINE.SCALE_LANES)
    inside = (lanes < op.LINE.SCALE_WIDTH)[None, :] & (tokens < last)[:, None]
    values = tl.load(scales + tl.cast(tokens, tl.int64)[:, None] * op.LINE.SCALE_WIDTH + lanes[None, :], mask=inside)
    for place in tl.static_range(min(op.WORLD_SIZE, op.TOPK)):
        tl.store(aims[place][:, None] + lanes[None, :], values, mask=inside & all_go[place][:, None])


@portable
def load_part(x, start, last, first, op):
    """Load a part of the rows of a tile of tokens: a tuple of load_words, or with a cast load_groups."""
    if op.ROW.GROUP > 0:
        part = load_groups(x, start, last, first, op)
    else:
        part = (load_words(x, start, last, first, op),)
    return part


@portable
def load_groups(x, start, last, first, op):
    """Load a part of the row of each token of a tile, as words.

    Returns:
        Two tiles [GROUPS, TOKENS, half of a group's words]: every other run of words, and those between.
    """
    words: tl.constexpr = op.ROW.GROUP * x.dtype.element_ty.primitive_bitwidth // 32
    num_groups: tl.constexpr = op.ROW.ROW_WORDS * 4 // op.ROW.GROUP
    tokens, groups = start + tl.arange(0, op.TILE.TOKENS), first + tl.arange(0, op.TILE.GROUPS)
    lanes = tl.arange(0, words // 2)
    lines = x.to(tl.pointer_type(tl.int32)) + tl.cast(tokens, tl.int64) * (num_groups * words)
    lines = tl.multiple_of(lines, 16)[None, :, None]
    offsets = groups[:, None, None] * words + (lanes // RUN * (2 * RUN) + lanes % RUN)[None, None, :]
    inside = (groups < num_groups)[:, None, None] & (tokens < last)[None, :, None]
    return tl.load(lines + offsets, mask=inside, other=0), tl.load(lines + (offsets + RUN), mask=inside, other=0)


@portable
def maximum_of(left, right):
    """Return the magnitudes of the finite elements of two tuples of tiles, the larger one of each place."""
    largest = tl.maximum(magnitudes_of(left[0]), magnitudes_of(right[0]))
    for k in tl.static_range(1, len(left)):
        largest = tl.maximum(largest, tl.maximum(magnitudes_of(left[k]), magnitudes_of(right[k])))
    return largest


@portable
def scaled_runs(elements, reciprocals, RUNS: tl.constexpr):
    """Return scaled elements in their order, as runs [GROUPS, TOKENS, runs, elements of a run]."""
    if len(elements) == 2:
        scaled = tl.join(elements[0] * reciprocals, elements[1] * reciprocals)
    else:
        scaled = elements[0] * reciprocals
    return tl.reshape(scaled, RUNS)


@portable
def cast_groups(given, even, odd, op):
    """Cast groups of two tiles of load_groups: (fp8 bits [GROUPS, TOKENS, GROUP], scale bits [GROUPS, TOKENS])."""
    DTYPE: tl.constexpr = given.x.dtype.element_ty
    run: tl.constexpr = RUN * 32 // DTYPE.primitive_bitwidth
    runs: tl.constexpr = (op.TILE.GROUPS, op.TILE.TOKENS, op.ROW.GROUP // (2 * run), run)
    left, right = elements_of(even, DTYPE), elements_of(odd, DTYPE)
    scale_bits, reciprocals = scales_of(reduce_max(maximum_of(left, right), 2), given.scales, op.ROW.SCALING)
    reciprocals = reciprocals[:, :, None]
    pairs = tl.join(scaled_runs(left, reciprocals, runs), scaled_runs(right, reciprocals, runs))
    scaled = tl.reshape(tl.permute(pairs, (0, 1, 2, 4, 3)), (op.TILE.GROUPS, op.TILE.TOKENS, op.ROW.GROUP))
    return e4m3_bits(scaled), scale_bits


@portable
def send_groups(bits, first, aims, all_go, op):
    """Send a part of each row, fp8 bits [GROUPS, TOKENS, GROUP], to all ranks that its token goes to."""
    num_groups: tl.constexpr = op.ROW.ROW_WORDS * 4 // op.ROW.GROUP
    groups, elements = first + tl.arange(0, op.TILE.GROUPS), tl.arange(0, op.ROW.GROUP)
    offsets = groups[:, None, None] * op.ROW.GROUP + elements[None, None, :]
    for place in tl.static_range(min(op.WORLD_SIZE, op.TOPK)):
        mask = (groups < num_groups)[:, None, None] & all_go[place][None, :, None]
        tl.store(aims[place][None, :, None] + offsets, bits, mask=mask)


@portable
def send_scales(parts, first, aims, all_go, op):
    """Send the scales of a block of each row, whose parts [GROUPS, TOKENS] are two or one.

    A tensor with TILE.COPIES copies of each, of which one is stored, gives them to the warp that has the token. So
    Triton 3.6 moves them without a barrier.
    """
    block: tl.constexpr = op.TILE.GROUPS * op.TILE.PARTS
    num_groups: tl.constexpr = op.ROW.ROW_WORDS * 4 // op.ROW.GROUP
    scales = parts[0]
    if op.TILE.PARTS == 2:
        scales = tl.reshape(tl.permute(tl.join(parts[0], parts[1]), (2, 0, 1)), (block, op.TILE.TOKENS))
    if op.ROW.BYTE_SCALES:
        scales = (scales >> 23).to(tl.uint8)
    scales = tl.broadcast_to(scales[:, None, :], (block, op.TILE.COPIES, op.TILE.TOKENS))
    groups, copies = first + tl.arange(0, block), tl.arange(0, op.TILE.COPIES)
    inside = ((groups < num_groups)[:, None] & (copies == 0)[None, :])[:, :, None]
    offsets = groups[:, None, None] + copies[None, :, None] * 0
    for place in tl.static_range(min(op.WORLD_SIZE, op.TOPK)):
        tl.store(aims[place][None, None, :] + offsets, scales, mask=inside & all_go[place][None, None, :])


@portable
def send_tiles(given, step, first, last):
    """Send the rows of tokens first ... last - 1, cast to fp8 if asked, with their scales."""
    op = step.op
    casts: tl.constexpr = op.ROW.GROUP > 0
    # a part has so many groups, or words
    unit: tl.constexpr = op.TILE.GROUPS if casts else op.TILE.WORDS
    width: tl.constexpr = op.ROW.ROW_WORDS * 4 // op.ROW.GROUP if casts else op.ROW.ROW_WORDS
    block: tl.constexpr = unit * op.TILE.PARTS
    num_blocks: tl.constexpr = (width + block - 1) // block
    parts = ()
    for part in tl.static_range(op.TILE.PARTS):
        parts = parts + load_part(given.x, first, last, part * unit, op)
    for start in range(first, last, op.TILE.TOKENS):
        row_aims, scale_aims, all_go = aims_of(step, start, last)
        for number in range(num_blocks):
            # the next block is under way while this one is cast and leaves
            ends = number == num_blocks - 1
            next_start = tl.where(ends, start + op.TILE.TOKENS, start)
            next_first = tl.where(ends, 0, (number + 1) * block)
            next_parts, scales = (), ()
            for part in tl.static_range(op.TILE.PARTS):
                if casts:
                    bits, scale_bits = cast_groups(given, parts[2 * part], parts[2 * part + 1], op)
                    scales = scales + (scale_bits,)
                next_parts = next_parts + load_part(given.x, next_start, last, next_first + part * unit, op)
                if casts:
                    send_groups(bits, number * block + part * unit, row_aims, all_go, op)
                else:
                    send_words(parts[part], number * block + part * unit, row_aims, all_go, op)
            if casts and op.LINE.SCALE_WIDTH > 0:
                send_scales(scales, number * block, scale_aims, all_go, op)
            parts = next_parts
        if op.LINE.SCALE_WIDTH > 0 and not casts:
            send_given_scales(given.scales, start, last, scale_aims, all_go, op)
