"""Device code of the reference push for CPU processes: the push of `push.cu`, run by Triton's interpreter.

Its times mean nothing. It lets the contender, its plan of the bytes and its check run on every machine.
"""

import triton.language as tl

from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import late_lanes, pause, reduce_sum

# Words of a direction's state (int32), this rank's only.
EPOCH = tl.constexpr(0)
ARRIVED = tl.constexpr(1)
GAVE_UP = tl.constexpr(2)

# Columns of a plan: the fields of push.Peer.
FIRST_VECTOR = tl.constexpr(0)
NUM_VECTORS = tl.constexpr(1)
TARGET = tl.constexpr(2)
FLAG_THERE = tl.constexpr(3)
FLAG_HERE = tl.constexpr(4)
PLAN_WIDTH = tl.constexpr(5)

VECTOR_WORDS = tl.constexpr(4)


@portable
def push_kernel(
    source, plan, state, max_polls, NUM_PEERS: tl.constexpr, PEER_LANES: tl.constexpr, THREADS: tl.constexpr
):
    """Pushes a contiguous run of 16-byte vectors to every peer, posts one flag each, and waits for all peers' flags.

    Program p serves peer p % NUM_PEERS. The last program to finish releases one flag per peer, acquires all of its own,
    and resets the state for the next launch. After `max_polls` polls it gives up and records that in the state.

    source: int32 words to send. plan: int64 [NUM_PEERS, PLAN_WIDTH].
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    peer = plan + program % NUM_PEERS * PLAN_WIDTH
    count = tl.load(peer + NUM_VECTORS).to(tl.int32)
    read = source + tl.load(peer + FIRST_VECTOR) * VECTOR_WORDS
    write = tl.load(peer + TARGET).to(tl.pointer_type(tl.int32))
    offsets = tl.arange(0, THREADS * VECTOR_WORDS)
    stride = num_programs // NUM_PEERS * THREADS
    for first in range(program // NUM_PEERS * THREADS, count, stride):
        words = first * VECTOR_WORDS + offsets
        data = tl.load(read + words, mask=words < count * VECTOR_WORDS)
        tl.store(write + words, data, mask=words < count * VECTOR_WORDS)

    before = tl.atomic_add(state + ARRIVED, 1, sem="acq_rel", scope="sys")
    if before == num_programs - 1:
        lanes = tl.arange(0, PEER_LANES)
        present = lanes < NUM_PEERS
        peers = plan + tl.where(present, lanes, 0) * PLAN_WIDTH
        there = tl.load(peers + FLAG_THERE).to(tl.pointer_type(tl.int32))
        here = tl.load(peers + FLAG_HERE).to(tl.pointer_type(tl.int32))
        epoch = tl.add(tl.load(state + EPOCH), 1, sanitize_overflow=False)
        epochs = tl.full((PEER_LANES,), 0, tl.int32) + epoch
        tl.atomic_xchg(there, epochs, mask=present, sem="release", scope="sys")
        num_late = reduce_sum(late_lanes(here, epoch, present, True), 0)
        polls = tl.full((), 0, tl.int32)
        while (num_late > 0) & (polls < max_polls):
            pause(0)
            num_late = reduce_sum(late_lanes(here, epoch, present, True), 0)
            polls += 1
        if num_late > 0:
            tl.store(state + GAVE_UP, 1)
        tl.store(state + ARRIVED, 0)
        tl.store(state + EPOCH, epoch)
