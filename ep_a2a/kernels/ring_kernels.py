"""Device helpers of rings: words that tell how many chunks have arrived and been taken, and where a chunk lies.

Both counters of a ring grow by one per chunk for as long as the op lives, and are compared by wrapping difference. The
writer of chunk c may use its slot when c + 1 - num_slots chunks have been taken; the reader may read it when c + 1 have
arrived. A release of either counter orders what was written to, or read from, the slot before it.

RINGS, a compile-time argument of all kernels that use rings, is (nodes, ranks per node, channels, slots of a ring,
tokens of a chunk, chunks of M tokens, words of a line, words of a slot, words of a channel's staged chunk), those of
lines and slots by direction (ring_shape.py). With staged words, memory of other nodes is reached by puts only: a
chunk is written where it is staged and put to its slot, and counters are raised with puts.
"""

import triton.language as tl

from ep_a2a.kernels.jit import portable
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.primitives import POLLS_PER_CLOCK, address, overdue, pause, reduce_min, reduce_sum
from ep_a2a.kernels.put_kernels import after_arrival, put_and_count
from ep_a2a.kernels.receive_kernels import absent_rank
from ep_a2a.kernels.ring_shape import HEADER_WORDS

CHUNKS_ARRIVED = tl.constexpr(Region.CHUNKS_ARRIVED.value)
CHUNKS_TAKEN = tl.constexpr(Region.CHUNKS_TAKEN.value)
CHUNKS = tl.constexpr(Region.CHUNKS.value)
CHUNKS_BACK = tl.constexpr(Region.CHUNKS_BACK.value)
STAGED_CHUNKS = tl.constexpr(Region.STAGED_CHUNKS.value)
UNREAD = tl.constexpr(Region.UNREAD.value)
ELEMENTS = tl.constexpr(Region.ELEMENTS.value)
CHANNEL_STATE = tl.constexpr(Region.CHANNEL_STATE.value)

HEADER = tl.constexpr(HEADER_WORDS)
TO_EXPERTS = tl.constexpr(0)
BACK = tl.constexpr(1)


@portable
def counter_of(
    table, region: tl.constexpr, owner, direction: tl.constexpr, node, channel, RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Pointer to the counter that `owner` keeps of its ring with `node`; owner and node may be vectors.

    NVSHMEM counts in 64 bits, of which the lower ones are looked at.
    """
    NODES: tl.constexpr = RINGS[0]
    CHANNELS: tl.constexpr = RINGS[2]
    return address(table, region, owner, WORLD_SIZE, tl.int32) + 2 * ((direction * NODES + node) * CHANNELS + channel)


@portable
def has_reached(counter, target):
    """Whether a counter has come to `target`, the same in all threads; what was released with it can be read then."""
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
    return tl.sub(seen, target, sanitize_overflow=False) >= 0


@portable
def raise_counter(counter, value):
    """Sets a counter, ordered behind all that this program has written and read."""
    tl.debug_barrier()
    tl.atomic_xchg(counter, value, sem="release", scope="sys")


@portable
def slot_of(table, region: tl.constexpr, owner, node, channel, chunk, RINGS: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Address (int64) of a chunk's slot in `owner`'s ring with `node`; `chunk` counts from the op's first one on."""
    CHANNELS: tl.constexpr = RINGS[2]
    SLOTS: tl.constexpr = RINGS[3]
    SLOT_WORDS: tl.constexpr = RINGS[7]
    # a power of two divides 2**32, so that counters may wrap
    slot = (node * CHANNELS + channel) * SLOTS + (chunk & (SLOTS - 1))
    return tl.load(table + region * WORLD_SIZE + owner) + tl.cast(slot, tl.int64) * (SLOT_WORDS * 4)


@portable
def slot_to_fill(
    table, region: tl.constexpr, peer, channel, chunk, rank, RINGS: tl.constexpr, WORLD_SIZE: tl.constexpr
):  # fmt: skip
    """(the slot of this rank's next chunk for node `peer`, where the chunk is to be written), both addresses.

    By puts the slot is given as the place in this rank's own memory.
    """
    GPUS: tl.constexpr = RINGS[1]
    STAGED_WORDS: tl.constexpr = RINGS[8]
    node = rank // GPUS
    if STAGED_WORDS > 0:
        slot = slot_of(table, region, rank, node, channel, chunk, RINGS, WORLD_SIZE)
        staged = tl.load(table + STAGED_CHUNKS * WORLD_SIZE + rank) + tl.cast(channel, tl.int64) * (STAGED_WORDS * 4)
        written = tl.where(peer == node, slot, staged)
    else:
        slot = slot_of(table, region, peer * GPUS + rank % GPUS, node, channel, chunk, RINGS, WORLD_SIZE)
        written = slot
    return slot, written


@portable
def raise_at_node(
    table, region: tl.constexpr, target, source, num_bytes, direction: tl.constexpr, peer, channel, value, rank,
    RINGS: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Makes a counter of this rank's ring with node `peer`, which is kept there, `value`, one more than it was.

    By puts, bytes from `source` come to `target` of another node before that; both are addresses in this rank's memory.
    """
    GPUS: tl.constexpr = RINGS[1]
    node, partner = rank // GPUS, peer * GPUS + rank % GPUS
    if RINGS[8] > 0:
        counter = counter_of(table, region, rank, direction, node, channel, RINGS, WORLD_SIZE)
        if peer == node:
            raise_counter(counter, value)
        else:
            element = tl.load(table + ELEMENTS * WORLD_SIZE + partner)
            tl.debug_barrier()
            put_and_count(target, source, num_bytes, counter.to(tl.int64), element)
    else:
        raise_counter(counter_of(table, region, partner, direction, node, channel, RINGS, WORLD_SIZE), value)


@portable
def hand_over(
    table, slot, written, num_words, direction: tl.constexpr, peer, channel, value, rank, RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Makes a chunk of slot_to_fill the node's: `value` chunks of the channel have come to it then."""
    raise_at_node(
        table, CHUNKS_ARRIVED, slot, written, num_words * 4, direction, peer, channel, value, rank, RINGS, WORLD_SIZE
    )


@portable
def give_room(
    table, direction: tl.constexpr, peer, channel, value, rank, RINGS: tl.constexpr, WORLD_SIZE: tl.constexpr
):  # fmt: skip
    """Tells node `peer` that this rank has taken `value` chunks of the channel from it."""
    unread = tl.full((), 0, tl.int64)
    if RINGS[8] > 0:
        # a signal does not come without bytes
        unread = tl.load(table + UNREAD * WORLD_SIZE + rank)
    raise_at_node(
        table, CHUNKS_TAKEN, unread, unread, 8, direction, peer, channel, value, rank, RINGS, WORLD_SIZE
    )  # fmt: skip


@portable
def give_room_to_all(
    table, direction: tl.constexpr, channel, value, rank, NODE_LANES: tl.constexpr, RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """give_room for every node; in one hop where memory is reached by stores."""
    NODES: tl.constexpr = RINGS[0]
    GPUS: tl.constexpr = RINGS[1]
    if RINGS[8] > 0:
        for step in tl.static_range(NODES):
            give_room(table, direction, (rank // GPUS + step) % NODES, channel, value, rank, RINGS, WORLD_SIZE)
    else:
        nodes = tl.arange(0, NODE_LANES)
        partners = tl.where(nodes < NODES, nodes, 0) * GPUS + rank % GPUS
        taken = counter_of(table, CHUNKS_TAKEN, partners, direction, rank // GPUS, channel, RINGS, WORLD_SIZE)
        tl.debug_barrier()
        tl.atomic_xchg(taken, nodes * 0 + value, mask=nodes < NODES, sem="release", scope="sys")


@portable
def before_reading(counter, RINGS: tl.constexpr):
    """To be called when a chunk has come, by its counter, before it is read."""
    if RINGS[8] > 0:
        after_arrival(counter.to(tl.int64), tl.load(counter.to(tl.pointer_type(tl.int64)), volatile=True))


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
def pick(values, lane, LANES: tl.constexpr):
    """One lane of a vector [LANES], as a scalar."""
    return reduce_sum(tl.where(tl.arange(0, LANES) == lane, values, 0), 0)


@portable
def num_own_chunks(num_tokens, channel, RINGS: tl.constexpr):
    """Chunks that a channel sends to each node, at least one: whoever waits for a rank waits for its last chunk."""
    CHANNELS: tl.constexpr = RINGS[2]
    CHUNK_TOKENS: tl.constexpr = RINGS[4]
    num_chunks = (num_tokens + CHUNK_TOKENS - 1) // CHUNK_TOKENS
    return tl.maximum((num_chunks - channel + CHANNELS - 1) // CHANNELS, 1)


@portable
def tokens_of_chunk(num_tokens, channel, count, RINGS: tl.constexpr):
    """(first, end) of the tokens in the chunk that a channel sends after `count` others of a step."""
    CHANNELS: tl.constexpr = RINGS[2]
    CHUNK_TOKENS: tl.constexpr = RINGS[4]
    first = tl.minimum((channel + count * CHANNELS) * CHUNK_TOKENS, num_tokens)
    return first, tl.minimum(first + CHUNK_TOKENS, num_tokens)


@portable
def load_channel(
    table, direction: tl.constexpr, channel, rank, NODE_LANES: tl.constexpr, RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """([NODE_LANES] chunks that this rank has sent to each node before this step, those it has taken from each)."""
    NODES: tl.constexpr = RINGS[0]
    CHANNELS: tl.constexpr = RINGS[2]
    nodes = tl.arange(0, NODE_LANES)
    state = address(table, CHANNEL_STATE, rank, WORLD_SIZE, tl.int32) + (direction * CHANNELS + channel) * 2 * NODES
    sent = tl.load(state + nodes, mask=nodes < NODES, other=0)
    return sent, tl.load(state + NODES + nodes, mask=nodes < NODES, other=0)


@portable
def store_channel(
    table, direction: tl.constexpr, channel, sent, taken, rank, NODE_LANES: tl.constexpr, RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Remembers those counts for the next step."""
    NODES: tl.constexpr = RINGS[0]
    CHANNELS: tl.constexpr = RINGS[2]
    nodes = tl.arange(0, NODE_LANES)
    state = address(table, CHANNEL_STATE, rank, WORLD_SIZE, tl.int32) + (direction * CHANNELS + channel) * 2 * NODES
    tl.debug_barrier()
    tl.store(state + nodes, sent, mask=nodes < NODES)
    tl.store(state + NODES + nodes, taken, mask=nodes < NODES)


@portable
def idle(
    table, moved, polls, deadline, waiting, epoch, rank, NODE_LANES: tl.constexpr, RINGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
):  # fmt: skip
    """(poison word, polls, deadline) after one turn of a channel; a turn in which nothing moved counts as a poll.

    Args:
        waiting: [NODE_LANES], above 0 for the nodes that something is still to be sent to or to come from. When
            time is up a rank is accused that has sent no counts in this step, else the first of those.
    """
    GPUS: tl.constexpr = RINGS[1]
    poison = tl.full((), 0, tl.int32)
    polls = tl.where(moved > 0, 0, polls + 1)
    if moved == 0:
        pause(0)
        if polls % POLLS_PER_CLOCK == 0:
            first = reduce_min(tl.where(waiting > 0, tl.arange(0, NODE_LANES), NODE_LANES), 0)
            accused = absent_rank(table, epoch, first * GPUS + rank % GPUS, rank, WORLD_SIZE, WORLD_LANES)
            poison, deadline = overdue(table, polls, deadline, accused, rank, WORLD_SIZE, 1)
    return poison, polls, deadline
