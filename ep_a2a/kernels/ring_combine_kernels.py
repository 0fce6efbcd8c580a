"""InterNodeV1 combine: each node adds its ranks' rows first, one row per token crosses back, and the source adds nodes.

Ranks offer their results where the others of their node can read them, cast to fp8 if that is asked for. The rank
through which a token came adds its rows, in float32 and in ascending order of ranks, rounds the sum to the dtype of the
results and sends it back in a chunk; the token's own rank adds the nodes' sums likewise. As in dispatch, a channel does
its roles in turn and waits in none.
"""

import triton.language as tl

from ep_a2a.kernels.cast_kernels import plus_biases, round_to, widened
from ep_a2a.kernels.combine_kernels import hear_peers
from ep_a2a.kernels.combine_receive_kernels import note_foreign_indices
from ep_a2a.kernels.combine_send_kernels import block_offsets
from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region, Stage
from ep_a2a.kernels.primitives import (
    POISON,
    address,
    ask_poison,
    begin_stage,
    fail,
    finish_stage,
    lanes_behind,
    may_go_on,
    reduce_sum,
)
from ep_a2a.kernels.ring_kernels import (
    BACK,
    CHUNKS_ARRIVED,
    CHUNKS_BACK,
    CHUNKS_TAKEN,
    before_reading,
    counter_of,
    give_room_to_all,
    hand_over,
    has_reached,
    idle,
    load_channel,
    num_own_chunks,
    pick,
    row_at,
    slot_of,
    slot_to_fill,
    store_channel,
    tokens_of_chunk,
    words_at,
)

COMBINE_FLAGS = tl.constexpr(Region.COMBINE_FLAGS.value)
COMBINE_ROWS = tl.constexpr(Region.COMBINE_ROWS.value)
COMBINE_SCALES = tl.constexpr(Region.COMBINE_SCALES.value)
COMBINE_WEIGHTS = tl.constexpr(Region.COMBINE_WEIGHTS.value)
RECV_COUNTS = tl.constexpr(Region.RECV_COUNTS.value)
RESULT_WEIGHTS = tl.constexpr(Region.RESULT_WEIGHTS.value)
OWN_LINES = tl.constexpr(Region.OWN_LINES.value)
FORWARDED_CHUNKS = tl.constexpr(Region.FORWARDED_CHUNKS.value)
FORWARDED_LINES = tl.constexpr(Region.FORWARDED_LINES.value)
FORWARDED_ROWS = tl.constexpr(Region.FORWARDED_ROWS.value)
COMBINE_SEND = tl.constexpr(Stage.COMBINE_SEND.value)
COMBINE_RECEIVE = tl.constexpr(Stage.COMBINE_RECEIVE.value)


@portable
def places_of_rows(
    table, region: tl.constexpr, rows, first_rank, WIDTH: tl.constexpr, ELEMENT: tl.constexpr, GPUS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Where the row that each rank of the node has for a line begins, a tuple; of -1 it is row 0's place."""
    # the hint must be given here: on the result of a call it would be lost
    aligned: tl.constexpr = 16 if WIDTH * ELEMENT.primitive_bitwidth % 128 == 0 else 1
    places = ()
    for local in tl.static_range(GPUS):
        base = address(table, region, first_rank + local, WORLD_SIZE, ELEMENT)
        places = places + (tl.multiple_of(base + tl.cast(tl.maximum(rows[local], 0), tl.int64) * WIDTH, aligned),)
    return places


@portable
def tile_offsets(first, LANES: tl.constexpr, SCALE_GROUP: tl.constexpr):
    """Elements first, first + 1, ... as a tile [LANES / SCALE_GROUP, SCALE_GROUP]; [1, LANES] without scales (0)."""
    GROUP: tl.constexpr = SCALE_GROUP if SCALE_GROUP else LANES
    return block_offsets(first, LANES // GROUP, GROUP)


@portable
def sum_of(
    places, scales, numbers, first, COUNT: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
):  # fmt: skip
    """float32, a tile of tile_offsets: the sum of the COUNT rows at `places`, but for those numbered -1.

    SCALE_GROUP: elements to which one of the row's float32 `scales` belongs; 0 without scales.
    """
    at = tile_offsets(first, LANES, SCALE_GROUP)
    total = tl.full(at.shape, 0, tl.float32)
    for index in tl.static_range(COUNT):
        is_there = (at < WIDTH) & (at * 0 + numbers[index] >= 0)
        values = widened(tl.load(places[index] + at, mask=is_there, other=0), DTYPE)
        if SCALE_GROUP:
            groups = first // SCALE_GROUP + tl.arange(0, LANES // SCALE_GROUP)
            has_scale = (groups < WIDTH // SCALE_GROUP) & (groups * 0 + numbers[index] >= 0)
            values *= tl.load(scales[index] + groups, mask=has_scale, other=0)[:, None]
        total += values
    return total


@portable
def add_ranks(
    table, slot, source_node, chunk, rank, RINGS: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, BACK_WORDS: tl.constexpr, DTYPE: tl.constexpr, ELEMENT: tl.constexpr,
    QUANTIZED: tl.constexpr, SCALE_GROUP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the node's sums for the lines of a chunk that was forwarded, at an address; returns the words written."""
    GPUS: tl.constexpr = RINGS[1]
    CHUNK_TOKENS: tl.constexpr = RINGS[4]
    NUM_CHUNKS: tl.constexpr = RINGS[5]
    LINE_WORDS: tl.constexpr = RINGS[6]
    OFFERED: tl.constexpr = tl.float8e4nv if QUANTIZED else DTYPE
    OFFERED_ELEMENT: tl.constexpr = tl.uint8 if QUANTIZED else ELEMENT
    first_rank = (rank // GPUS) * GPUS
    lines = address(table, FORWARDED_LINES, rank, WORLD_SIZE, tl.int32)
    record = address(table, FORWARDED_ROWS, rank, WORLD_SIZE, tl.int32)
    num_lines = tl.load(lines + source_node * NUM_CHUNKS + chunk)
    for number in range(num_lines):
        line = slot + tl.cast(number, tl.int64) * (LINE_WORDS * 4)
        recorded = record + tl.cast((source_node * NUM_CHUNKS + chunk) * CHUNK_TOKENS + number, tl.int64) * GPUS
        rows = ()
        for local in tl.static_range(GPUS):
            rows = rows + (tl.load(recorded + local),)
        places = places_of_rows(table, COMBINE_ROWS, rows, first_rank, HIDDEN, OFFERED_ELEMENT, GPUS, WORLD_SIZE)
        scales = places
        if SCALE_GROUP:
            scales = places_of_rows(
                table, COMBINE_SCALES, rows, first_rank, HIDDEN // SCALE_GROUP, tl.float32, GPUS, WORLD_SIZE
            )
        if HAS_WEIGHTS:
            # asked for before the first store, which would wait for it
            choices = tile_offsets(0, TOPK_LANES, 0)
            places_of_weights = places_of_rows(
                table, COMBINE_WEIGHTS, rows, first_rank, TOPK, tl.int32, GPUS, WORLD_SIZE
            )
            sums = sum_of(places_of_weights, places, rows, 0, GPUS, TOPK, TOPK_LANES, tl.float32, 0)
        for first in tl.static_range(0, HIDDEN, BLOCK):
            at = tile_offsets(first, BLOCK, SCALE_GROUP)
            total = sum_of(places, scales, rows, first, GPUS, HIDDEN, BLOCK, OFFERED, SCALE_GROUP)
            tl.store(words_at(line, 0, DTYPE) + at, round_to(total, DTYPE), mask=at < HIDDEN)
        if HAS_WEIGHTS:
            tl.store(words_at(line, BACK_WORDS, tl.float32) + choices, sums, mask=choices < TOPK)
    return num_lines * LINE_WORDS


@portable
def return_chunk(
    table, channel, peer, count, before, rank, RINGS: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, BACK_WORDS: tl.constexpr, DTYPE: tl.constexpr, ELEMENT: tl.constexpr,
    QUANTIZED: tl.constexpr, SCALE_GROUP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Sends the sums for a channel's next chunk back to node `peer` if the ring has room; returns whether it had."""
    CHANNELS: tl.constexpr = RINGS[2]
    SLOTS: tl.constexpr = RINGS[3]
    room = counter_of(table, CHUNKS_TAKEN, rank, BACK, peer, channel, RINGS, WORLD_SIZE)
    has_room = has_reached(room, before + count + 1 - SLOTS)
    if has_room:
        slot, written = slot_to_fill(table, CHUNKS_BACK, peer, channel, before + count, rank, RINGS, WORLD_SIZE)
        num_words = add_ranks(
            table, written, peer, channel + count * CHANNELS, rank, RINGS, TOPK, TOPK_LANES, HIDDEN, BLOCK, BACK_WORDS,
            DTYPE, ELEMENT, QUANTIZED, SCALE_GROUP, HAS_WEIGHTS, WORLD_SIZE,
        )  # fmt: skip
        hand_over(table, slot, written, num_words, BACK, peer, channel, before + count + 1, rank, RINGS, WORLD_SIZE)
    return has_room


@portable
def places_in_slots(slots, numbers, OFFSET_WORDS: tl.constexpr, RINGS: tl.constexpr, ELEMENT: tl.constexpr):
    """Where what lies OFFSET_WORDS behind the begin of a token's line is in each node's chunk; of -1 it is line 0's."""
    NODES: tl.constexpr = RINGS[0]
    LINE_WORDS: tl.constexpr = RINGS[6]
    aligned: tl.constexpr = 16 if OFFSET_WORDS % 4 == 0 else 4
    places = ()
    for node in tl.static_range(NODES):
        line = slots[node] + tl.cast(tl.maximum(numbers[node], 0), tl.int64) * (LINE_WORDS * 4)
        places = places + (
            tl.multiple_of((line + OFFSET_WORDS * 4).to(tl.pointer_type(ELEMENT)), aligned),
        )  # fmt: skip
    return places


@portable
def add_nodes(
    table, slots, result, ids, bias_0, bias_1, num_tokens, channel, count, epoch, rank,
    RINGS: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    BACK_WORDS: tl.constexpr, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    CHECK_INDICES: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Adds the nodes' sums of the tokens in a chunk that has come back from all nodes, in ascending order of nodes.

    slots: by node, the address of the chunk.
    """
    NODES: tl.constexpr = RINGS[0]
    lines = address(table, OWN_LINES, rank, WORLD_SIZE, tl.int32)
    sums_out = address(table, RESULT_WEIGHTS, rank, WORLD_SIZE, tl.float32)
    first_token, end = tokens_of_chunk(num_tokens, channel, count, RINGS)
    for token in range(first_token, end):
        numbers = ()
        for node in tl.static_range(NODES):
            numbers = numbers + (tl.load(lines + tl.cast(token, tl.int64) * NODES + node),)
        places = places_in_slots(slots, numbers, 0, RINGS, ELEMENT)
        if HAS_WEIGHTS:
            choices = tile_offsets(0, TOPK_LANES, 0)
            places_of_weights = places_in_slots(slots, numbers, BACK_WORDS, RINGS, tl.int32)
            sums = sum_of(places_of_weights, places, numbers, 0, NODES, TOPK, TOPK_LANES, tl.float32, 0)
        for first in tl.static_range(0, HIDDEN, BLOCK):
            at = tile_offsets(first, BLOCK, 0)
            total = sum_of(places, places, numbers, first, NODES, HIDDEN, BLOCK, DTYPE, 0)
            total = plus_biases(total, bias_0, bias_1, token, at, HIDDEN)
            tl.store(row_at(result, token, HIDDEN, DTYPE) + at, round_to(total, DTYPE), mask=at < HIDDEN)
        if HAS_WEIGHTS:
            tl.store(sums_out + tl.cast(token, tl.int64) * TOPK + choices, sums, mask=choices < TOPK)
        if CHECK_INDICES:
            note_foreign_indices(table, ids, token, epoch, rank, WORLD_SIZE, TOPK, TOPK_LANES)


@portable
def clear_results(
    result, num_tokens, channel, RINGS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Zeros in place of the sums of a channel's tokens."""
    for count in range(num_own_chunks(num_tokens, channel, RINGS)):
        first_token, end = tokens_of_chunk(num_tokens, channel, count, RINGS)
        for token in range(first_token, end):
            for first in tl.static_range(0, HIDDEN, BLOCK):
                at = first + tl.arange(0, BLOCK)
                tl.store(row_at(result, token, HIDDEN, DTYPE) + at, round_to(at * 0.0, DTYPE), mask=at < HIDDEN)


@portable
def take_chunk(
    table, result, ids, bias_0, bias_1, num_tokens, channel, count, before, epoch, rank,
    NODE_LANES: tl.constexpr, RINGS: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, BACK_WORDS: tl.constexpr, DTYPE: tl.constexpr,
    ELEMENT: tl.constexpr, HAS_WEIGHTS: tl.constexpr, CHECK_INDICES: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Adds up a channel's next chunk if it has come back from all nodes.

    Returns:
        ([NODE_LANES] 1 for the nodes from which it had not come, whether it was there).
    """
    NODES: tl.constexpr = RINGS[0]
    nodes = tl.arange(0, NODE_LANES)
    present = nodes < NODES
    safe = tl.where(present, nodes, 0)
    arrived = counter_of(table, CHUNKS_ARRIVED, rank, BACK, safe, channel, RINGS, WORLD_SIZE)
    seen = tl.atomic_add(arrived, 0, mask=present, sem="acquire", scope="sys")
    behind = tl.sub(tl.where(present, seen, before + count + 1), before + count + 1, sanitize_overflow=False) < 0
    missing = behind.to(tl.int32)
    is_there = reduce_sum(missing, 0) == 0
    if is_there:
        slots = ()
        for node in tl.static_range(NODES):
            came = counter_of(table, CHUNKS_ARRIVED, rank, BACK, node, channel, RINGS, WORLD_SIZE)
            before_reading(came, RINGS)
            slots = slots + (slot_of(table, CHUNKS_BACK, rank, node, channel, before + count, RINGS, WORLD_SIZE),)
        add_nodes(
            table, slots, result, ids, bias_0, bias_1, num_tokens, channel, count, epoch, rank, RINGS, TOPK,
            TOPK_LANES, HIDDEN, BLOCK, BACK_WORDS, DTYPE, ELEMENT, HAS_WEIGHTS, CHECK_INDICES, WORLD_SIZE,
        )  # fmt: skip
        give_room_to_all(table, BACK, channel, before + count + 1, rank, NODE_LANES, RINGS, WORLD_SIZE)
    return missing, is_there


@portable(do_not_specialize=["num_tokens", "rank"], do_not_specialize_on_alignment=["ids"])
def return_kernel(
    result, ids, bias_0, bias_1, table, num_tokens, rank,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    NODE_LANES: tl.constexpr, RINGS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    BACK_WORDS: tl.constexpr, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, QUANTIZED: tl.constexpr,
    SCALE_GROUP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, CHECK_INDICES: tl.constexpr, POISON_LANES: tl.constexpr,
):  # fmt: skip
    """Sends back the sums of this node for what it has forwarded, and adds those that come for this rank's tokens.

    Args:
        result: [num_tokens, HIDDEN] of DTYPE; ids, bias_0, bias_1: as of combine_kernel.
        RINGS: of the way back. BACK_WORDS: words of a row in its lines.
        QUANTIZED: ranks offer rows of fp8, not of DTYPE; every SCALE_GROUP elements with a scale unless that is 0.
    """
    NODES: tl.constexpr = RINGS[0]
    GPUS: tl.constexpr = RINGS[1]
    CHANNELS: tl.constexpr = RINGS[2]
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, out_of_order = begin_stage(table, COMBINE_RECEIVE, WORLD_SIZE)
    answer = ask_poison(address(table, POISON, rank, WORLD_SIZE, tl.int32), POISON_LANES)
    poison = may_go_on(table, answer, 2, epoch, out_of_order, rank, WORLD_SIZE, WORLD_LANES)
    nodes = tl.arange(0, NODE_LANES)
    forwarded = address(table, FORWARDED_CHUNKS, rank, WORLD_SIZE, tl.int32)
    if poison == 0:
        poison = hear_peers(table, epoch, rank, WORLD_SIZE, WORLD_LANES, HAS_WEIGHTS, True)
    for channel in range(program, CHANNELS, num_programs):
        sent_before, taken_before = load_channel(table, BACK, channel, rank, NODE_LANES, RINGS, WORLD_SIZE)
        before_all = pick(taken_before, 0, NODE_LANES)
        num_own = num_own_chunks(num_tokens, channel, RINGS)
        to_send = tl.load(forwarded + channel * NODES + nodes, mask=nodes < NODES, other=0)
        sent = nodes * 0
        missing = (nodes < NODES).to(tl.int32)
        num_taken = tl.full((), 0, tl.int32)
        polls, deadline = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
        while ((reduce_sum(to_send - sent, 0) > 0) | (num_taken < num_own)) & (poison == 0):
            moved = tl.full((), 0, tl.int32)
            for step in range(NODES):
                peer = (rank // GPUS + step) % NODES
                here = nodes == peer
                count = pick(sent, peer, NODE_LANES)
                if count < pick(to_send, peer, NODE_LANES):
                    gone = return_chunk(
                        table, channel, peer, count, pick(sent_before, peer, NODE_LANES), rank, RINGS, TOPK,
                        TOPK_LANES, HIDDEN, BLOCK, BACK_WORDS, DTYPE, ELEMENT, QUANTIZED, SCALE_GROUP, HAS_WEIGHTS,
                        WORLD_SIZE,
                    )  # fmt: skip
                    sent += (here & gone).to(tl.int32)
                    moved += gone.to(tl.int32)
            if num_taken < num_own:
                missing, is_there = take_chunk(
                    table, result, ids, bias_0, bias_1, num_tokens, channel, num_taken, before_all, epoch, rank,
                    NODE_LANES, RINGS, TOPK, TOPK_LANES, HIDDEN, BLOCK, BACK_WORDS, DTYPE, ELEMENT, HAS_WEIGHTS,
                    CHECK_INDICES, WORLD_SIZE,
                )  # fmt: skip
                num_taken += is_there.to(tl.int32)
                moved += is_there.to(tl.int32)
            poison, polls, deadline = idle(
                table, moved, polls, deadline, missing + (to_send - sent), epoch, rank, NODE_LANES, RINGS, WORLD_SIZE,
                WORLD_LANES,
            )  # fmt: skip
        store_channel(
            table, BACK, channel, sent_before + sent, taken_before + num_taken, rank, NODE_LANES, RINGS, WORLD_SIZE
        )
    if poison != 0:
        late = lanes_behind(table, COMBINE_FLAGS, epoch, rank, WORLD_SIZE, WORLD_LANES)
        fail(table, poison, 2, epoch, 0, late, rank, WORLD_SIZE, WORLD_LANES)
        for channel in range(program, CHANNELS, num_programs):
            clear_results(result, num_tokens, channel, RINGS, HIDDEN, BLOCK, DTYPE)
    finish_stage(table, COMBINE_RECEIVE, program, num_programs, WORLD_SIZE)
