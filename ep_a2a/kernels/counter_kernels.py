"""Device code that counts the rows and the waiting time of an op's steps: launches of their own beside the op's.

Counters are lines of LINE_WORDS words (int64). Line 0 has sums over all steps, and from FIRST_MAX on the largest value
of a step; the lines behind it have one step each. All positions follow from line 0, so that replays of a graph count.
"""

import enum

import triton.language as tl

from ep_a2a.kernels.layout import Region, Stage
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    address,
    begin_stage,
    clock_ns,
    epoch_of,
    full_like,
    payload_of,
    reduce_max,
    reduce_sum,
)
from ep_a2a.kernels.receive_kernels import MOST_COUNTS, wait_all_counts
from ep_a2a.kernels.target import volatile_load

LINE_WORDS = 16


class Counter(enum.IntEnum):
    """Words of a line.

    STEPS: steps in line 0, the step's number (from 1 on) in its own. SCALED_SKEW: W times the rows by which the rank
    that received most is above the mean. STARTED_NS: in line 0, when the wait in progress has begun.
    """

    STEPS = 0
    TOKENS = 1
    KEPT_ROWS = 2
    SENT_ROWS = 3
    RECEIVED_ROWS = 4
    ALL_ROWS = 5
    SCALED_SKEW = 6
    DISPATCH_WAIT_NS = 7
    COMBINE_WAIT_NS = 8
    MAX_SCALED_SKEW = 9
    MAX_DISPATCH_WAIT_NS = 10
    MAX_COMBINE_WAIT_NS = 11
    STARTED_NS = 15


COUNTS = tl.constexpr(Region.COUNTS.value)
COMBINE_SEND = tl.constexpr(Stage.COMBINE_SEND.value)

WORDS = tl.constexpr(LINE_WORDS)
FIRST_MAX = tl.constexpr(Counter.MAX_SCALED_SKEW.value)
STEPS = tl.constexpr(Counter.STEPS.value)
TOKENS = tl.constexpr(Counter.TOKENS.value)
KEPT_ROWS = tl.constexpr(Counter.KEPT_ROWS.value)
SENT_ROWS = tl.constexpr(Counter.SENT_ROWS.value)
RECEIVED_ROWS = tl.constexpr(Counter.RECEIVED_ROWS.value)
ALL_ROWS = tl.constexpr(Counter.ALL_ROWS.value)
SCALED_SKEW = tl.constexpr(Counter.SCALED_SKEW.value)
DISPATCH_WAIT_NS = tl.constexpr(Counter.DISPATCH_WAIT_NS.value)
COMBINE_WAIT_NS = tl.constexpr(Counter.COMBINE_WAIT_NS.value)
MAX_SCALED_SKEW = tl.constexpr(Counter.MAX_SCALED_SKEW.value)
MAX_DISPATCH_WAIT_NS = tl.constexpr(Counter.MAX_DISPATCH_WAIT_NS.value)
MAX_COMBINE_WAIT_NS = tl.constexpr(Counter.MAX_COMBINE_WAIT_NS.value)
STARTED_NS = tl.constexpr(Counter.STARTED_NS.value)


@portable
def word_of(lanes, which: tl.constexpr, value):
    """A line with `value` in one word and zeros elsewhere."""
    return tl.where(lanes == which, tl.cast(value, tl.int64), 0)


@portable
def add_line(counters, lanes, values):
    """Adds a step's values to line 0, or raises its largest values to them."""
    totals = tl.load(counters + lanes)
    tl.store(counters + lanes, tl.where(lanes >= FIRST_MAX, tl.maximum(totals, values), totals + values))


@portable
def line_of_step(counters, step, num_kept_steps):
    """Address of the line of a step, counted from 1; the last num_kept_steps steps have one."""
    return counters + (1 + (step - 1) % num_kept_steps) * WORDS


@portable
def start_wait_kernel(counters):
    """Notes the time at which the launch before this one has ended."""
    tl.store(counters + STARTED_NS, clock_ns())


@portable
def count_lines(table, epoch, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr):
    """(rows that each rank receives, rows that this rank sends to each), [WORLD_LANES], of the lines of this epoch."""
    num_lines: tl.constexpr = max(1, MOST_COUNTS // WORLD_LANES)
    lanes = tl.arange(0, WORLD_LANES)
    first_line = address(table, COUNTS, rank, WORLD_SIZE, tl.int64)
    received, sent = full_like(lanes, 0), full_like(lanes, 0)
    for first in range(0, WORLD_SIZE, num_lines):
        sources = first + tl.arange(0, num_lines)
        mask = (sources < WORLD_SIZE)[:, None] & (lanes < WORLD_SIZE)[None, :]
        lines = first_line + sources[:, None] * (WORLD_SIZE + 1) + lanes[None, :]
        words = volatile_load(lines, mask=mask, other=0)
        rows = tl.where(epoch_of(words) == epoch, payload_of(words), 0)
        received += reduce_sum(rows, 0)
        sent += reduce_sum(tl.where((sources == rank)[:, None], rows, 0), 0)
    return received, sent


@portable(do_not_specialize=["num_tokens", "num_kept_steps", "rank"])
def count_dispatch_kernel(
    counters, table, num_tokens, num_kept_steps, rank, WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr,
    COUNT_LANES: tl.constexpr,
):  # fmt: skip
    """Counts a step whose dispatch has ended, and begins its line. To be launched before the step's combine.

    A dispatch waits for the numbers of rows that come to its rank; this launch waits for those of all other rows. Peers
    write the next step's only after this rank's combine. Lines that do not come in a step that fails count as zeros.

    Args:
        counters: int64 [1 + num_kept_steps, LINE_WORDS].
        table: address table of the op. num_tokens: that this rank has brought.
        COUNT_LANES: as in wait_counts.
    """
    ended = clock_ns()
    waited = ended - tl.load(counters + STARTED_NS)
    epoch, _ = begin_stage(table, COMBINE_SEND, WORLD_SIZE)
    wait_all_counts(table, epoch, rank, WORLD_SIZE, COUNT_LANES)
    received, sent = count_lines(table, epoch, rank, WORLD_SIZE, WORLD_LANES)
    ranks = tl.arange(0, WORLD_LANES)
    kept = reduce_sum(tl.where(ranks == rank, sent, 0), 0)
    all_rows = reduce_sum(received, 0)
    scaled_skew = reduce_max(received, 0) * WORLD_SIZE - all_rows

    lanes = tl.arange(0, WORDS)
    step = tl.load(counters + STEPS) + 1
    values = word_of(lanes, TOKENS, num_tokens) + word_of(lanes, KEPT_ROWS, kept)
    values += word_of(lanes, SENT_ROWS, reduce_sum(sent, 0) - kept)
    values += word_of(lanes, RECEIVED_ROWS, reduce_sum(tl.where(ranks == rank, received, 0), 0) - kept)
    values += word_of(lanes, ALL_ROWS, all_rows) + word_of(lanes, SCALED_SKEW, scaled_skew)
    values += word_of(lanes, DISPATCH_WAIT_NS, waited)
    largest = word_of(lanes, MAX_SCALED_SKEW, scaled_skew) + word_of(lanes, MAX_DISPATCH_WAIT_NS, waited)
    add_line(counters, lanes, values + largest + word_of(lanes, STEPS, 1))
    line = line_of_step(counters, step, num_kept_steps)
    tl.store(line + lanes, values + word_of(lanes, STEPS, step))


@portable(do_not_specialize=["num_kept_steps"])
def count_combine_kernel(counters, num_kept_steps):
    """Adds the wait of a combine that has ended to its step. counters: int64 [1 + num_kept_steps, LINE_WORDS]."""
    waited = clock_ns() - tl.load(counters + STARTED_NS)
    lanes = tl.arange(0, WORDS)
    add_line(counters, lanes, word_of(lanes, COMBINE_WAIT_NS, waited) + word_of(lanes, MAX_COMBINE_WAIT_NS, waited))
    line = line_of_step(counters, tl.load(counters + STEPS), num_kept_steps)
    tl.store(line + COMBINE_WAIT_NS, tl.cast(waited, tl.int64))
