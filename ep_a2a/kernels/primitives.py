"""Every ordering pattern of this package, named, with what it guarantees. Only this file touches flags.

The patterns, and why they are enough (docs/memory-model.md has the proof):

arrive_last  all programs of a launch add one to a counter; the last to arrive has acquired what the others released.
post_all     one release per peer of an epoch into that peer's flag word: whoever acquires the epoch sees all writes
             that this rank ordered before the post.
wait_all     acquires the flag word of every peer until each has reached the epoch, or the op is poisoned, or time is
             up. Epochs grow by one and wrap, so flags are compared by wrapping difference.
fail         the first failure of an op on this rank: recorded for the host, then told to every peer.

No inline assembly runs in the interpreter; the few functions that need it name a Python twin.
"""

import time

import triton.language as tl

from ep_a2a.kernels.layout import RECORD_HEADER_WORDS, Region, State
from ep_a2a.kernels.portable import portable

POISON = tl.constexpr(Region.POISON.value)
STATE = tl.constexpr(Region.STATE.value)
LIMITS = tl.constexpr(Region.LIMITS.value)
ERROR_RECORD = tl.constexpr(Region.ERROR_RECORD.value)
ARRIVED = tl.constexpr(State.ARRIVED.value)
ERROR_CLAIMED = tl.constexpr(State.ERROR_CLAIMED.value)
RECORD_HEADER = tl.constexpr(RECORD_HEADER_WORDS)

# Values of the PHASE word of STATE: what the op's next launch may be.
IDLE = tl.constexpr(0)
DISPATCHED = tl.constexpr(1)

# Failure codes, the first word of the error record; kernels/failures.py turns them into exceptions.
TIMEOUT = tl.constexpr(1)
ALTERNATION = tl.constexpr(2)
STRIDE_MISMATCH = tl.constexpr(3)
CAPACITY = tl.constexpr(4)
FOREIGN_INDICES = tl.constexpr(5)
WEIGHTS_MISSING = tl.constexpr(6)

# The poison word is code << 16 | accused rank; this rank number accuses nobody.
NOBODY = tl.constexpr(0xFFFF)

# One arrival, and one poisoned arrival in the upper half of the word.
POISONED_ARRIVAL = tl.constexpr((1 << 16) + 1)

# Reading the clock costs an atomic (see wait_all), so it is read once in this many polls.
POLLS_PER_CLOCK = tl.constexpr(32)

INTERPRETER_PAUSE_SECS = 5e-5


def _host_clock_ns() -> int:
    return time.monotonic_ns()


def _host_pause() -> None:
    # Interpreted ranks share few cores: without yielding, the waiting ranks starve the one they wait for.
    time.sleep(INTERPRETER_PAUSE_SECS)


@portable(interpreted=_host_clock_ns)
def clock_ns():
    """Nanoseconds of a clock that all programs of this rank share."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@portable(interpreted=_host_pause)
def pause():
    """Lets others run between two polls; nothing on a GPU, where the poll itself takes a trip to memory."""


@portable
def address(table, region: tl.constexpr, peer, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to `peer`'s region; `peer` may be a vector. Regions start at multiples of 256 bytes."""
    return tl.load(table + region * WORLD_SIZE + peer).to(tl.pointer_type(DTYPE))


@portable
def reduce_sum(values, axis: tl.constexpr):
    """Sum along an axis."""
    return tl.reduce(values, axis, tl.standard._sum_combine)


@portable
def reduce_max(values, axis: tl.constexpr):
    """Maximum along an axis."""
    return tl.reduce(values, axis, tl.standard._elementwise_max)


@portable
def reduce_min(values, axis: tl.constexpr):
    """Minimum along an axis."""
    return tl.reduce(values, axis, tl.standard._elementwise_min)


@portable
def running_sum(values, axis: tl.constexpr):
    """Inclusive prefix sum along an axis."""
    return tl.associative_scan(values, axis, tl.standard._sum_combine)


@portable
def next_epoch(word):
    """The epoch after the one in `word`. Wraps, and skips 0, the value of memory that nobody has written."""
    epoch = tl.add(tl.load(word), 1, sanitize_overflow=False)
    return tl.where(epoch == 0, 1, epoch)


@portable
def poison_of(table, rank, WORLD_SIZE: tl.constexpr):
    """This rank's poison word, the same value in every thread of the program: one thread reads, all receive."""
    word = address(table, POISON, rank, WORLD_SIZE, tl.int32)
    return tl.atomic_add(word, 0, sem="relaxed", scope="sys")


@portable
def arrive_last(table, rank, num_programs, poison, WORLD_SIZE: tl.constexpr):
    """(True in the program that arrives last, whether any program arrived poisoned).

    The last program sees the memory operations of all programs of the launch. The barrier orders every thread of a
    program before the thread that arrives for it. Poisoned arrivals also count in the upper half of the word, so that
    the last program knows of programs that left their part undone. The word is back at zero when the launch ends.
    """
    counter = address(table, STATE, rank, WORLD_SIZE, tl.int32) + ARRIVED
    mine = tl.where(poison == 0, 1, POISONED_ARRIVAL)
    tl.debug_barrier()
    before = tl.full((), 0, tl.int32)
    if num_programs > 1:
        before += tl.atomic_add(counter, mine, sem="acq_rel", scope="sys")
    last = (before & 0xFFFF) == num_programs - 1
    if last:
        tl.store(counter, 0)
    return last, (before + mine) >= POISONED_ARRIVAL


@portable
def post_all(table, region: tl.constexpr, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """Releases `epoch` into this rank's flag word at every peer: one vector of posts costs one hop, a loop W."""
    peers = tl.arange(0, WORLD_LANES)
    present = peers < WORLD_SIZE
    flags = address(table, region, tl.where(present, peers, 0), WORLD_SIZE, tl.int32) + rank
    epochs = tl.full((WORLD_LANES,), 0, tl.int32) + epoch
    tl.debug_barrier()
    tl.atomic_xchg(flags, epochs, mask=present, sem="release", scope="sys")


@portable
def late_lanes(flags, epoch, present):
    """1 in the lanes whose flag has not reached `epoch`; a masked atomic's result is undefined, so it is replaced."""
    seen = tl.where(present, tl.atomic_add(flags, 0, mask=present, sem="acquire", scope="sys"), epoch)
    return (tl.sub(seen, epoch, sanitize_overflow=False) < 0).to(tl.int32)


@portable
def wait_all(table, region: tl.constexpr, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """Waits until every peer's flag has reached `epoch`. 0 when all came, else the poison word.

    All threads of a program leave with one verdict: arrival is a reduction over all lanes, and time is up when one
    compare-and-swap on the poison word says so, whose old value every thread receives. Threads read different clocks.
    """
    lanes = tl.arange(0, WORLD_LANES)
    present = lanes < WORLD_SIZE
    flags = address(table, region, rank, WORLD_SIZE, tl.int32) + lanes
    poison_word = address(table, POISON, rank, WORLD_SIZE, tl.int32)
    late = late_lanes(flags, epoch, present)
    num_late = reduce_sum(late, 0)
    poison = tl.full((), 0, tl.int32)
    polls = tl.full((), 0, tl.int32)
    deadline = tl.full((), 0, tl.int64)
    while (num_late > 0) & (poison == 0):
        pause()
        late = late_lanes(flags, epoch, present)
        num_late = reduce_sum(late, 0)
        polls += 1
        if (polls % POLLS_PER_CLOCK == 0) & (num_late > 0):
            now = clock_ns()
            # the first look at the clock starts the time: waits that end before it, the common ones, never look
            if polls == POLLS_PER_CLOCK:
                deadline = now + tl.load(address(table, LIMITS, rank, WORLD_SIZE, tl.int64))
            accused = reduce_min(tl.where(late > 0, lanes, WORLD_LANES), 0)
            verdict = tl.where(now > deadline, (TIMEOUT << 16) | accused, 0)
            poison = tl.atomic_cas(poison_word, 0, verdict, sem="relaxed", scope="sys")
    tl.debug_barrier()
    return poison


@portable
def fail(table, poison, phase, epoch, detail, late, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """Records this rank's first failure for the host and poisons every peer that is not poisoned yet.

    `late` marks the lanes of the ranks that had not arrived. The host may see the code before the rest; it
    synchronises the device before it reads the rest.
    """
    state = address(table, STATE, rank, WORLD_SIZE, tl.int32)
    if tl.atomic_cas(state + ERROR_CLAIMED, 0, 1, sem="relaxed", scope="gpu") == 0:
        lanes = tl.arange(0, WORLD_LANES)
        present = lanes < WORLD_SIZE
        record = address(table, ERROR_RECORD, rank, WORLD_SIZE, tl.int32)
        tl.store(record + 1, poison & 0xFFFF)
        tl.store(record + 2, phase)
        tl.store(record + 3, epoch)
        tl.store(record + 4, detail)
        tl.store(record + RECORD_HEADER + lanes, late, mask=present)
        # compare-and-swap takes no mask: surplus lanes repeat this rank's own word
        words = address(table, POISON, tl.where(present, lanes, rank), WORLD_SIZE, tl.int32)
        tl.atomic_cas(
            words, tl.full((WORLD_LANES,), 0, tl.int32), tl.full((WORLD_LANES,), 0, tl.int32) + poison,
            sem="relaxed", scope="sys",
        )  # fmt: skip
        tl.debug_barrier()
        tl.store(record, poison >> 16)


@portable
def lanes_behind(table, region: tl.constexpr, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """1 in the lanes of ranks whose flag has not reached `epoch` now."""
    lanes = tl.arange(0, WORLD_LANES)
    flags = address(table, region, rank, WORLD_SIZE, tl.int32) + lanes
    return late_lanes(flags, epoch, lanes < WORLD_SIZE)
