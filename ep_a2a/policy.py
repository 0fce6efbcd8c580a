"""Chooses launch numbers: a pure function of the device, the shapes and the caller's numbers."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ep_a2a.config import Layout, QuantType

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig

# Beside a constant stands what was measured with other values; * marks the one that was chosen. Figures are µs on H200s
# for hidden size 7168 and top-8 of 256 experts, of a round trip (dispatch and combine) on 4 ranks unless others are
# named. T: tokens per rank. N: multiprocessors that a launch may use, all if not named. Dates are those of the reports
# in docs/results/index.md.

INTERPRETED_PROGRAMS = 3
"""Programs per launch on CPU: more than one, to exercise memory that programs share; few, since they run in turn."""
INTERPRETED_TILE = 4
"""Tokens that a program of a bulk dispatch sends at once on CPU, where it would send tiles on a GPU."""

# Warps of a program where multiprocessors are not bounded.

DISPATCH_WARPS, COMBINE_WARPS, COUNT_WARPS = 8, 4, 4
"""Searches around them gained 2 % at most (2 ranks, 28 November)."""
LOW_LATENCY_WARPS = 8
"""Of a low-latency dispatch. 21 November:

    warps               4     8*    16
    T = 1, 2 ranks    6.75  6.73  7.18
    T = 128           18.3  17.9
"""

# Steps of few tokens, where latency counts, and of many.

FEW_TOKENS = 64
"""A step has few tokens if its bound step_tokens is less, with a low-latency dispatch also if it is equal. Then work is
spread thin."""
MAX_COUNTED_ALONE = 1023
"""The largest step_tokens with which each program of a bulk dispatch scans the ids of all tokens (redundant scan) and
needs no other program."""

# Rows and elements that a program moves at once.

BLOCK_ELEMENTS = 1024
"""Elements that a program of a combine adds at once, and sends at once where few tokens must be spread over the GPU."""
SEND_ROW_ELEMENTS = 8192
"""Elements that a program of a combine sends at once where there are many tokens: most rows in one piece. 21 November:

    elements           1024  4096  8192*
    T = 4096            867   743   710
"""
CASTER_ELEMENTS = 4096
"""The same of a program that casts (BULK_CASTERS)."""
TILE_TOKENS = 16
"""Tokens that a program of a bulk dispatch sends at once where multiprocessors are bounded: one for each warp. Dispatch
of T = 4096, 27 November:

    tokens                8   16*
    N = 8               438   385
    N = 24              299   289
"""

# Programs that send, where all multiprocessors may be used. More would take them from programs that add.

BULK_SENDERS_PER_RANK, MOST_BULK_SENDERS = 16, 64
"""Programs that send many tokens. T = 4096, 21 and 22 November:

    programs             16    24   32*    40    48   64
    2 ranks             312   280   271   286   290  274
    4 ranks (64*)                   734              705
"""
BULK_CASTERS = 160
"""Programs that send and cast fewer than MANY_CAST_ROWS: many, with fewer registers each. T = 512, 27 November:

    programs           160*   264   330
    T = 512            81.0  79.0  80.6
"""
MANY_CAST_ROWS = 1800
"""Rows that a rank sends back, from which on programs that cast are wide without a bound, too: WIDE_CASTERS that send,
each WIDE_CASTER_ROWS at once. Combine, 27 November; fewer rows were not measured:

    T (rows)            512 (1843)   4096
    BULK_CASTERS              44.8  306.8
    wide                      43.4  263.6
"""
WIDE_CASTERS = 39
"""Wide programs that cast as many rows as the links carry, by W / (W - 1): 52 on 4 ranks, measured where senders cast a
rank's own rows, too. Combine of T = 4096, 27 November; 2 and 8 ranks were not measured:

    programs on 4 ranks  36    52*
    T = 4096          282.7  263.6
"""

# Where multiprocessors are bounded, and so the programs: these are wide.

WIDE_WARPS = 16
"""Warps of such a program. 2 ranks, T = 4096, 21 and 28 November:

    warps                 8   16*    32    8: with 2048 elements at once
    N = 24              974   732   747
    N = 32, dispatch    312   326
"""
WIDE_ROWS, WIDE_CASTER_ROWS = 4, 2
"""Rows that such a program of a combine sends at once, and one that also casts. T = 4096 with casts, 27 November:

    rows                  1    2*
    N = 24             1845  1553
"""
SEND_NS, ADD_NS = 0.047, 0.045
"""Nanoseconds of one multiprocessor for an element of a row that it sends, and of one that it adds. The sum of a token
takes as long as one more row. Combine of 2 ranks with T = 4096, 30 November; the programs that send as in brackets:

    SEND_NS / ADD_NS     0.81      1.05* (0.060 / 0.057)
    N = 16            441 (3)    359 (4)
    N = 24            272 (5)    237 (6)
    N = 32            200 (7)    181 (8)
"""
CAST_NS, ADD_CAST_NS = 0.060, 0.046
"""The same for rows that are cast to fp8 on the way. Casting takes less on 2 ranks with
T = 512, perhaps since the rows fit into the L2. N = 8, 28 November:

    programs that send    3     4
    T = 512           145.4 156.9
"""
WIRE_BYTES_PER_NS = 360.0
"""Bytes that the links of a GPU carry one way: more programs than fill them would wait. Combine with N = 24, 27
November: 525 where 0.3 of the programs only send*, 538 where those also add."""
MOST_ADDING_ARRIVED, MOST_ADDING_ARRIVED_CASTS = 16, 32
"""The largest config.max_sms with which all programs of a combine send, and add when all rows have arrived; and of rows
that are cast. Rows need no looks and no marks then, but while they are added nothing is on the links, which more
programs would fill, and a step of few tokens waits for a fence. Combines of two H200s, 30 November; launches without
a bound took 4 µs more with T = 32, and bf16 18 % more with T = 4096:

                       bf16                  casts
    T =                32    512    4096     512    4096
    N = 8, arrived   13.2   59.9   448.4    82.1   641.3
    marks            14.2   89.7   648.4   107.9   839.0
    N = 16, arrived  12.1   46.3   330.2
    marks            13.5   55.1   359.3
    N = 24, arrived  12.1   41.2   276.8    35.8   237.4
    marks            12.2   40.2   237.3    41.8   296.8
    N = 32, arrived  12.0   38.1   254.6    29.9   187.8
    marks            12.2   33.0   181.2    40.0   251.4
    N = 48, arrived  12.0   35.8   234.5    28.5   172.5
    marks            10.6   32.2   186.4    29.8   166.9
"""

# Where programs share their multiprocessors with those of products. These were timed together, and with no other
# values: a layer of two micro-batches on four H100s took 2929 and 2950 with T = 1024 (two calls, 28 November) where
# exchanges on 8 multiprocessors of their own took 2998 and 3023; with T = 4096 7401 and 7574 in place of 7137 and 7454.

SHARED_WARPS, SHARED_REGISTERS = 4, 96
"""Warps of a program, and registers of a thread: as many as 256 threads of 208 registers leave, which hold a product's
tile of 128 x 256 sums (65,536 - 256 x 208 = 128 x 96)."""
SHARED_SEND_ELEMENTS, SHARED_PROGRAMS_PER_SENDER = 4096, 3
"""Elements of a row that a program of a combine sends at once, and programs for each that sends."""

# Limits.

MAX_WARPS = 32
MAX_DISPATCH_PROGRAMS = 1024
"""Programs of a bulk dispatch that have memory to tell each other how many rows they send (CHUNK_COUNTS), and of a
launch that shares a step of a flag word (layout.ARRIVAL_SHIFT)."""
LEAST_PROGRAMS = 4
"""Programs of the smallest launch with all roles: two of FLAG_PROGRAMS, one that sends, one that receives."""


class Phase(enum.Enum):
    """Launches of an op."""

    BULK_DISPATCH = "bulk_dispatch"
    LOW_LATENCY_DISPATCH = "low_latency_dispatch"
    COMBINE = "combine"


THREADS_PER_SM = {Phase.BULK_DISPATCH: 512, Phase.LOW_LATENCY_DISPATCH: 512, Phase.COMBINE: 640}
"""Threads per multiprocessor that a launch asks for. How many fit depends on the kernel's registers (`fit`)."""
SECOND_PROGRAM_TOKENS = 4
"""Tokens for each program from which on a bulk dispatch has two programs on a multiprocessor. µs of a round trip of two
H200s, 30 November; * marks what was chosen:

    tokens              2             4*
                        bf16  cast    bf16  cast
    T = 256             29.5  24.4    29.6  24.3
    T = 512             52.2  42.5    50.8  40.8
    T = 1023            94.5  75.9    95.0  75.6
"""
FLAG_PROGRAMS = {Phase.LOW_LATENCY_DISPATCH: 2, Phase.COMBINE: 1}
"""By phase, how many first programs of a launch exchange flags and counts with peers; they move no rows."""


@dataclass(frozen=True)
class Launch:
    """Launch numbers of one kernel.

    Attributes:
        num_programs: programs (thread blocks) of the grid.
        num_warps: warps of 32 threads per program.
        num_senders, num_receivers: programs that send and that receive. In phases with these roles the first programs
            have neither (FLAG_PROGRAMS). Without receivers each program of a combine sends, and then adds.
        send_elements, add_elements: elements of a row that a program of a combine sends and adds at once.
        sparse_polls: receivers of low-latency rows wait for the words beside a row before they poll the row.
        read_ahead: programs that add rows read the next rows meanwhile, which takes registers.
        shares_sm: programs leave room on their multiprocessor for a program of a product.
        send_rows: rows that a program of a combine sends at once, and tokens of a tile of a bulk dispatch; 1 where it
            sends tokens one by one, without a list of their destinations in memory.
    """

    num_programs: int
    num_warps: int
    num_senders: int = 1
    num_receivers: int = 1
    send_elements: int = BLOCK_ELEMENTS
    add_elements: int = BLOCK_ELEMENTS
    sparse_polls: bool = False
    read_ahead: bool = False
    send_rows: int = 1
    shares_sm: bool = False

    @property
    def by_all(self) -> bool:
        """Whether each program of a combine sends, then adds."""
        return self.num_receivers == 0


def choose_launch(
    config: EpDispatchCombineConfig,
    phase: Phase,
    num_tokens: int,
    step_tokens: int,
    num_sms: int,
    block_num: int = -1,
    warp_per_block: int = -1,
    max_sms: int | None = None,
    *,
    shares_sm: bool = False,
) -> Launch:
    """Returns the launch numbers of one call.

    Args:
        config: the op's config, whose numbers are used with launch="manual".
        phase: which kernel.
        num_tokens: tokens that this rank brings.
        step_tokens: bound on every rank's tokens in this step.
        num_sms: multiprocessors of the device; 0 on CPU.
        block_num, warp_per_block: the caller's numbers, used when > 0.
        max_sms: most multiprocessors that the launch may occupy, 0 = all, None = config.max_sms. The GPU spreads
            programs over all multiprocessors, so this bounds the number of programs, which become wider.
        shares_sm: whether multiprocessors run products meanwhile. Then each one has one small program.
    """
    max_sms = config.max_sms if max_sms is None else max_sms
    if num_sms == 0:
        programs = block_num if 0 < block_num <= 4 else INTERPRETED_PROGRAMS
        send_rows = 1
        if phase is Phase.BULK_DISPATCH and max_sms > 0:
            send_rows = INTERPRETED_TILE
        wish = Launch(programs, 1, programs, programs, send_rows=send_rows)
        return _by_all(wish) if phase is Phase.COMBINE and (max_sms > 0 or adds_arrived(config)) else wish
    chooses_warps = config.launch != "manual" and warp_per_block <= 0
    wish = _default(config, phase, num_tokens, step_tokens, num_sms, chooses_warps=chooses_warps)
    if config.launch == "manual":
        wish = replace(wish, num_programs=config.block_num, num_warps=config.warp_num_per_block)
    is_bounded = 0 < max_sms < num_sms
    if is_bounded and config.launch != "manual":
        wish = _widened(wish, config, phase, max_sms, num_tokens, step_tokens)
    if block_num > 0:
        wish = replace(wish, num_programs=block_num)
    if warp_per_block > 0:
        wish = replace(wish, num_warps=warp_per_block)
    wish = replace(wish, num_warps=1 << (max(1, min(wish.num_warps, MAX_WARPS)).bit_length() - 1))
    if phase is Phase.COMBINE and adds_arrived(config):
        wish = _by_all(wish)
    most = max_sms if is_bounded else num_sms
    is_given = config.launch == "manual" or block_num > 0 or warp_per_block > 0
    if shares_sm and not is_given and phase is not Phase.LOW_LATENCY_DISPATCH:
        return _made_small(wish, phase, most)
    return fit(wish, phase, most if is_bounded else most * max(1, THREADS_PER_SM[phase] // (32 * wish.num_warps)))


def _made_small(wish: Launch, phase: Phase, most: int) -> Launch:
    """Returns the wish with programs that run beside those of a product, one for each of `most` multiprocessors."""
    small = replace(wish, num_warps=SHARED_WARPS, send_rows=1, shares_sm=True)
    if phase is Phase.COMBINE:
        small = replace(small, send_elements=SHARED_SEND_ELEMENTS, add_elements=BLOCK_ELEMENTS, read_ahead=True)
    if phase is Phase.BULK_DISPATCH or small.by_all:
        return fit(small, phase, most)
    num_programs = max(FLAG_PROGRAMS[phase] + 2, most)
    senders = num_programs // SHARED_PROGRAMS_PER_SENDER
    receivers = num_programs - FLAG_PROGRAMS[phase] - senders
    return replace(small, num_programs=num_programs, num_senders=senders, num_receivers=receivers)


def _widened(
    wish: Launch, config: EpDispatchCombineConfig, phase: Phase, max_sms: int, num_tokens: int, step_tokens: int
) -> Launch:
    """Returns the wish with programs of the best width for a multiprocessor; those of a combine take whole rows."""
    wish = replace(wish, num_warps=WIDE_WARPS)
    if phase is Phase.BULK_DISPATCH:
        return replace(wish, send_rows=TILE_TOKENS)
    if phase is not Phase.COMBINE:
        return wish
    casts = config.combine_quant != QuantType.NONE
    wish = _by_rows(wish, config, WIDE_CASTER_ROWS if casts else WIDE_ROWS)
    row_ns, sent_ns, added_ns = _combine_ns(config, num_tokens, step_tokens)
    row_wire_ns = config.hidden_dim * config.combine_wire_dtype.itemsize / WIRE_BYTES_PER_NS
    programs = max(FLAG_PROGRAMS[phase] + 2, max_sms)
    # the links are busy for as long as rows are added, so nobody is done with sending before
    equal_time = round(programs * sent_ns / max(1.0, sent_ns + added_ns))
    senders = max(1, min(wish.num_senders, equal_time, math.ceil(row_ns / row_wire_ns)))
    by_roles_ns = max(sent_ns / senders, added_ns / max(1, programs - FLAG_PROGRAMS[phase] - senders))
    by_all_ns = sent_ns * max(1 / max_sms, row_wire_ns / row_ns) + added_ns / max_sms
    if adds_arrived(config) or by_all_ns <= by_roles_ns:
        return _by_all(replace(wish, num_programs=max_sms))
    return replace(wish, num_senders=senders)


def _by_all(wish: Launch) -> Launch:
    """Returns the wish for a combine each of whose programs sends, then adds."""
    return replace(wish, num_senders=wish.num_programs, num_receivers=0)


def _row_elements(config: EpDispatchCombineConfig) -> int:
    """Returns the elements of a row that a program moves at once; half as many of float32, for want of registers."""
    return SEND_ROW_ELEMENTS * 2 // config.combined_dtype.itemsize


def _by_rows(wish: Launch, config: EpDispatchCombineConfig, send_rows: int) -> Launch:
    """Returns the wish for a combine with programs that send `send_rows` rows at once, and add whole rows."""
    elements = _row_elements(config)
    return replace(
        wish, num_warps=WIDE_WARPS, send_elements=elements, send_rows=send_rows, add_elements=elements, read_ahead=True
    )


def _rows_per_token(config: EpDispatchCombineConfig) -> float:
    """Returns how many ranks a token goes to, its own included, where experts are drawn alike."""
    return config.world_size * (1 - (1 - 1 / config.world_size) ** config.topk)


def _combine_ns(config: EpDispatchCombineConfig, num_tokens: int, step_tokens: int) -> tuple[float, float, float]:
    """Nanoseconds of one multiprocessor alone: to send a row, to send all rows, and to add the rows of all tokens.

    Experts are taken to be drawn alike. This rank's own rows are not sent. A token's rows are added in the places
    of all ranks or, if the ranks are many, of as many as it has experts.
    """
    ranks, topk = config.world_size, config.topk
    casts = config.combine_quant != QuantType.NONE
    sent_rows = step_tokens * _rows_per_token(config) * (ranks - 1) / ranks
    row_ns = (CAST_NS if casts else SEND_NS) * config.hidden_dim
    token_ns = (1 + min(ranks, topk)) * (ADD_CAST_NS if casts else ADD_NS) * config.hidden_dim
    return row_ns, sent_rows * row_ns, num_tokens * token_ns


def _default(
    config: EpDispatchCombineConfig,
    phase: Phase,
    num_tokens: int,
    step_tokens: int,
    num_sms: int,
    *,
    chooses_warps: bool,
) -> Launch:
    """Returns a launch with a program per unit of work. chooses_warps: whether its warps are those of the result."""
    if phase is Phase.BULK_DISPATCH:
        # one program more than bring rows
        single, double = min(num_tokens + 1, num_sms), num_tokens // SECOND_PROGRAM_TOKENS + 1
        return Launch(max(single, double), DISPATCH_WARPS)
    few = step_tokens < FEW_TOKENS + (dispatch_phase(config, step_tokens) is Phase.LOW_LATENCY_DISPATCH)
    if phase is Phase.LOW_LATENCY_DISPATCH:
        # a rank's own rows travel in layout compact only
        num_sources = config.world_size - (config.layout != Layout.COMPACT)
        senders, receivers = num_tokens, max(1, step_tokens * num_sources)
        num_programs = FLAG_PROGRAMS[phase] + senders + receivers
        return Launch(num_programs, LOW_LATENCY_WARPS, senders, receivers, sparse_polls=not few)
    blocks = -(-config.hidden_dim // BLOCK_ELEMENTS)
    senders, receivers = config.world_size * step_tokens * blocks, max(1, num_tokens * blocks)
    num_programs = FLAG_PROGRAMS[phase] + senders + receivers
    wish = Launch(num_programs, COMBINE_WARPS, senders, receivers)
    if few:
        return wish
    if config.combine_quant != QuantType.NONE:
        if chooses_warps and step_tokens >= many_cast_tokens(config):
            return _with_wide_casters(wish, config, num_tokens)
        return replace(wish, num_senders=BULK_CASTERS, send_elements=CASTER_ELEMENTS)
    bulk_senders = min(BULK_SENDERS_PER_RANK * config.world_size, MOST_BULK_SENDERS)
    return replace(wish, num_senders=bulk_senders, send_elements=_row_elements(config))


def many_cast_tokens(config: EpDispatchCombineConfig) -> int:
    """Returns the tokens of a step from which on programs that cast are wide."""
    return max(FEW_TOKENS, math.ceil(MANY_CAST_ROWS / _rows_per_token(config)))


def _with_wide_casters(wish: Launch, config: EpDispatchCombineConfig, num_tokens: int) -> Launch:
    """Returns the wish for a combine of many rows that are cast, with all multiprocessors."""
    senders = math.ceil(WIDE_CASTERS * config.world_size / max(1, config.world_size - 1))
    receivers = max(1, num_tokens * -(-config.hidden_dim // _row_elements(config)))
    num_programs = FLAG_PROGRAMS[Phase.COMBINE] + senders + receivers
    wish = replace(wish, num_programs=num_programs, num_senders=senders, num_receivers=receivers)
    return _by_rows(wish, config, WIDE_CASTER_ROWS)


def adds_arrived(config: EpDispatchCombineConfig) -> bool:
    """Returns whether a combine adds rows when all of its step have arrived; else each when its own elements have."""
    casts = config.combine_quant != QuantType.NONE
    most = MOST_ADDING_ARRIVED_CASTS if casts else MOST_ADDING_ARRIVED
    return 0 < config.max_sms <= most and not config.uses_rings


def dispatch_phase(config: EpDispatchCombineConfig, step_tokens: int) -> Phase:
    """Returns the kind of a step's dispatch; the same on all ranks, since all agree on step_tokens."""
    return Phase.LOW_LATENCY_DISPATCH if step_tokens <= config.low_latency_tokens else Phase.BULK_DISPATCH


def step_sizes(config: EpDispatchCombineConfig) -> list[int]:
    """Returns bounds of steps of at most M tokens, among them one of each kind whose kernels differ."""
    most = config.max_num_inp_token_per_rank
    sizes = {1, FEW_TOKENS - 1, FEW_TOKENS, FEW_TOKENS + 1, config.low_latency_tokens, config.low_latency_tokens + 1}
    sizes |= {MAX_COUNTED_ALONE, MAX_COUNTED_ALONE + 1, many_cast_tokens(config), most}
    return sorted(size for size in sizes if 1 <= size <= most)


def fit(wish: Launch, phase: Phase, most: int) -> Launch:
    """Returns the wish with at most `most` programs, so that all are on the GPU at once.

    A program waits for other ranks and for earlier programs only, so a larger launch would end, too. Its waiting
    programs would keep later ones from adding rows that have arrived.
    """
    if phase is Phase.BULK_DISPATCH:
        return replace(wish, num_programs=max(1, min(wish.num_programs, most, MAX_DISPATCH_PROGRAMS)))
    if wish.by_all:
        return _by_all(replace(wish, num_programs=max(1, min(wish.num_programs, most, MAX_DISPATCH_PROGRAMS))))
    others = max(2, min(wish.num_programs, most) - FLAG_PROGRAMS[phase])
    senders = max(1, min(wish.num_senders, max(others // 2, others - max(1, wish.num_receivers))))
    receivers = max(1, min(wish.num_receivers, others - senders))
    num_programs = FLAG_PROGRAMS[phase] + senders + receivers
    return replace(wish, num_programs=num_programs, num_senders=senders, num_receivers=receivers)
