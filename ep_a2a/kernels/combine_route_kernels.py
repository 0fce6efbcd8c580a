"""Device helpers of combine that find a token's rows and the slots where they arrive, in ascending rank order."""

import triton.language as tl

from ep_a2a.kernels import primitives as prim
from ep_a2a.kernels.portable import portable

# No slot has this number.
NEVER = tl.constexpr(1 << 30)
# Rows of a token that are read, and are in a program's registers, at once. With all ranks' rows at once 8 ranks took
# 312 bytes of stack (compute capability 9.0, max_sms, bf16).
ROWS_AT_ONCE = tl.constexpr(4)
# The same of MARKED rows of more ranks, where the next ones are in registers, too: with four 8 ranks took 56 bytes.
MARKED_ROWS_AT_ONCE = tl.constexpr(2)


@portable
def routes_of(routes, token, step):
    """Return the numbers of a token's rows by expert rank, -1 for none; none from token `num_tokens` on.

    They are a tuple where the ranks are few, else a vector.
    """
    op = step.op
    line = routes + tl.cast(token, tl.int64) * op.WORLD_SIZE
    if op.WORLD_SIZE <= ROWS_AT_ONCE:
        found = ()
        for peer in tl.static_range(op.WORLD_SIZE):
            found = found + (tl.load(line + peer, mask=token < step.num_tokens, other=-1),)
    else:
        # as many as a warp has threads: it finds their least in one instruction
        lanes = tl.arange(0, max(op.WORLD_LANES, 32))
        there = (lanes < op.WORLD_SIZE) & (prim.full_like(lanes, token) < step.num_tokens)
        found = tl.load(line + lanes, mask=there, other=-1)
    return found


@portable
def slots_of(found, step, masked):
    """Return where rows with these routes (routes_of) arrive: a tuple with -1 for none, or a vector with NEVER.

    masked: from masked_now: rows of these ranks that are not MARKED have not arrived. Of MARKED ones take_block knows.
    """
    skips: tl.constexpr = step.op.MASKS and not step.op.COMBINE.MARKED
    if step.op.WORLD_SIZE <= ROWS_AT_ONCE:
        slots = ()
        for peer in tl.static_range(step.op.WORLD_SIZE):
            comes = found[peer] >= 0
            if skips:
                comes = comes & prim.is_live(masked, peer)
            slots = slots + (tl.where(comes, peer * step.M + found[peer], -1),)
    else:
        lanes = tl.arange(0, found.shape[0])
        comes = found >= 0
        if skips:
            comes = comes & prim.is_live(masked, lanes)
        slots = tl.where(comes, lanes * step.M + found, NEVER)
    return slots


@portable
def next_rows(found, step, ROWS: tl.constexpr):
    """Return (the slots of the first of a token's rows, -1 for none; the slots of the others).

    Args:
        found: from slots_of, or the slots of the others from here. Ranks ascend. ROWS: most rows of many ranks.
    """
    op, slots = step.op, found
    if op.WORLD_SIZE > ROWS_AT_ONCE:
        slots = ()
        for _ in tl.static_range(min(ROWS, op.TOPK)):
            slot = prim.reduce_min(found, 0)
            found = tl.where(found == slot, NEVER, found)
            slots = slots + (tl.where(slot < NEVER, slot, -1),)
    return slots, found


@portable
def next_turn(unit, others, following, routes, step, share, masked, BLOCKS: tl.constexpr):
    """Return (rows of a unit of work, and for the turn behind it the first three arguments).

    The rows are (unit, slots, whether no others follow).

    Args:
        unit: that this turn is of. others: slots of its rows and of those behind them. following: routes of the next
            unit's token. routes: of all tokens. masked: as of slots_of. BLOCKS: units of a token.
    """
    op = step.op
    ahead: tl.constexpr = op.COMBINE.MARKED and op.COMBINE.READ_AHEAD and op.WORLD_SIZE > ROWS_AT_ONCE
    most_rows: tl.constexpr = MARKED_ROWS_AT_ONCE if ahead else ROWS_AT_ONCE
    one_turn: tl.constexpr = min(op.WORLD_SIZE, op.TOPK) <= most_rows
    slots, others = next_rows(others, step, most_rows)
    ends, next_unit = tl.full((), 1, tl.int1), unit + share.num_programs
    if not one_turn:
        ends = prim.reduce_min(others, 0) == NEVER
        next_unit = tl.where(ends, next_unit, unit)
    others = slots_left(ends, following, others, step, masked, one_turn)
    following = routes_of(routes, (next_unit + share.num_programs) // BLOCKS, step)
    return (unit, slots, ends), next_unit, others, following


@portable
def slots_left(ends, following, others, step, masked, ONE_TURN: tl.constexpr):
    """Return the slots of the rows that the next turn takes: those of the next unit where this one ends."""
    found = slots_of(following, step, masked)
    if not ONE_TURN:
        found = tl.where(prim.full_like(others, ends.to(tl.int32)) > 0, found, others)
    return found
