"""Device helpers of rings: words that tell how many chunks have arrived and been taken, and where a chunk lies.

Both counters of a ring grow by one per chunk for as long as the op lives, and are compared by wrapping difference. The
writer of chunk c may use its slot when c + 1 - SLOTS chunks have been taken; the reader may read it when c + 1 have
arrived. A release of either counter orders what was written to, or read from, the slot before it.

Helpers take op, the OpContext, and R, the Ring of the direction (kernels/constants.py). With R.STAGED_WORDS, memory of
other nodes is reached by puts only: a chunk is written where it is staged and put to its slot, and counters are raised
with puts.
"""

import triton.language as tl

from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import POLLS_PER_CLOCK
from ep_a2a.kernels.put_kernels import after_arrival, put_and_count
from ep_a2a.kernels.receive_kernels import absent_rank
from ep_a2a.kernels.ring_shape import TO_EXPERTS
from ep_a2a.kernels.target import barrier, volatile_load

UNREAD_BYTES = tl.constexpr(8)


@portable
def counter_of(op, region: tl.constexpr, owner, node, channel, R: tl.constexpr):
    """Pointer to the counter that `owner` keeps of its ring with `node`; owner and node may be vectors.

    NVSHMEM counts in 64 bits; only the lower 32 are compared.
    """
    ring = (R.DIRECTION * R.NODES + node) * R.CHANNELS + channel
    return prim.address_at(op, region, owner, tl.int32) + 2 * ring


@portable
def has_reached(counter, target):
    """Whether a counter has come to `target`, the same in all threads; what was released with it can be read then."""
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
    return tl.sub(seen, target, sanitize_overflow=False) >= 0


@portable
def raise_counter(counter, value):
    """Sets a counter, ordered behind all that this program has written and read."""
    barrier()
    tl.atomic_xchg(counter, value, sem="release", scope="sys")


@portable
def slot_of(op, owner, node, channel, chunk, R: tl.constexpr):
    """Address (int64) of a chunk's slot in `owner`'s ring with `node`; `chunk` counts from the op's first one on."""
    region: tl.constexpr = Region.CHUNKS if R.DIRECTION == TO_EXPERTS else Region.CHUNKS_BACK
    # a power of two divides 2**32, so that counters may wrap
    slot = (node * R.CHANNELS + channel) * R.SLOTS + (chunk & (R.SLOTS - 1))
    return tl.load(op.table + region * op.WORLD_SIZE + owner) + tl.cast(slot, tl.int64) * (R.SLOT_WORDS * 4)


@portable
def slot_to_fill(op, peer, channel, chunk, R: tl.constexpr):
    """(the slot of this rank's next chunk for node `peer`, where the chunk is to be written), both addresses.

    By puts the slot is given as the place in this rank's own memory.
    """
    node = op.rank // R.GPUS
    if R.STAGED_WORDS > 0:
        slot = slot_of(op, op.rank, node, channel, chunk, R)
        staged = tl.load(op.table + Region.STAGED_CHUNKS * op.WORLD_SIZE + op.rank)
        staged += tl.cast(channel, tl.int64) * (R.STAGED_WORDS * 4)
        written = tl.where(peer == node, slot, staged)
    else:
        slot = slot_of(op, peer * R.GPUS + op.rank % R.GPUS, node, channel, chunk, R)
        written = slot
    return slot, written


@portable
def raise_at_node(op, region: tl.constexpr, target, source, num_bytes, peer, channel, value, R: tl.constexpr):
    """Makes a counter of this rank's ring with node `peer`, which is kept there, `value`, one more than it was.

    By puts, bytes from `source` come to `target` of another node before that; both are addresses in this rank's memory.
    """
    node, partner = op.rank // R.GPUS, peer * R.GPUS + op.rank % R.GPUS
    if R.STAGED_WORDS > 0:
        counter = counter_of(op, region, op.rank, node, channel, R)
        if peer == node:
            raise_counter(counter, value)
        else:
            element = tl.load(op.table + Region.ELEMENTS * op.WORLD_SIZE + partner)
            barrier()
            put_and_count(target, source, num_bytes, counter.to(tl.int64), element)
    else:
        raise_counter(counter_of(op, region, partner, node, channel, R), value)


@portable
def hand_over(op, slot, written, num_words, peer, channel, value, R: tl.constexpr):
    """Makes a chunk of slot_to_fill the node's: `value` chunks of the channel have come to it then."""
    raise_at_node(op, Region.CHUNKS_ARRIVED, slot, written, num_words * 4, peer, channel, value, R)


@portable
def give_room(op, peer, channel, value, R: tl.constexpr):
    """Raises the count of chunks that this rank has taken from node `peer` to `value`, for the channel."""
    unread = tl.full((), 0, tl.int64)
    if R.STAGED_WORDS > 0:
        # NVSHMEM's interface does not say that a put without bytes raises the counter
        unread = tl.load(op.table + Region.UNREAD * op.WORLD_SIZE + op.rank)
    raise_at_node(op, Region.CHUNKS_TAKEN, unread, unread, UNREAD_BYTES, peer, channel, value, R)


@portable
def give_room_to_all(op, channel, value, R: tl.constexpr):
    """give_room for every node; in one hop where memory is reached by stores."""
    if R.STAGED_WORDS > 0:
        for step in tl.static_range(R.NODES):
            give_room(op, (op.rank // R.GPUS + step) % R.NODES, channel, value, R)
    else:
        nodes = tl.arange(0, R.NODE_LANES)
        partners = tl.where(nodes < R.NODES, nodes, 0) * R.GPUS + op.rank % R.GPUS
        taken = counter_of(op, Region.CHUNKS_TAKEN, partners, op.rank // R.GPUS, channel, R)
        barrier()
        tl.atomic_xchg(taken, prim.full_like(nodes, value), mask=nodes < R.NODES, sem="release", scope="sys")


@portable
def before_reading(counter, R: tl.constexpr):
    """To be called when a chunk has come, by its counter, before it is read."""
    if R.STAGED_WORDS > 0:
        after_arrival(counter.to(tl.int64), volatile_load(counter.to(tl.pointer_type(tl.int64))))


@portable
def words_at(address_bytes, offset_words: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to elements of DTYPE that begin so many words behind the address of a slot or a line."""
    aligned: tl.constexpr = 16 if offset_words % 4 == 0 else 4
    return tl.multiple_of((address_bytes + offset_words * 4).to(tl.pointer_type(DTYPE)), aligned)


@portable
def row_at(base, row, WIDTH: tl.constexpr, ELEMENT: tl.constexpr):
    """Pointer to row `row` of a region, with WIDTH elements per row."""
    # the hint must be given here: on the result of a call it would be lost
    aligned: tl.constexpr = 16 if WIDTH * ELEMENT.primitive_bitwidth % 128 == 0 else 1
    return tl.multiple_of(base + tl.cast(row, tl.int64) * WIDTH, aligned)


@portable
def num_own_chunks(num_tokens, channel, R: tl.constexpr):
    """Chunks that a channel sends to each node, at least one, since a wait for a rank is one for its last chunk."""
    num_chunks = (num_tokens + R.CHUNK_TOKENS - 1) // R.CHUNK_TOKENS
    return tl.maximum((num_chunks - channel + R.CHANNELS - 1) // R.CHANNELS, 1)


@portable
def tokens_of_chunk(num_tokens, channel, count, R: tl.constexpr):
    """(first, end) of the tokens in the chunk that a channel sends after `count` others of a step."""
    first = tl.minimum((channel + count * R.CHANNELS) * R.CHUNK_TOKENS, num_tokens)
    return first, tl.minimum(first + R.CHUNK_TOKENS, num_tokens)


@portable
def state_of_channel(op, channel, R: tl.constexpr):
    """Pointer to a channel's counts of chunks: NODES that were sent, then NODES that were taken."""
    return prim.address(op, Region.CHANNEL_STATE, tl.int32) + (R.DIRECTION * R.CHANNELS + channel) * 2 * R.NODES


@portable
def load_channel(op, channel, R: tl.constexpr):
    """([NODE_LANES] chunks that this rank has sent to each node before this step, those it has taken from each)."""
    nodes = tl.arange(0, R.NODE_LANES)
    state = state_of_channel(op, channel, R)
    sent = tl.load(state + nodes, mask=nodes < R.NODES, other=0)
    return sent, tl.load(state + R.NODES + nodes, mask=nodes < R.NODES, other=0)


@portable
def store_channel(op, channel, sent, taken, R: tl.constexpr):
    """Keeps those counts for the next step."""
    nodes = tl.arange(0, R.NODE_LANES)
    state = state_of_channel(op, channel, R)
    barrier()
    tl.store(state + nodes, sent, mask=nodes < R.NODES)
    tl.store(state + R.NODES + nodes, taken, mask=nodes < R.NODES)


@portable
def idle(op, moved, polls, deadline, waiting, epoch, R: tl.constexpr):
    """(poison word, polls, deadline) after one turn of a channel; a turn in which nothing moved counts as a poll.

    Args:
        waiting: [NODE_LANES], above 0 for the nodes that something is still to be sent to or to come from. When
            time is up a rank is accused that has sent no counts in this step, else the first of those on other nodes.
    """
    poison = tl.full((), 0, tl.int32)
    polls = tl.where(moved > 0, 0, prim.next_poll(polls))
    if moved == 0:
        prim.pause(0)
        if polls % POLLS_PER_CLOCK == 0:
            nodes = tl.arange(0, R.NODE_LANES)
            # this rank has no room for its own chunk where another node's is missing
            others = (waiting > 0) & (nodes != op.rank // R.GPUS)
            first = prim.reduce_min(tl.where(others, nodes, R.NODE_LANES), 0)
            otherwise = first * R.GPUS + op.rank % R.GPUS
            accused = absent_rank(op, epoch, otherwise)
            poison, deadline = prim.overdue(op, polls, deadline, accused, 1)
    return poison, polls, deadline
