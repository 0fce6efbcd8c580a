"""Device code of the benchmark's MoE layer between its fp8 matrix products; the kernels skip missing rows.

Only the device knows the number of a rank's (row, expert) pairs. These kernels read it there; torch's own ops would
work on the largest possible number of pairs.
"""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import FP8_MAX, MIN_AMAX, e4m3_bits, magnitudes_of, round_to, scales_of
from ep_a2a.kernels.constants import FULL_SCALES
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import reduce_max, reduce_sum, running_sum


@portable(do_not_specialize=["first_expert", "num_pairs"])
def count_pairs_kernel(ids, counts, positions, first_expert, num_pairs, NUM_LOCAL: tl.constexpr, BLOCK: tl.constexpr):
    """positions[pair] = number of the pair among those of its expert, in any order; -1 for other ranks' experts.

    counts[expert] grows by the pairs of each own expert.
    """
    for first in range(tl.program_id(0) * BLOCK, num_pairs, tl.num_programs(0) * BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        inside = pairs < num_pairs
        expert = tl.load(ids + pairs, mask=inside, other=-1) - first_expert
        own = inside & (expert >= 0) & (expert < NUM_LOCAL)
        position = tl.atomic_add(counts + expert, 1, mask=own, sem="relaxed")
        tl.store(positions + pairs, tl.where(own, position, -1), mask=inside)


@portable
def quantize_tile(values, given, SCALING: tl.constexpr):
    """Quantises a float32 tile [groups, elements]: (fp8 bits uint8 of the same shape, scale bits int32 [groups]).

    given, SCALING: as of scales_of.
    """
    scale_bits, reciprocals = scales_of(reduce_max(magnitudes_of(values), 1), given, SCALING)
    return e4m3_bits(values * reciprocals[:, None]), scale_bits


@portable
def quantize_whole(values):
    """Quantises a float32 tile [., .] with one scale: (fp8 bits uint8 of the same shape, the scale float32 [1])."""
    largest = reduce_max(reduce_max(tl.abs(values), 1)[:, None], 0)
    scale = tl.div_rn(tl.maximum(largest, MIN_AMAX), tl.full((1,), FP8_MAX, tl.float32))
    reciprocal = tl.div_rn(tl.full((1,), 1.0, tl.float32), scale)
    return e4m3_bits(values * reciprocal[:, None]), scale


@portable(do_not_specialize=["first_expert", "num_rows"])
def scatter_rows_kernel(
    rows,
    scales,
    ids,
    weights,
    positions,
    starts,
    slots,
    inputs,
    input_scales,
    slot_weights,
    first_expert,
    num_rows,
    TOPK: tl.constexpr,
    TOPK_LANES: tl.constexpr,
    HIDDEN: tl.constexpr,
    GROUPS_LANES: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Casts each row to fp8 with one scale and copies it to the slot of each of its own experts.

    The slot of pair (row, k) is starts[expert] + positions[pair], or -1; slots gets it, slot_weights the weight there.
    """
    ks = tl.arange(0, TOPK_LANES)
    groups = tl.arange(0, GROUPS_LANES)
    elements = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = elements < HIDDEN
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        pairs = row * TOPK + ks
        valid = ks < TOPK
        position = tl.load(positions + pairs, mask=valid, other=-1)
        own = position >= 0
        expert = tl.load(ids + pairs, mask=own, other=0) - first_expert
        slot = tl.where(own, tl.load(starts + expert, mask=own, other=0) + position, -1)
        tl.store(slots + pairs, slot, mask=valid)
        tl.store(slot_weights + slot, tl.load(weights + pairs, mask=own, other=0.0), mask=own)
        if reduce_max(slot, 0) >= 0:
            line = tl.cast(row, tl.int64) * HIDDEN
            values = tl.where(inside, tl.load(rows + line + elements, mask=inside).to(tl.float32), 0.0)
            if HAS_SCALES:
                row_scales = scales + tl.cast(row, tl.int64) * (HIDDEN // GROUP) + groups
                values *= tl.load(row_scales, mask=groups < HIDDEN // GROUP, other=0.0)[:, None]
            bits, scale = quantize_whole(values)
            for k in tl.static_range(TOPK):
                target = reduce_max(tl.where(ks == k, slot, -1), 0)
                if target >= 0:
                    tl.store(inputs + tl.cast(target, tl.int64) * HIDDEN + elements, bits, mask=inside)
                    tl.store(input_scales + target + tl.arange(0, 1), scale)


@portable(do_not_specialize=["num_experts"])
def grouped_product_kernel(
    rows,
    row_scales,
    matrices,
    matrix_scales,
    bounds,
    out,
    num_experts,
    EXPERT_LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """out[slot] = rows[slot] times the matrix [WIDTH, DEPTH] of its expert transposed, times both scales, in bf16.

    Slots bounds[e] ... bounds[e + 1] - 1 are expert e's. A program takes every num_programs-th tile [ROWS, COLUMNS].
    """
    experts = tl.arange(0, EXPERT_LANES)
    own = experts < num_experts
    starts = tl.load(bounds + experts, mask=own, other=0)
    row_tiles = (tl.load(bounds + experts + 1, mask=own, other=0) - starts + ROWS - 1) // ROWS
    ends = running_sum(row_tiles * (WIDTH // COLUMNS), 0)
    for tile in range(tl.program_id(0), reduce_max(ends, 0), tl.num_programs(0)):
        before = ends <= tile
        expert = reduce_sum(before.to(tl.int32), 0)
        first = reduce_max(tl.where(before, ends, 0), 0)
        start = tl.load(bounds + expert)
        num_rows = tl.load(bounds + expert + 1) - start
        num_row_tiles = (num_rows + ROWS - 1) // ROWS
        row = (tile - first) % num_row_tiles * ROWS + tl.arange(0, ROWS)
        column = (tile - first) // num_row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, STEP)
        inside = row < num_rows
        slot = tl.cast(start, tl.int64) + row
        output = tl.cast(expert, tl.int64) * WIDTH + column
        left = rows + slot[:, None] * DEPTH + depth[None, :]
        right = matrices + output[:, None] * DEPTH + depth[None, :]
        total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for _ in range(0, DEPTH, STEP):
            values = tl.load(left, mask=inside[:, None], other=0.0)
            total = tl.dot(values, tl.trans(tl.load(right)), total)
            left += STEP
            right += STEP
        total *= tl.load(row_scales + slot, mask=inside, other=0.0)[:, None] * tl.load(matrix_scales + output)[None, :]
        where = out + slot[:, None] * WIDTH + column[None, :]
        tl.store(where, round_to(total, tl.bfloat16), mask=inside[:, None])


@portable
def swiglu_kernel(
    projected, slot_weights, count, activated, activated_scales, WIDTH: tl.constexpr, LANES: tl.constexpr
):
    """activated[slot] = silu(gate) * up * router weight in fp8 with one scale, for slot < count with a weight >= 0.

    projected[slot] is gate and up side by side.
    """
    elements = tl.arange(0, LANES)[None, :]
    inside = elements < WIDTH
    for slot in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        weight = tl.load(slot_weights + slot)
        if weight >= 0:
            line = projected + tl.cast(slot, tl.int64) * (2 * WIDTH)
            gate = tl.load(line + elements, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(line + WIDTH + elements, mask=inside, other=0.0).to(tl.float32)
            bits, scale = quantize_whole(gate / (1.0 + tl.exp(-gate)) * up * weight)
            tl.store(activated + tl.cast(slot, tl.int64) * WIDTH + elements, bits, mask=inside)
            tl.store(activated_scales + slot + tl.arange(0, 1), scale)


@portable(do_not_specialize=["num_rows"])
def sum_rows_kernel(contributions, slots, out, num_rows, TOPK: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = sum of contributions[slots[row, k]] over the slots that are not -1, in float32, rounded to bf16."""
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        for first in tl.static_range(0, HIDDEN, BLOCK):
            elements = first + tl.arange(0, BLOCK)
            inside = elements < HIDDEN
            total = tl.full((BLOCK,), 0.0, tl.float32)
            for k in tl.static_range(TOPK):
                slot = tl.load(slots + row * TOPK + k)
                # a vector of the slot: the interpreter mistypes a scalar condition that meets a vector
                present = inside & (slot + elements * 0 >= 0)
                line = contributions + tl.cast(slot, tl.int64) * HIDDEN
                total += tl.load(line + elements, mask=present, other=0.0).to(tl.float32)
            target = out + tl.cast(row, tl.int64) * HIDDEN + elements
            tl.store(target, round_to(total, tl.bfloat16), mask=inside)


@portable(do_not_specialize=["num_rows"])
def quantize_rows_kernel(
    rows, quantized, scales, num_rows, GROUPS: tl.constexpr, GROUPS_LANES: tl.constexpr, GROUP: tl.constexpr
):
    """The cast of dispatch as a launch of its own, for libraries that want tokens cast before."""
    groups = tl.arange(0, GROUPS_LANES)
    inside = groups < GROUPS
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        where = tl.cast(row, tl.int64) * GROUPS + groups
        elements = where[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = inside[:, None] & (tl.arange(0, GROUP)[None, :] < GROUP)
        values = tl.load(rows + elements, mask=mask, other=0.0).to(tl.float32)
        bits, scale_bits = quantize_tile(values, None, FULL_SCALES)
        tl.store(quantized + elements, bits, mask=mask)
        tl.store(scales + where, scale_bits, mask=inside)
