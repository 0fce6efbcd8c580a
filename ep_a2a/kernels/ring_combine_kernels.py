"""InterNodeV1 combine: each node adds its ranks' rows first, one row per token crosses back, and the source adds nodes.

Ranks have offered their results where the others of their node can read them (C1, C2 in ring_offer_kernels.py). Then:

- C3. Wait until every rank has offered its results.
- C4. The rank through which a token came adds the token's rows of its node, in float32 and in ascending order of ranks,
  and rounds the sum to the dtype of the results. It sends chunks of sums back where the ring has room.
- C5. The token's own rank adds the nodes' sums likewise, once a chunk has come back from all nodes.
- C6. A failed step gives zeros.

A channel does C4 and C5 in turn, and waits in neither.
"""

from typing import NamedTuple

import triton.language as tl

from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels import ring_kernels as ring
from ep_a2a.kernels.cast_kernels import plus_biases, round_to, widened
from ep_a2a.kernels.combine_kernels import await_peers
from ep_a2a.kernels.combine_receive_kernels import note_foreign_indices
from ep_a2a.kernels.combine_send_kernels import block_offsets
from ep_a2a.kernels.layout import Region, Stage, StepPhase
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.target import barrier, fp8


class Results(NamedTuple):
    """Memory that a combine over rings writes and compares.

    op: OpContext. result, ids, num_tokens: as of return_kernel. epoch: of the step.
    """

    op: OpContext
    result: tl.tensor
    ids: tl.tensor
    num_tokens: tl.tensor
    epoch: tl.tensor


@portable
def places_of_rows(
    op, region: tl.constexpr, rows, first_rank, WIDTH: tl.constexpr, ELEMENT: tl.constexpr, R: tl.constexpr
):
    """Where a node's ranks keep those rows of a region with WIDTH elements per row, a tuple; of -1 it is row 0."""
    places = ()
    for local in tl.static_range(R.GPUS):
        base = prim.address_at(op, region, first_rank + local, ELEMENT)
        places = places + (ring.row_at(base, tl.maximum(rows[local], 0), WIDTH, ELEMENT),)
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
        is_there = (at < WIDTH) & (prim.full_like(at, numbers[index]) >= 0)
        values = widened(tl.load(places[index] + at, mask=is_there, other=0), DTYPE)
        if SCALE_GROUP:
            groups = first // SCALE_GROUP + tl.arange(0, LANES // SCALE_GROUP)
            has_scale = (groups < WIDTH // SCALE_GROUP) & (prim.full_like(groups, numbers[index]) >= 0)
            values *= tl.load(scales[index] + groups, mask=has_scale, other=0)[:, None]
        total += values
    return total


@portable
def add_line(op, line, rows, R: tl.constexpr, A: tl.constexpr):
    """Writes the sum of a token's `rows` at the ranks of this node to its line, and the sum of their weights."""
    offered: tl.constexpr = fp8().dtype if A.QUANTIZED else A.DTYPE
    element: tl.constexpr = tl.uint8 if A.QUANTIZED else A.ELEMENT
    first_rank = (op.rank // R.GPUS) * R.GPUS
    places = places_of_rows(op, Region.COMBINE_ROWS, rows, first_rank, A.HIDDEN, element, R)
    scales = places
    if A.SCALE_GROUP:
        num_scales: tl.constexpr = A.HIDDEN // A.SCALE_GROUP
        scales = places_of_rows(op, Region.COMBINE_SCALES, rows, first_rank, num_scales, tl.float32, R)
    if A.HAS_WEIGHTS:
        # asked for before the first store, which would wait for it
        choices = tile_offsets(0, op.TOPK_LANES, 0)
        places_of_weights = places_of_rows(op, Region.COMBINE_WEIGHTS, rows, first_rank, op.TOPK, tl.int32, R)
        sums = sum_of(places_of_weights, places, rows, 0, R.GPUS, op.TOPK, op.TOPK_LANES, tl.float32, 0)
    for first in tl.static_range(0, A.HIDDEN, A.BLOCK):
        at = tile_offsets(first, A.BLOCK, A.SCALE_GROUP)
        total = sum_of(places, scales, rows, first, R.GPUS, A.HIDDEN, A.BLOCK, offered, A.SCALE_GROUP)
        tl.store(ring.words_at(line, 0, A.DTYPE) + at, round_to(total, A.DTYPE), mask=at < A.HIDDEN)
    if A.HAS_WEIGHTS:
        tl.store(ring.words_at(line, A.WEIGHTS_AT, tl.float32) + choices, sums, mask=choices < op.TOPK)


@portable
def add_ranks(op, slot, source_node, chunk, R: tl.constexpr, A: tl.constexpr):
    """Writes the node's sums for the lines of a chunk that was forwarded, at an address; returns the words written."""
    lines = prim.address(op, Region.FORWARDED_LINES, tl.int32)
    record = prim.address(op, Region.FORWARDED_ROWS, tl.int32)
    num_lines = tl.load(lines + source_node * R.NUM_CHUNKS + chunk)
    for number in range(num_lines):
        line = slot + tl.cast(number, tl.int64) * (R.LINE_WORDS * 4)
        place = tl.cast((source_node * R.NUM_CHUNKS + chunk) * R.CHUNK_TOKENS + number, tl.int64)
        rows = ()
        for local in tl.static_range(R.GPUS):
            rows = rows + (tl.load(record + place * R.GPUS + local),)
        add_line(op, line, rows, R, A)
    return num_lines * R.LINE_WORDS


@portable
def return_chunk(op, channel, peer, count, before, R: tl.constexpr, A: tl.constexpr):
    """Sends the sums for a channel's next chunk back to node `peer` if the ring has room; returns whether it had.

    Args:
        count, before: chunks of the channel that went back there in this step, and before it.
    """
    room = ring.counter_of(op, Region.CHUNKS_TAKEN, op.rank, peer, channel, R)
    has_room = ring.has_reached(room, before + count + 1 - R.SLOTS)
    if has_room:
        slot, written = ring.slot_to_fill(op, peer, channel, before + count, R)
        num_words = add_ranks(op, written, peer, channel + count * R.CHANNELS, R, A)
        # a put has bytes (give_room), also that of a chunk without lines
        ring.hand_over(op, slot, written, tl.maximum(num_words, 1), peer, channel, before + count + 1, R)
    return has_room


@portable
def places_in_slots(slots, numbers, offset_words: tl.constexpr, R: tl.constexpr, ELEMENT: tl.constexpr):
    """Pointers into a token's line of each node's chunk, offset_words from its begin; for line -1, into line 0."""
    places = ()
    for node in tl.static_range(R.NODES):
        line = slots[node] + tl.cast(tl.maximum(numbers[node], 0), tl.int64) * (R.LINE_WORDS * 4)
        places = places + (ring.words_at(line, offset_words, ELEMENT),)
    return places


@portable
def add_token(out, slots, bias_0, bias_1, token, R: tl.constexpr, A: tl.constexpr):
    """Adds the nodes' sums of one token, and those of its weights. out: Results. slots: as of add_nodes."""
    op = out.op
    lines = prim.address(op, Region.OWN_LINES, tl.int32)
    sums_out = prim.address(op, Region.RESULT_WEIGHTS, tl.float32)
    numbers = ()
    for node in tl.static_range(R.NODES):
        numbers = numbers + (tl.load(lines + tl.cast(token, tl.int64) * R.NODES + node),)
    places = places_in_slots(slots, numbers, 0, R, A.ELEMENT)
    if A.HAS_WEIGHTS:
        choices = tile_offsets(0, op.TOPK_LANES, 0)
        places_of_weights = places_in_slots(slots, numbers, A.WEIGHTS_AT, R, tl.int32)
        sums = sum_of(places_of_weights, places, numbers, 0, R.NODES, op.TOPK, op.TOPK_LANES, tl.float32, 0)
    for first in tl.static_range(0, A.HIDDEN, A.BLOCK):
        at = tile_offsets(first, A.BLOCK, 0)
        total = sum_of(places, places, numbers, first, R.NODES, A.HIDDEN, A.BLOCK, A.DTYPE, 0)
        total = plus_biases(total, bias_0, bias_1, token, at, A.HIDDEN)
        tl.store(ring.row_at(out.result, token, A.HIDDEN, A.DTYPE) + at, round_to(total, A.DTYPE), mask=at < A.HIDDEN)
    if A.HAS_WEIGHTS:
        tl.store(sums_out + tl.cast(token, tl.int64) * op.TOPK + choices, sums, mask=choices < op.TOPK)


@portable
def add_nodes(out, slots, bias_0, bias_1, channel, count, R: tl.constexpr, A: tl.constexpr):
    """Adds the nodes' sums of the tokens in a chunk that has come back from all nodes, in ascending order of nodes.

    Args:
        out: Results. slots: by node, the address of the chunk.
    """
    first_token, end = ring.tokens_of_chunk(out.num_tokens, channel, count, R)
    for token in range(first_token, end):
        add_token(out, slots, bias_0, bias_1, token, R, A)
        if A.CHECK_INDICES:
            note_foreign_indices(out.op, out.ids, token, out.epoch)


@portable
def clear_results(result, num_tokens, channel, R: tl.constexpr, A: tl.constexpr):
    """Zeros in place of the sums of a channel's tokens."""
    for count in range(ring.num_own_chunks(num_tokens, channel, R)):
        first_token, end = ring.tokens_of_chunk(num_tokens, channel, count, R)
        for token in range(first_token, end):
            for first in tl.static_range(0, A.HIDDEN, A.BLOCK):
                at = first + tl.arange(0, A.BLOCK)
                zeros = round_to(tl.full((A.BLOCK,), 0.0, tl.float32), A.DTYPE)
                tl.store(ring.row_at(result, token, A.HIDDEN, A.DTYPE) + at, zeros, mask=at < A.HIDDEN)


@portable
def take_chunk(out, bias_0, bias_1, channel, count, before, R: tl.constexpr, A: tl.constexpr):
    """Adds up a channel's next chunk if it has come back from all nodes.

    Args:
        out: Results. count, before: chunks of the channel that came back in this step, and before it.

    Returns:
        ([NODE_LANES] 1 for the nodes from which it had not come, whether it was there).
    """
    op = out.op
    nodes = tl.arange(0, R.NODE_LANES)
    present = nodes < R.NODES
    safe = tl.where(present, nodes, 0)
    arrived = ring.counter_of(op, Region.CHUNKS_ARRIVED, op.rank, safe, channel, R)
    seen = tl.atomic_add(arrived, 0, mask=present, sem="acquire", scope="sys")
    behind = tl.sub(tl.where(present, seen, before + count + 1), before + count + 1, sanitize_overflow=False) < 0
    missing = behind.to(tl.int32)
    is_there = prim.reduce_sum(missing, 0) == 0
    if is_there:
        # each node's counter was acquired by a thread of its own, and all threads read the chunks
        barrier()
        slots = ()
        for node in tl.static_range(R.NODES):
            came = ring.counter_of(op, Region.CHUNKS_ARRIVED, op.rank, node, channel, R)
            ring.before_reading(came, R)
            slots = slots + (ring.slot_of(op, op.rank, node, channel, before + count, R),)
        add_nodes(out, slots, bias_0, bias_1, channel, count, R, A)
        ring.give_room_to_all(op, channel, before + count + 1, R)
    return missing, is_there


@portable
def return_channel(out, bias_0, bias_1, forwarded, channel, poison, R: tl.constexpr, A: tl.constexpr):
    """Sends back, and takes, all chunks of a channel.

    Args:
        out: Results. forwarded: pointer to the chunks that every channel has forwarded from each node.

    Returns:
        The poison word.
    """
    op = out.op
    nodes = tl.arange(0, R.NODE_LANES)
    sent_before, taken_before = ring.load_channel(op, channel, R)
    before_all = prim.pick(taken_before, 0)
    num_own = ring.num_own_chunks(out.num_tokens, channel, R)
    # by node: chunks that go back there in this step, those that have gone, and in sent_before those of earlier steps
    to_send = tl.load(forwarded + channel * R.NODES + nodes, mask=nodes < R.NODES, other=0)
    sent = prim.full_like(nodes, 0)
    missing = (nodes < R.NODES).to(tl.int32)
    num_taken = tl.full((), 0, tl.int32)
    polls, deadline = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    while ((prim.reduce_sum(to_send - sent, 0) > 0) | (num_taken < num_own)) & (poison == 0):
        # C4
        moved = tl.full((), 0, tl.int32)
        for step in range(R.NODES):
            peer = (op.rank // R.GPUS + step) % R.NODES
            count = prim.pick(sent, peer)
            if count < prim.pick(to_send, peer):
                gone = return_chunk(op, channel, peer, count, prim.pick(sent_before, peer), R, A)
                sent += ((nodes == peer) & gone).to(tl.int32)
                moved += gone.to(tl.int32)
        # C5
        if num_taken < num_own:
            missing, is_there = take_chunk(out, bias_0, bias_1, channel, num_taken, before_all, R, A)
            num_taken += is_there.to(tl.int32)
            moved += is_there.to(tl.int32)
        waiting = missing + (to_send - sent)
        poison, polls, deadline = ring.idle(op, moved, polls, deadline, waiting, out.epoch, R)
    ring.store_channel(op, channel, sent_before + sent, taken_before + num_taken, R)
    return poison


@portable(do_not_specialize=["num_tokens", "rank"], do_not_specialize_on_alignment=["ids"])
def return_kernel(
    result, ids, bias_0, bias_1, table, num_tokens, rank, S: tl.constexpr, R: tl.constexpr, A: tl.constexpr
):
    """Sends back the sums of this node for what it has forwarded, and adds those that come for this rank's tokens.

    Args:
        result: [num_tokens, HIDDEN] of DTYPE; ids, bias_0, bias_1: as of combine_kernel.
        S: Shape. R: Ring of the way back. A: NodeSums.
    """
    op = OpContext(table, rank, S)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, poison = prim.begin_launch(op, Stage.COMBINE_RECEIVE, StepPhase.COMBINE, A.POISON_LANES)
    out = Results(op, result, ids, num_tokens, epoch)
    forwarded = prim.address(op, Region.FORWARDED_CHUNKS, tl.int32)
    # C3
    if poison == 0:
        poison = await_peers(op, epoch, epoch, A.HAS_WEIGHTS, True)
    for channel in range(program, R.CHANNELS, num_programs):
        poison = return_channel(out, bias_0, bias_1, forwarded, channel, poison, R, A)
    # C6
    if poison != 0:
        prim.fail_behind(op, poison, StepPhase.COMBINE, epoch, Region.COMBINE_FLAGS, epoch)
        for channel in range(program, R.CHANNELS, num_programs):
            clear_results(result, num_tokens, channel, R, A)
    prim.finish_stage(op, Stage.COMBINE_RECEIVE, program, num_programs)
