"""Launches of an exchange over NVSHMEM: put blocks with signals, await those of the peers, let them send again.

Three launches, between which the blocks are copied out: nobody waits inside a launch for a later one of its own, and so
programs need not run at once. Signals only grow. What an exchange must see is kept on the device, so that a graph can
be replayed: state is int64 [NUM_WORDS].

NVSHMEM's device functions are linked in from its bitcode; these kernels run on GPUs only.
"""

import triton.language as tl

from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import POLLS_PER_CLOCK, clock_ns, pause
from ep_a2a.kernels.put_kernels import ADD, GE, put_with_signal, wait_for_signal

NUM_WORDS = 3
STOPPED = tl.constexpr(0)
"""Word of the node whose rank was waited for in vain, plus 1; launches behind it do nothing."""
ROUNDS = tl.constexpr(1)
"""Word of the exchanges that have ended."""
PIECES = tl.constexpr(2)
"""Word of the pieces that each peer has sent in them."""


@portable
def wait_until(signal, least, node, state, stopped_on_host, limit_ms):
    """0 when a signal (int64 pointer) has come to `least`, else what STOPPED holds: time was up, here or before."""
    stopped = tl.load(state + STOPPED)
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    polls = tl.full((), 0, tl.int32)
    deadline = tl.full((), 0, tl.int64)
    while (seen < least) & (stopped == 0):
        pause(0)
        seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
        polls += 1
        if (polls % POLLS_PER_CLOCK == 0) & (seen < least):
            now = clock_ns()
            if polls == POLLS_PER_CLOCK:
                deadline = now + tl.cast(limit_ms, tl.int64) * 1_000_000
            verdict = tl.where(now > deadline, tl.cast(node, tl.int64) + 1, 0)
            # threads read different clocks: the word's old value is one verdict for all
            stopped = tl.atomic_cas(state + STOPPED, tl.full((), 0, tl.int64), verdict, sem="relaxed", scope="gpu")
    if stopped != 0:
        tl.store(stopped_on_host, stopped)
    return stopped


@portable(do_not_specialize=["limit_ms", "block_bytes", "piece_bytes", "capacity_bytes", "node"])
def put_blocks_kernel(
    staged, landed, arrived, taken, elements, state, stopped_on_host, limit_ms, block_bytes, piece_bytes,
    capacity_bytes, node,
    NUM_NODES: tl.constexpr,
):  # fmt: skip
    """Puts pieces of the blocks for all other nodes; one program per node and piece.

    Args:
        staged, landed: symmetric uint8 [NUM_NODES, capacity_bytes]: blocks for, and from, the nodes.
        arrived, taken: symmetric int64 [NUM_NODES]: pieces that a node's rank has sent here, and exchanges of which it
            has taken this rank's blocks.
        elements: int32 [NUM_NODES], NVSHMEM's numbers of the nodes' ranks.
        state: int64 [NUM_WORDS]. stopped_on_host: int64 [1] that the host can read at any time.
        limit_ms: bound of a wait.
        block_bytes: how much of each block counts. piece_bytes: what a program puts.
        node: this rank's.
    """
    num_pieces = (block_bytes + piece_bytes - 1) // piece_bytes
    program = tl.program_id(0)
    # each rank begins with another peer
    peer = (node + 1 + program // num_pieces) % NUM_NODES
    first = (program % num_pieces) * piece_bytes
    stopped = wait_until(taken + peer, tl.load(state + ROUNDS), peer, state, stopped_on_host, limit_ms)
    if stopped == 0:
        put_with_signal(
            landed.to(tl.int64) + tl.cast(node, tl.int64) * capacity_bytes + first,
            staged.to(tl.int64) + tl.cast(peer, tl.int64) * capacity_bytes + first,
            tl.cast(tl.minimum(block_bytes - first, piece_bytes), tl.int64),
            (arrived + node).to(tl.int64), tl.full((), 1, tl.uint64), tl.full((), ADD, tl.int32),
            tl.load(elements + peer),
        )  # fmt: skip


@portable(do_not_specialize=["limit_ms", "block_bytes", "piece_bytes", "node"])
def await_blocks_kernel(
    arrived, state, stopped_on_host, limit_ms, block_bytes, piece_bytes, node, NUM_NODES: tl.constexpr
):  # fmt: skip
    """Waits for all pieces of the other nodes' blocks, one program per node; arguments as of put_blocks_kernel."""
    peer = (node + 1 + tl.program_id(0)) % NUM_NODES
    least = tl.load(state + PIECES) + (block_bytes + piece_bytes - 1) // piece_bytes
    if wait_until(arrived + peer, least, peer, state, stopped_on_host, limit_ms) == 0:
        # at once; it does what else a transport needs before the bytes may be read
        wait_for_signal((arrived + peer).to(tl.int64), tl.full((), GE, tl.int32), tl.cast(least, tl.uint64))


@portable(do_not_specialize=["block_bytes", "piece_bytes", "node"])
def release_blocks_kernel(
    taken, unread, elements, state, block_bytes, piece_bytes, node, NUM_NODES: tl.constexpr
):  # fmt: skip
    """Tells the other nodes that their blocks have been copied out, and ends the exchange; one program.

    Args:
        unread: symmetric int64 [NUM_NODES], which is put with the signals: they do not come without bytes.
        others: as of put_blocks_kernel.
    """
    if tl.load(state + STOPPED) == 0:
        for turn in range(1, NUM_NODES):
            own = (unread + node).to(tl.int64)
            put_with_signal(
                own, own, tl.full((), 8, tl.int64), (taken + node).to(tl.int64), tl.full((), 1, tl.uint64),
                tl.full((), ADD, tl.int32), tl.load(elements + (node + turn) % NUM_NODES),
            )  # fmt: skip
        pieces = tl.load(state + PIECES) + (block_bytes + piece_bytes - 1) // piece_bytes
        rounds = tl.load(state + ROUNDS) + 1
        tl.debug_barrier()
        tl.store(state + PIECES, pieces)
        tl.store(state + ROUNDS, rounds)
