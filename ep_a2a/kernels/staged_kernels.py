"""Before and after the hop between nodes: tokens sorted by node, and the nodes' sums added. Local, nobody waits."""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import plus_biases, quantize_tile, round_to, widened
from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.primitives import reduce_max
from ep_a2a.kernels.routing_kernels import owner_of
from ep_a2a.kernels.send_kernels import copy_row, load_choices, load_for_cast, load_line


@portable(do_not_specialize=["num_tokens", "stride"], do_not_specialize_on_alignment=["scales", "weights", "ids"])
def pack_kernel(
    x, scales, weights, ids, to_tokens, to_scales, to_weights, to_ids, visits, num_tokens, stride,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, OWNERS: tl.constexpr, NUM_NODES: tl.constexpr,
    ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    SCALE_WIDTH: tl.constexpr, SCALE_LANES: tl.constexpr, GROUP: tl.constexpr, GROUP_LANES: tl.constexpr,
    GROUPS_LANES: tl.constexpr, POWERS_OF_TWO: tl.constexpr, BYTE_SCALES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Writes each token once for every distinct node that owns one of its experts, into the line of its number.

    As many lines travel whatever the routing, so that dense ones would save nothing, and tell less.

    Args:
        x: [num_tokens, row] as 4-byte words, or as elements when GROUP > 0 asks for the fp8 cast.
        scales: [num_tokens, SCALE_WIDTH] when SCALE_WIDTH > 0 and nothing is cast.
        weights: [num_tokens, TOPK] as int32 when HAS_WEIGHTS; ids: [num_tokens, TOPK] int32.
        to_tokens, to_scales, to_weights, to_ids: [NUM_NODES, stride, ...], what goes to each node. Lines that no token
            takes get ids of -1; of the rest of them nothing is written.
        visits: int32 [num_tokens, NUM_NODES], out: 1 where the token goes to a node, else 0.
        stride: max_num_tokens, lines per node.
        OWNERS: of nodes; see routing_kernels.owner_of.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    choices, scale_lanes = tl.arange(0, TOPK_LANES), tl.arange(0, SCALE_LANES)
    groups, elements = tl.arange(0, GROUPS_LANES), tl.arange(0, GROUP_LANES)
    num_groups: tl.constexpr = ROW_WORDS * 4 // GROUP if GROUP > 0 else 1
    cast_mask = (groups < num_groups)[:, None] & (elements < GROUP)[None, :]
    for token in range(program, num_tokens, num_programs):
        token_ids, token_weights = load_choices(ids, weights, token, num_tokens, TOPK, TOPK_LANES, HAS_WEIGHTS)
        nodes_of_ids = owner_of(token_ids, OWNERS)
        if GROUP > 0:
            tile = load_for_cast(x, token, num_tokens, ROW_WORDS * 4, GROUP, GROUP_LANES, GROUPS_LANES)
            bits, scale_bits = quantize_tile(tile.to(tl.float32), POWERS_OF_TWO)
        elif SCALE_WIDTH > 0:
            token_scales = load_line(scales, token, num_tokens, SCALE_WIDTH, SCALE_LANES)
        for node in tl.static_range(NUM_NODES):
            row = tl.cast(node * stride + token, tl.int64)
            goes = reduce_max((nodes_of_ids == node).to(tl.int32), 0) > 0
            if goes:
                if GROUP > 0:
                    at = groups[:, None] * GROUP + elements[None, :]
                    tl.store(to_tokens + row * (ROW_WORDS * 4) + at, bits, mask=cast_mask)
                    if BYTE_SCALES:
                        made = (scale_bits >> 23).to(tl.uint8)
                    else:
                        made = scale_bits
                    tl.store(to_scales + row * num_groups + groups, made, mask=groups < num_groups)
                else:
                    copy_row(x, token, to_tokens + row * ROW_WORDS, ROW_WORDS, BLOCK_WORDS)
                    if SCALE_WIDTH > 0:
                        at_scales = to_scales + row * SCALE_WIDTH + scale_lanes
                        tl.store(at_scales, token_scales, mask=scale_lanes < SCALE_WIDTH)
                if HAS_WEIGHTS:
                    tl.store(to_weights + row * TOPK + choices, token_weights, mask=choices < TOPK)
            tl.store(to_ids + row * TOPK + choices, tl.where(goes, token_ids, -1), mask=choices < TOPK)
            tl.store(visits + tl.cast(token, tl.int64) * NUM_NODES + node, goes.to(tl.int32))
    for unused in range(num_tokens + program, stride, num_programs):
        for node in tl.static_range(NUM_NODES):
            row = tl.cast(node * stride + unused, tl.int64)
            tl.store(to_ids + row * TOPK + choices, choices * 0 - 1, mask=choices < TOPK)


@portable
def sum_over_nodes(
    rows, visits, token, first, stride, WIDTH: tl.constexpr, LANES: tl.constexpr, NUM_NODES: tl.constexpr,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """float32 [LANES]: elements first, first + 1, ... of a token's rows [NUM_NODES, stride, WIDTH], nodes ascending."""
    offsets = first + tl.arange(0, LANES)
    total = tl.full((LANES,), 0, tl.float32)
    for node in tl.static_range(NUM_NODES):
        goes = tl.load(visits + tl.cast(token, tl.int64) * NUM_NODES + node)
        row = tl.cast(node * stride + token, tl.int64)
        bits = tl.load(rows + row * WIDTH + offsets, mask=(offsets < WIDTH) & (offsets * 0 + goes > 0), other=0)
        total += widened(bits.to(ELEMENT), DTYPE)
    return total


@portable(do_not_specialize=["num_tokens", "stride"])
def add_nodes_kernel(
    rows, weight_rows, visits, bias_0, bias_1, result, result_weights, num_tokens, stride,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    NUM_NODES: tl.constexpr, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Adds the nodes' sums of each token in ascending order of nodes, in float32.

    Args:
        rows: [NUM_NODES, stride, HIDDEN] of DTYPE as ELEMENT (integers); weight_rows: [NUM_NODES, stride, TOPK] int32.
        visits: from pack_kernel.
        bias_0, bias_1: as of combine_kernel.
        result: [num_tokens, HIDDEN] of DTYPE; result_weights: float32 [num_tokens, TOPK] when HAS_WEIGHTS.
    """
    num_blocks: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for unit in range(tl.program_id(0), num_tokens * num_blocks, tl.num_programs(0)):
        token = unit // num_blocks
        first = (unit % num_blocks) * BLOCK
        total = sum_over_nodes(rows, visits, token, first, stride, HIDDEN, BLOCK, NUM_NODES, DTYPE, ELEMENT)
        offsets = first + tl.arange(0, BLOCK)
        total = plus_biases(total, bias_0, bias_1, token, offsets, HIDDEN)
        target = result + tl.cast(token, tl.int64) * HIDDEN + offsets
        tl.store(target, round_to(total, DTYPE), mask=offsets < HIDDEN)
        if HAS_WEIGHTS:
            if first == 0:
                sums = sum_over_nodes(
                    weight_rows, visits, token, 0, stride, TOPK, TOPK_LANES, NUM_NODES, tl.float32, tl.int32
                )
                choices = tl.arange(0, TOPK_LANES)
                tl.store(result_weights + tl.cast(token, tl.int64) * TOPK + choices, sums, mask=choices < TOPK)
