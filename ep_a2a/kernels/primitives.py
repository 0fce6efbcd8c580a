"""Every ordering pattern of this package, named, with what it guarantees. Only this file posts and awaits flags.

The patterns, and why they are enough (docs/memory-model.md has the proof):

begin_stage  reads the op's step counters; finish_stage moves one on when all programs of the launch have come there.
arrive_last  all programs of a launch add one to a counter; the last to arrive has acquired what the others released.
post_arrival each program of a launch adds its share to a flag word at every peer, as a release: whoever acquires the
             sum sees what all of them have written before.
post_all     one post per peer of an epoch into that peer's flag word. If it ORDERS, it is a release: whoever acquires
             the epoch sees all writes that this rank ordered before the post. Else earlier launches have ended.
wait_all     reads (if it ORDERS, acquires) the flag word of every peer until each has reached the epoch, or the op is
             poisoned, or time is up. Epochs grow by one and wrap, so flags are compared by wrapping difference.
flagged      a word of 8 bytes that carries 4 bytes of payload and the epoch: it is there when its epoch is. No fence.
EMPTY        an element with all bits set has not arrived: payloads never contain one, readers leave one behind.
overdue      the one verdict of a wait that goes on for too long, the same in all threads of a program.
fail         the first failure of an op on this rank: recorded for the host, then posted to every peer.

No inline assembly runs in the interpreter; the few functions that need it name a Python twin.
"""

import time

import triton.language as tl

from ep_a2a.kernels.layout import ARRIVAL_SHIFT, STEP_SHIFT, FailureCode, Poison, Record, Region, Stage, State
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.target import barrier, on_amd, polls_in_one, volatile_load

NUM_REGIONS = tl.constexpr(len(Region))
NUM_STAGES = tl.constexpr(len(Stage))

EMPTY = tl.constexpr(-1)

# The poison word is code << 16 | accused rank; this rank number accuses nobody.
NOBODY = tl.constexpr(0xFFFF)

# One arrival, and one poisoned arrival in the upper half of the word.
POISONED_ARRIVAL = tl.constexpr((1 << 16) + 1)

# Reading the clock costs an atomic (see wait_all), so it is read once in this many polls. Not timed: so many
# polls take microseconds, a time-out seconds.
POLLS_PER_CLOCK = tl.constexpr(32)
# From here on polls are counted from half of it; both are multiples of POLLS_PER_CLOCK (see next_poll).
MANY_POLLS = tl.constexpr(1 << 30)

# How long an AMD GPU sleeps at once: 256 cycles at 2.1 GHz.
AMD_SLEEP_NS = tl.constexpr(122)

# An interpreted poll costs a millisecond of Python; ranks that share cores sleep longer than they poll.
INTERPRETER_PAUSE_SECS = 2e-3


@portable(interpreted=time.monotonic_ns)
def clock_ns():
    """Nanoseconds of a clock that all programs of this rank share."""
    if on_amd():
        # a counter of 100 MHz; "=s": a pair of registers that all threads share
        now = 10 * tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    return now


def _interpreted_pause(_pause_ns: object) -> None:
    # Interpreted ranks share few cores: without yielding, the waiting ranks starve the one they wait for.
    time.sleep(INTERPRETER_PAUSE_SECS)


@portable(interpreted=_interpreted_pause)
def pause(pause_ns):
    """Sleeps between two polls, about `pause_ns` on a GPU.

    Where many programs wait, their polls would take bandwidth from what they wait for.
    """
    if on_amd():
        for _ in range(0, pause_ns, AMD_SLEEP_NS):
            tl.inline_asm_elementwise("s_sleep 4\ns_mov_b32 $0, 0", "=s", [], dtype=tl.int32, is_pure=False, pack=1)
    elif pause_ns > 0:
        tl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [pause_ns], dtype=tl.int32, is_pure=False, pack=1
        )


def _nothing() -> None:
    """An interpreted launch begins when the one before it has ended."""


@portable(interpreted=_nothing)
def after_previous_launch():
    """Waits for the end of the launch before this one, of which this one was set up while it still ran.

    Programmatic dependent launch: all that a launch does comes after this wait (CUDA C++ programming guide,
    "Programmatic Dependent Launch"). finish_stage lets the next launch be set up. On AMD GPUs launches of one stream
    follow each other.
    """
    if not on_amd():
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@portable(interpreted=_nothing)
def allow_next_launch():
    """Lets the next launch take this program's place on the GPU; it must not wait for other ranks after this.

    A program of the next launch holds its place while it waits for the end of this launch. Were it there earlier, it
    could keep programs of other ranks on the same GPU from running, for which this launch waits.
    """
    if not on_amd():
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@portable
def address_at(op, region: tl.constexpr, peer, DTYPE: tl.constexpr):
    """Pointer to `peer`'s region; `peer` may be a vector. Regions start at multiples of 256 bytes."""
    return tl.load(op.table + region * op.WORLD_SIZE + peer).to(tl.pointer_type(DTYPE))


@portable
def address(op, region: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to this rank's own region."""
    return address_at(op, region, op.rank, DTYPE)


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
def pick(values, lane):
    """One lane of a vector, as a scalar. A sum over its lanes would take three times the instructions."""
    return reduce_sum(tl.gather(values, full_like(tl.arange(0, 1), lane), 0), 0)


@portable
def running_sum(values, axis: tl.constexpr):
    """Inclusive prefix sum along an axis."""
    return tl.associative_scan(values, axis, tl.standard._sum_combine)


@portable
def begin_stage(op, stage: tl.constexpr):
    """(epoch of the op's current step, non-zero when `stage` is not the next one of the step).

    A counter has one value for all programs of a launch, however many of them have finished already: it moves on when
    the last one does. Epochs are 1 to 2**32 - 1, and then 1 again: 0 is what memory holds that nobody has written.
    """
    steps = op.table + NUM_REGIONS * op.WORLD_SIZE
    done = tl.load(steps + stage) >> STEP_SHIFT
    out_of_order = done - done
    for other in tl.static_range(NUM_STAGES):
        finished = tl.load(steps + other) >> STEP_SHIFT
        out_of_order = out_of_order | (finished - done - (1 if other < stage else 0))
    # done modulo 2**32 - 1, since 2**32 is 1 there
    folded = (done & 0xFFFFFFFF) + (done >> 32)
    folded = tl.where(folded >= 0xFFFFFFFF, folded - 0xFFFFFFFF, folded)
    return (folded + 1).to(tl.int32), out_of_order


@portable
def full_like(vector, value):
    """`value` in every lane of a vector like `vector`, of integers.

    The interpreter mistypes a scalar condition that meets a vector; as a vector the value has the right type.
    """
    return vector * 0 + value


@portable
def poison_address(op):
    """Pointer to this rank's poison word, or where ranks may be masked to that and MASKED as one word."""
    word: tl.constexpr = tl.int64 if op.MASKS else tl.int32
    return address(op, Region.POISON, word)


@portable
def load_poison(poison_word, LANES: tl.constexpr):
    """Load the word of poison_address into every lane, without waiting for it; `initial_poison` does.

    Other loads may be issued in between, so that all are in flight together. With at least as many lanes as a program
    has threads each lane is read by one thread, and their reduction is one verdict for all.
    """
    return volatile_load(poison_word + full_like(tl.arange(0, LANES), 0))


@portable
def initial_poison(op, answer, phase: tl.constexpr, epoch, out_of_order):
    """Return the poison word that this launch starts with, 0 to go on; a launch out of its order fails here.

    Args:
        answer: from load_poison.
    """
    poison = reduce_max(answer, 0)
    if op.MASKS:
        poison = (poison & 0xFFFFFFFF).to(tl.int32)
    if (poison == 0) & (out_of_order != 0):
        poison = (op.rank | (FailureCode.ALTERNATION << 16)).to(tl.int32)
        nobody = full_like(tl.arange(0, op.WORLD_LANES), 0)
        fail(op, poison, phase, epoch, 0, nobody)
    return poison


@portable
def masked_of(op, answer):
    """Return the ranks that are masked, bit r for rank r: one value for all threads. answer: from load_poison."""
    masked = tl.full((), 0, tl.int32)
    if op.MASKS:
        # bits are only ever set, so that the largest of all lanes is the latest
        masked = (reduce_max(answer, 0) >> 32).to(tl.int32)
    return masked


@portable
def masked_now(op):
    """Read which ranks are masked. One thread reads, so every thread of the program gets the same value."""
    return tl.atomic_add(address(op, Region.POISON, tl.int32) + Poison.MASKED, 0, sem="relaxed", scope="sys")


@portable
def is_live(masked, ranks):
    """Return which ranks are not masked. masked: from masked_of or masked_now."""
    return ((masked >> ranks) & 1) == 0


@portable
def present_ranks(op, lanes, masked):
    """Return which lanes are ranks that are not masked. masked: from masked_of."""
    present = lanes < op.WORLD_SIZE
    if op.MASKS:
        present = present & is_live(masked, lanes)
    return present


@portable
def begin_launch(op, stage: tl.constexpr, phase: tl.constexpr, POISON_LANES: tl.constexpr, unlike=0):
    """Return (epoch, poison word) with which a program begins: begin_stage, load_poison and initial_poison in turn.

    unlike: not 0 where a launch is out of its order for another reason than its stage.
    """
    epoch, out_of_order = begin_stage(op, stage)
    answer = load_poison(poison_address(op), POISON_LANES)
    return epoch, initial_poison(op, answer, phase, epoch, out_of_order | unlike)


@portable
def share_of(unit, program, num_programs):
    """Returns what a program adds to a word that counts steps by `unit`; a launch's programs add one unit together."""
    return tl.where(program == 0, unit - num_programs + 1, 1)


@portable
def finish_stage(op, stage: tl.constexpr, program, num_programs, DEPENDENT_LAUNCH: tl.constexpr = False):
    """Counts this program's arrival at the end of a stage; all of a launch add up to one step. Nobody waits for it.

    With DEPENDENT_LAUNCH, the next launch is set up once every program has come here.
    """
    counter = op.table + NUM_REGIONS * op.WORLD_SIZE + stage
    share = share_of(1 << STEP_SHIFT, program, num_programs)
    # one thread arrives for its program: behind the barrier, none of them waits for another rank
    barrier()
    if DEPENDENT_LAUNCH:
        allow_next_launch()
    tl.atomic_add(counter, tl.cast(share, tl.int64), sem="relaxed", scope="gpu")


@portable
def poison_of(op):
    """Reads this rank's poison word. One thread reads, so every thread of the program gets the same value."""
    return tl.atomic_add(address(op, Region.POISON, tl.int32), 0, sem="relaxed", scope="sys")


@portable
def arrive_last(op, num_programs, poison):
    """(True in the program that arrives last, whether any program arrived poisoned).

    The last program sees the memory operations of all programs of the launch. The barrier orders every thread of a
    program before the thread that arrives for it. Poisoned arrivals also count in the upper half of the word, so that
    the last program knows of programs that left their part undone. The word is back at zero when the launch ends.
    """
    counter = address(op, Region.STATE, tl.int32) + State.ARRIVED
    mine = tl.where(poison == 0, 1, POISONED_ARRIVAL)
    barrier()
    before = tl.full((), 0, tl.int32)
    if num_programs > 1:
        before += tl.atomic_add(counter, mine, sem="acq_rel", scope="sys")
    last = (before & 0xFFFF) == num_programs - 1
    if last:
        tl.store(counter, 0)
    return last, (before + mine) >= POISONED_ARRIVAL


@portable
def post_all(op, region: tl.constexpr, epoch, ORDERS: tl.constexpr, masked=0):
    """Posts `epoch` into this rank's flag word at every peer: one vector of posts costs one hop, a loop W.

    Args:
        ORDERS: whoever acquires the flag sees all that this program has written or acquired before. A fence takes more
            than a microsecond; without it the flag says only that the launches before this one have ended.
        masked: from masked_of. A masked rank that wakes must not take a step for whole that others took without it.
    """
    peers = tl.arange(0, op.WORLD_LANES)
    present = present_ranks(op, peers, masked)
    flags = address_at(op, region, tl.where(present, peers, 0), tl.int32) + op.rank
    epochs = full_like(peers, epoch)
    if ORDERS:
        barrier()
        tl.atomic_xchg(flags, epochs, mask=present, sem="release", scope="sys")
    else:
        tl.atomic_xchg(flags, epochs, mask=present, sem="relaxed", scope="sys")


@portable
def post_arrival(op, region: tl.constexpr, program, num_programs, masked=0):
    """Adds this program's share to this rank's flag word at every peer; those of a launch make one step.

    Whoever acquires the word with all shares sees what all programs have written before: an addition hands on what the
    additions before it have released. masked: as of post_all.
    """
    peers = tl.arange(0, op.WORLD_LANES)
    present = present_ranks(op, peers, masked)
    flags = address_at(op, region, tl.where(present, peers, 0), tl.int32) + op.rank
    share = share_of(1 << ARRIVAL_SHIFT, program, num_programs)
    barrier()
    tl.atomic_add(flags, full_like(peers, share), mask=present, sem="release", scope="sys")


@portable
def num_steps(op, stage: tl.constexpr = Stage.COMBINE_RECEIVE):
    """The number of steps of the op that have ended here, or have come so far."""
    return tl.load(op.table + NUM_REGIONS * op.WORLD_SIZE + stage) >> STEP_SHIFT


@portable
def dispatch_flag(op):
    """The flag word of a rank that has done its part of the running step: steps by 2**11."""
    return ((num_steps(op) + 1) << ARRIVAL_SHIFT).to(tl.int32)


@portable
def late_lanes(flags, epoch, present, ORDERS: tl.constexpr):
    """1 in the lanes whose flag has not reached `epoch`; a masked atomic's result is undefined, so it is replaced."""
    if ORDERS:
        seen = tl.atomic_add(flags, 0, mask=present, sem="acquire", scope="sys")
    else:
        seen = tl.atomic_add(flags, 0, mask=present, sem="relaxed", scope="sys")
    return (tl.sub(tl.where(present, seen, epoch), epoch, sanitize_overflow=False) < 0).to(tl.int32)


@portable
def next_poll(polls):
    """The number of polls after another one; it never comes back to POLLS_PER_CLOCK, as a sum would after 2^32."""
    return tl.where(polls == MANY_POLLS, MANY_POLLS // 2, polls + polls_in_one())


@portable
def overdue(op, polls, deadline, accused, PATIENCE: tl.constexpr, late=-1):
    """(poison word, deadline): the verdict on a wait after `polls` polls, a multiple of POLLS_PER_CLOCK; 0 to go on.

    All threads of a program get one verdict, the old value of one compare-and-swap on the poison word: threads read
    different clocks. `accused` is the rank to be named when time is up, after PATIENCE timeouts: more than one where it
    may be waiting itself, so that whoever waits for the culprit is the first to name one. late: more ranks that have
    not come, -1 for none.
    """
    now = clock_ns()
    # the first look at the clock starts the time: waits that end before it, the common ones, never look
    if polls == POLLS_PER_CLOCK:
        # an op's first step has a bound of its own
        num_ended, limits = num_steps(op), address(op, Region.LIMITS, tl.int64)
        deadline = now + PATIENCE * tl.load(limits + tl.where(num_ended == 0, 1, 0))
    if op.MASKS:
        # the host decides how long it waits for whom
        record = address(op, Region.ERROR_RECORD, tl.int32)
        tl.store(record + Record.WAITS, (1 + num_steps(op) + num_steps(op, Stage.DISPATCH_RECEIVE)).to(tl.int32))
        awaited = record + Record.RANKS + op.WORLD_SIZE
        tl.store(awaited + accused, 1)
        tl.store(awaited + late, 1, mask=late >= 0)
    verdict = tl.where(now > deadline, (FailureCode.TIMEOUT << 16) | accused, 0)
    poison_word = address(op, Region.POISON, tl.int32)
    return tl.atomic_cas(poison_word, 0, verdict, sem="relaxed", scope="sys"), deadline


@portable
def wait_all(
    op, region: tl.constexpr, epoch, ORDERS: tl.constexpr, PATIENCE: tl.constexpr, WITHIN: tl.constexpr = 0, masked=0
):  # fmt: skip
    """Waits until every peer's flag has reached `epoch`, or dispatch_flag. 0 when all came, else the poison word.

    All threads of a program leave with one verdict: arrival is a reduction over all lanes. ORDERS: as in post_all.
    PATIENCE: as in overdue. WITHIN: ranks of a node, of which only this rank's is waited for; 0 for all ranks.
    masked: from masked_of; nobody waits for a rank that is masked.
    """
    lanes = tl.arange(0, op.WORLD_LANES)
    present = present_ranks(op, lanes, masked)
    if WITHIN:
        present = present & (lanes // WITHIN == op.rank // WITHIN)
    flags = address(op, region, tl.int32) + lanes
    late = late_lanes(flags, epoch, present, ORDERS)
    num_late = reduce_sum(late, 0)
    poison, polls, deadline = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    while (num_late > 0) & (poison == 0):
        pause(0)
        late = late_lanes(flags, epoch, present, ORDERS)
        num_late = reduce_sum(late, 0)
        polls = next_poll(polls)
        if (polls % POLLS_PER_CLOCK == 0) & (num_late > 0):
            if op.MASKS:
                present = present & is_live(masked_now(op), lanes)
            accused = reduce_min(tl.where(late > 0, lanes, op.WORLD_LANES), 0)
            poison, deadline = overdue(op, polls, deadline, accused, PATIENCE, tl.where(late > 0, lanes, -1))
    barrier()
    return poison


@portable
def flagged(payload, epoch):
    """Words [.] int64 that carry 4 bytes of payload (int32) and the epoch. Stored with `cache_modifier=".wt"`."""
    return (tl.cast(payload, tl.int64) & 0xFFFFFFFF) | (tl.cast(epoch, tl.int64) << 32)


@portable
def payload_of(words):
    """The payload (int32) of flagged words."""
    return (words & 0xFFFFFFFF).to(tl.int32)


@portable
def epoch_of(words):
    """The epoch (int32) of flagged words."""
    return (words >> 32).to(tl.int32)


@portable
def fail(op, poison, phase, epoch, detail, late):
    """Records this rank's first failure for the host and poisons every peer that is not poisoned yet.

    layout.Record says what `detail` and the lanes of `late` are. The host may see the code before the rest; it
    synchronises the device before it reads the rest.
    """
    state = address(op, Region.STATE, tl.int32)
    if tl.atomic_cas(state + State.ERROR_CLAIMED, 0, 1, sem="relaxed", scope="gpu") == 0:
        lanes = tl.arange(0, op.WORLD_LANES)
        present = lanes < op.WORLD_SIZE
        record = address(op, Region.ERROR_RECORD, tl.int32)
        tl.store(record + Record.ACCUSED, poison & 0xFFFF)
        tl.store(record + Record.PHASE, phase)
        tl.store(record + Record.EPOCH, epoch)
        tl.store(record + Record.DETAIL, detail)
        tl.store(record + Record.RANKS + lanes, late, mask=present)
        if op.MASKS:
            # none of those that go on without this rank
            masks = address_at(op, Region.POISON, tl.where(present, lanes, op.rank), tl.int32) + Poison.MASKED
            masked_there = tl.atomic_add(masks, full_like(lanes, 0), mask=present, sem="relaxed", scope="sys")
            present = present & is_live(masked_there, full_like(lanes, op.rank))
        # compare-and-swap takes no mask: surplus lanes repeat this rank's own word
        words = address_at(op, Region.POISON, tl.where(present, lanes, op.rank), tl.int32)
        tl.atomic_cas(words, full_like(lanes, 0), full_like(lanes, poison), sem="relaxed", scope="sys")
        barrier()
        tl.store(record + Record.CODE, poison >> 16)


@portable
def fail_behind(op, poison, phase, epoch, region: tl.constexpr, flag):
    """Fail with the ranks whose flag has not reached `flag` now."""
    lanes = tl.arange(0, op.WORLD_LANES)
    late = late_lanes(address(op, region, tl.int32) + lanes, flag, lanes < op.WORLD_SIZE, True)
    fail(op, poison, phase, epoch, 0, late)
