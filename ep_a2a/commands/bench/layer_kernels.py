"""Device code of the benchmark's MoE layer between its matrix products; the kernels skip missing rows.

Only the device knows the number of a rank's (row, expert) pairs. These kernels read it there; torch's own ops would
work on the largest possible number of pairs.
"""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import quantize_tile, round_to
from ep_a2a.kernels.portable import portable


@portable
def gather_rows_kernel(
    rows,
    scales,
    pairs,
    count,
    out,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[slot] = rows[pairs[slot] // TOPK], times its scales where GROUP is not 0, in bf16, for slot < count."""
    for slot in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        row = tl.cast(tl.load(pairs + slot) // TOPK, tl.int64)
        for first in tl.static_range(0, HIDDEN, BLOCK):
            elements = first + tl.arange(0, BLOCK)
            inside = elements < HIDDEN
            values = tl.load(rows + row * HIDDEN + elements, mask=inside).to(tl.float32)
            if GROUP:
                values *= tl.load(scales + row * (HIDDEN // GROUP) + elements // GROUP, mask=inside)
            target = out + tl.cast(slot, tl.int64) * HIDDEN + elements
            tl.store(target, round_to(values, tl.bfloat16), mask=inside)


@portable
def swiglu_kernel(projected, weights, pairs, count, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out[slot] = silu(gate) * up * router weight, where projected[slot] is gate and up side by side."""
    for slot in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        weight = tl.load(weights + tl.load(pairs + slot))
        line = projected + tl.cast(slot, tl.int64) * (2 * WIDTH)
        for first in tl.static_range(0, WIDTH, BLOCK):
            elements = first + tl.arange(0, BLOCK)
            inside = elements < WIDTH
            gate = tl.load(line + elements, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(line + WIDTH + elements, mask=inside, other=0.0).to(tl.float32)
            values = gate / (1.0 + tl.exp(-gate)) * up * weight
            target = out + tl.cast(slot, tl.int64) * WIDTH + elements
            tl.store(target, round_to(values, tl.bfloat16), mask=inside)


@portable(do_not_specialize=["num_rows"])
def sum_rows_kernel(
    contributions,
    slots,
    out,
    num_rows,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    rows,
    quantized,
    scales,
    num_rows,
    GROUPS: tl.constexpr,
    GROUPS_LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The cast of dispatch as a launch of its own, for libraries that want tokens cast before."""
    groups = tl.arange(0, GROUPS_LANES)
    inside = groups < GROUPS
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        where = tl.cast(row, tl.int64) * GROUPS + groups
        elements = where[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = inside[:, None] & (tl.arange(0, GROUP)[None, :] < GROUP)
        values = tl.load(rows + elements, mask=mask, other=0.0).to(tl.float32)
        bits, scale_bits = quantize_tile(values, False)
        tl.store(quantized + elements, bits, mask=mask)
        tl.store(scales + where, scale_bits, mask=inside)
