"""Device helpers that send experts' results back to where their tokens came from."""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.config import FP8_GROUP_SIZE
from ep_a2a.kernels.layout import Region, State
from ep_a2a.kernels.line_cast_kernels import line_words, quantize_lines
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import EMPTY, address_at, reduce_max, reduce_sum

# Elements of 2 bytes that a thread loads at once: 16 bytes, the widest load of a thread.
MOST_LOADED = tl.constexpr(8)
# Words of fp8 that share a scale.
SCALED_WORDS = tl.constexpr(FP8_GROUP_SIZE // 4)
LARGEST_INT32 = tl.constexpr((1 << 31) - 1)


class CombineStep(NamedTuple):
    """One combine as a program sees it.

    op: OpContext. epoch: of the step. num_tokens: of this rank.
    step_tokens: as in DispatchStep. M: rows that each peer may send back.
    received: region RECV_COUNTS. counts: received rows by source [WORLD_LANES].
    signals, is_sender: whether this program exchanges flags with the peers, or sends rows.
    pause_ns: time between two looks at rows that have not arrived.
    """

    op: OpContext
    epoch: tl.tensor
    num_tokens: tl.tensor
    step_tokens: tl.tensor
    M: tl.tensor
    received: tl.tensor
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
def store_result(target, words, mask, MARKED: tl.constexpr):
    """Store words of results at another rank; of MARKED rows EMPTY, whose elements are NaNs, as other NaNs."""
    if MARKED:
        words = tl.where(words == EMPTY, LARGEST_INT32, words)
    tl.store(target, words, mask=mask, cache_modifier=".wt")


@portable
def block_offsets(first, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr):
    """Return elements `first` and on as a tile [GROUPS_LANES, GROUP]."""
    return first + tl.arange(0, GROUPS_LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@portable
def unit_of(unit, step, B: tl.constexpr, OWN_IN_PLACE: tl.constexpr):
    """Return a sender's unit of work, as an Aim.

    Rows are sent back in the order in which they lie. B.ROWS rows for each source in turn, beginning after this rank,
    spread the load over the links. OWN_IN_PLACE leaves out this rank's own rows.
    """
    op = step.op
    destinations: tl.constexpr = max(1, op.WORLD_SIZE - 1 if OWN_IN_PLACE else op.WORLD_SIZE)
    block: tl.constexpr = B.GROUPS_LANES * B.GROUP
    num_blocks: tl.constexpr = (B.WIDTH + block - 1) // block
    turn = unit // num_blocks
    destination = (op.rank + 1 + turn % destinations) % op.WORLD_SIZE
    index = turn // destinations * B.ROWS
    row = first_row_from(step, destination) + index
    return Aim(destination, index, row, (unit % num_blocks) * block)


@portable
def first_row_from(step, source):
    """Return where the rows from a rank begin; without a look at memory where one bound of all ranks says it."""
    row = source * step.step_tokens
    if step.op.COMPACT or step.step_tokens < 0:
        row = tl.load(step.received + step.op.WORLD_SIZE + source)
    return row


@portable
def tile_of(first, num_rows, B: tl.constexpr):
    """Return elements `first` and on of B.ROWS rows that follow each other: tiles [.., B.GROUP].

    Returns:
        (elements before each one since the first row began, which of them belong to the first num_rows rows)
    """
    lanes = tl.arange(0, B.ROWS * B.GROUPS_LANES)
    rows = (lanes // B.GROUPS_LANES)[:, None]
    elements = first + (lanes % B.GROUPS_LANES)[:, None] * B.GROUP + tl.arange(0, B.GROUP)[None, :]
    return rows * B.WIDTH + elements, (rows < num_rows) & (elements < B.WIDTH)


@portable
def load_block(rows_in, row, num_rows, first, B: tl.constexpr):
    """Load a block of `num_rows` rows to send back, B.ROWS at most, from `row` on.

    Returns:
        Words; of QUANTIZED blocks tiles, of which each has a part of every line.
    """
    offsets, inside = tile_of(first, num_rows, B)
    if B.QUANTIZED:
        per_word: tl.constexpr = 32 // rows_in.dtype.element_ty.primitive_bitwidth
        line: tl.constexpr = 4 * B.GROUP // per_word
        part: tl.constexpr = min(MOST_LOADED // per_word, line)
        lines, there = line_starts(first, num_rows, B)
        words_in = rows_in.to(tl.pointer_type(tl.int32))
        source = tl.multiple_of(words_in + tl.cast(row, tl.int64) * (4 * B.WIDTH // per_word), 16)
        values = ()
        for at in tl.static_range(0, line, part):
            places = (lines * 4 // per_word + at)[:, None] + tl.arange(0, part)[None, :]
            values = values + (tl.load(source + places, mask=there[:, None], other=0),)
    else:
        source = tl.multiple_of(rows_in + tl.cast(row, tl.int64) * B.WIDTH, 16)
        values = tl.load(source + offsets, mask=inside, other=0)
    return values


@portable
def line_starts(first, num_rows, B: tl.constexpr):
    """Return where the lines of B.ROWS rows begin, and which of them belong to the first num_rows rows: vectors."""
    lanes = tl.arange(0, B.ROWS * B.GROUPS_LANES)
    rows, words = lanes // B.GROUPS_LANES, first + (lanes % B.GROUPS_LANES) * B.GROUP
    return rows * B.WIDTH + words, (rows < num_rows) & (words < B.WIDTH)


class ReturnPlaces(NamedTuple):
    """Where a rank takes results: rows, and as words scales and weights."""

    rows: tl.tensor
    scales: tl.tensor
    weights: tl.tensor


class Aim(NamedTuple):
    """A sender's unit of work: a block of rows that follow each other.

    destination: rank that they go back to. index: of the first among the rows from there. row: its number here.
    first: element of each row at which the block begins.
    """

    destination: tl.tensor
    index: tl.tensor
    row: tl.tensor
    first: tl.tensor


@portable
def return_places(op, destination, ELEMENT: tl.constexpr):
    """Return where a rank takes results (ReturnPlaces)."""
    return ReturnPlaces(
        address_at(op, Region.COMBINE_ROWS, destination, ELEMENT),
        address_at(op, Region.COMBINE_SCALES, destination, tl.int32),
        address_at(op, Region.COMBINE_WEIGHTS, destination, tl.int32),
    )


@portable
def push_block(values, places, slot, num_rows, first, B: tl.constexpr, DTYPE: tl.constexpr, MARKED: tl.constexpr):
    """Send a block of `num_rows` rows to the rank that their tokens came from, cast to fp8 if asked.

    Args:
        values: from load_block. DTYPE: of the elements in these words. MARKED: as in Combine.
    """
    offsets, inside = tile_of(first, num_rows, B)
    target = tl.multiple_of(places.rows + tl.cast(slot, tl.int64) * B.WIDTH, 16)
    if B.QUANTIZED:
        cast = cast_block(values, B, DTYPE)
        if B.SCALED:
            per_scale: tl.constexpr = SCALED_WORDS // B.GROUP
            lanes = tl.arange(0, B.ROWS * B.GROUPS_LANES)
            rows, lines = lanes // B.GROUPS_LANES, first // B.GROUP + lanes % B.GROUPS_LANES
            num_scales: tl.constexpr = B.WIDTH // SCALED_WORDS
            scales = places.scales + tl.cast(slot, tl.int64) * num_scales
            mask = (rows < num_rows) & (lines < B.WIDTH // B.GROUP) & (lines % per_scale == 0)
            store_result(scales + (rows * num_scales + lines // per_scale), cast[1], mask, False)
        store_result(target + offsets, cast[0], inside, False)
    else:
        store_result(target + offsets, values, inside, MARKED)


@portable
def cast_block(values, B: tl.constexpr, DTYPE: tl.constexpr):
    """Return a tuple: e4m3 words of a QUANTIZED block from load_block and, if SCALED, the bits of each line's scale."""
    if B.SCALED:
        cast = quantize_lines(values, SCALED_WORDS // B.GROUP, DTYPE)
    else:
        cast = (line_words(values, None, DTYPE),)
    return cast


@portable
def first_unit(rows_in, step, share, B: tl.constexpr, OWN_IN_PLACE: tl.constexpr):
    """Load a sender's first block before the program waits for anything. Returns (Aim, ReturnPlaces, values).

    Counts are not awaited where one bound of all ranks leaves room for rows that were not received; push_results
    compares their index with the counts before it sends.
    """
    aim = unit_of(share.program, step, B, OWN_IN_PLACE)
    places = return_places(step.op, aim.destination, B.ELEMENT)
    # elsewhere rows may end with the last received one, so that counts decide
    num_rows = step.step_tokens
    if step.op.COMPACT or step.step_tokens < 0:
        num_rows = rows_from(aim.destination, step)
    num_rows = tl.where(step.is_sender, num_rows - aim.index, 0)
    return aim, places, load_block(rows_in, aim.row, num_rows, aim.first, B)


@portable
def rows_from(source, step):
    """Return how many rows this rank has received from a rank."""
    return reduce_sum(tl.where(tl.arange(0, step.op.WORLD_LANES) == source, step.counts, 0), 0)


@portable
def push_weights_of(given, places, aim, slot, num_rows, op, B: tl.constexpr, MARKED: tl.constexpr):
    """Send the weights of a unit's rows, with the first of their blocks."""
    rows, slots = tl.arange(0, B.ROWS)[:, None], tl.arange(0, op.TOPK_LANES)[None, :]
    mask = (rows < tl.where(aim.first == 0, num_rows, 0)) & (slots < op.TOPK)
    offsets = rows * op.TOPK + slots
    weights = tl.load(given.weights + tl.cast(aim.row, tl.int64) * op.TOPK + offsets, mask=mask, other=0)
    target = places.weights + tl.cast(slot, tl.int64) * op.TOPK
    store_result(target + offsets, weights, mask, MARKED)


@portable
def push_results(first, given, step, share, B: tl.constexpr):
    """Send back this program's share of the rows that this rank has received.

    Args:
        first: from first_unit. given: Operands. step: CombineStep. share: Share.
    """
    op = step.op
    destinations: tl.constexpr = max(1, op.WORLD_SIZE - 1 if op.COMBINE.OWN_IN_PLACE else op.WORLD_SIZE)
    block: tl.constexpr = B.GROUPS_LANES * B.GROUP
    num_blocks: tl.constexpr = (B.WIDTH + block - 1) // block
    num_units = (reduce_max(step.counts, 0) + B.ROWS - 1) // B.ROWS * (destinations * num_blocks)
    if op.COMBINE.OWN_IN_PLACE and op.WORLD_SIZE == 1:
        num_units = num_units * 0
    aim, places, values = first
    num_rows = rows_from(aim.destination, step) - aim.index
    for unit in range(share.program, num_units, share.num_programs):
        next_aim = unit_of(unit + share.num_programs, step, B, op.COMBINE.OWN_IN_PLACE)
        next_places = return_places(op, next_aim.destination, B.ELEMENT)
        # while this block leaves
        next_num_rows = rows_from(next_aim.destination, step) - next_aim.index
        next_values = load_block(given.rows, next_aim.row, next_num_rows, next_aim.first, B)
        if num_rows > 0:
            slot = op.rank * step.M + aim.index
            push_block(values, places, slot, num_rows, aim.first, B, given.rows.dtype.element_ty, op.COMBINE.MARKED)
            if op.FORM.HAS_WEIGHTS:
                push_weights_of(given, places, aim, slot, num_rows, op, B, op.COMBINE.MARKED)
        aim, num_rows, places, values = next_aim, next_num_rows, next_places, next_values


@portable
def unlike_dispatch(state, num_tokens, step_tokens):
    """Return a number other than 0 where a combine does not fit the dispatch before, as in a graph of other steps.

    With another number of tokens rows would be left behind that nobody takes. With other bounds, which say how many
    rows there are and where they lie, other rows would be read.
    """
    unlike = tl.load(state + State.NUM_TOKENS) ^ num_tokens
    return tl.cast(unlike | (tl.load(state + State.LAST_STEP_TOKENS) ^ step_tokens), tl.int64)
