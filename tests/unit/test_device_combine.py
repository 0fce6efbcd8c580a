"""Device helpers of combine, in Triton's interpreter: what is sent back, in which order, and when it has arrived."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton.language as tl

from ep_a2a.config import FP8_DTYPE
from ep_a2a.kernels.combine_receive_kernels import add_results, judge_block, read_block
from ep_a2a.kernels.combine_send_kernels import (
    CombineStep,
    Operands,
    ReturnPlaces,
    Share,
    first_unit,
    push_results,
    unit_of,
)
from ep_a2a.kernels.constants import Block, Combine, Shape
from ep_a2a.kernels.layout import Region, padded
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import pause
from tests.unit.device import EMPTY, shape_of, table_of, untouched

COUNTS = {
    1: [[5], [0]],
    2: [[3, 5], [0, 4], [4, 0], [0, 0]],
    3: [[2, 4, 3], [0, 0, 4], [4, 0, 1]],
    8: [[1, 0, 3, 2, 4, 4, 0, 1], [0, 0, 0, 0, 0, 0, 0, 4]],
}
SENDS = pytest.mark.parametrize(
    ("world_size", "counts"), [(world_size, counts) for world_size, each in COUNTS.items() for counts in each]
)
LAYOUTS = pytest.mark.parametrize("compact", [True, False], ids=["compact", "rank_major"])
PLACES = pytest.mark.parametrize("in_place", [True, False], ids=["own in place", "own sent"])
STRIDE = 5


def row_numbers(counts: list[int], *, compact: bool) -> dict[int, tuple[int, int]]:
    """(source, index) by the row's number, for all rows that have been received."""
    return {
        (sum(counts[:source]) if compact else source * STRIDE) + index: (source, index)
        for source, count in enumerate(counts)
        for index in range(count)
    }


@portable
def step_of(table, counts, rank, is_sender, SHAPE: tl.constexpr):
    lanes = tl.arange(0, SHAPE.WORLD_LANES)
    vector = tl.load(counts + lanes, mask=lanes < SHAPE.WORLD_SIZE, other=0)
    return CombineStep(table, rank, 1, 0, STRIDE, SLOTS, vector, False, is_sender, 0)


@portable
def list_units(counts, out, rank, NUM_BLOCKS: tl.constexpr, SHAPE: tl.constexpr, OWN_IN_PLACE: tl.constexpr):
    unit = tl.program_id(0)
    step = step_of(counts, counts, rank, True, SHAPE)
    destination, index, row = unit_of(unit, step, NUM_BLOCKS, SHAPE, OWN_IN_PLACE)
    tl.store(out + unit * 3, destination)
    tl.store(out + unit * 3 + 1, index)
    tl.store(out + unit * 3 + 2, row)


def units_of(counts: list[int], rank: int, num_units: int, num_blocks: int, **form: Any) -> list[list[int]]:
    """(destination, index, row) of the first units."""
    out = untouched(num_units, 3)
    if num_units:
        given = torch.tensor(counts, dtype=torch.int32)
        list_units.interpret((num_units,), given, out, rank, NUM_BLOCKS=num_blocks, **form)
    return out.tolist()


@SENDS
@LAYOUTS
@PLACES
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_units_cover_every_row_once_and_in_its_order(world_size, counts, compact, in_place, num_blocks):
    """What push_results walks through: of each block one, row by row, from every source in turn after this rank."""
    num_destinations = max(1, world_size - in_place)
    num_units = max(counts) * num_destinations * num_blocks
    for rank in {0, world_size // 2, world_size - 1}:
        form = {"SHAPE": shape_of(world_size, compact=compact), "OWN_IN_PLACE": in_place}
        units = units_of(counts, rank, num_units, num_blocks, **form)
        # a row's blocks follow each other
        assert units == [unit for unit in units[::num_blocks] for _ in range(num_blocks)]
        turns = units[::num_blocks]
        others = [(rank + 1 + step) % world_size for step in range(num_destinations)]
        assert [(source, index) for source, index, _ in turns] == [
            (source, index) for index in range(max(counts)) for source in others
        ]
        there = [unit for unit in turns if unit[1] < counts[unit[0]]]
        expected = row_numbers(counts, compact=compact)
        if in_place and world_size > 1:
            expected = {row: where for row, where in expected.items() if where[0] != rank}
        assert {row: (source, index) for source, index, row in there} == expected
        assert len(there) == len(expected)


HIDDEN, GROUP, SLOTS, TOPK = 40, 16, 6, 2
NUM_BLOCKS = -(-HIDDEN // GROUP)
BLOCK = Block(HIDDEN, 1, GROUP, tl.int32, tl.float32, False, False)


@portable
def ask_first(
    rows_in, table, counts, out, values_out, rank, num_senders, SHAPE: tl.constexpr, OWN_IN_PLACE: tl.constexpr
):
    # one program that is none before the senders, and one behind them
    at, sender = tl.program_id(0), tl.program_id(0) - 1
    step = step_of(table, counts, rank, (sender >= 0) & (sender < num_senders), SHAPE)
    aim, _places, values = first_unit(rows_in, step, Share(sender, num_senders), SHAPE, BLOCK, OWN_IN_PLACE)
    destination, index, row = aim
    tl.store(out + at * 3, destination)
    tl.store(out + at * 3 + 1, index)
    tl.store(out + at * 3 + 2, row)
    tl.store(values_out + at * GROUP + tl.arange(0, GROUP)[None, :], values)


def combine_memory(world_size: int) -> dict[tuple[Region, int], torch.Tensor]:
    """What every rank gets back: nothing yet."""
    shapes = {Region.COMBINE_ROWS: HIDDEN, Region.COMBINE_SCALES: 1, Region.COMBINE_WEIGHTS: TOPK}
    return {
        (region, rank): torch.full((world_size * SLOTS, width), EMPTY, dtype=torch.int32)
        for region, width in shapes.items()
        for rank in range(world_size)
    }


def numbered_rows(num_rows: int, width: int = HIDDEN) -> torch.Tensor:
    """Every element another one, none of them 0 or EMPTY."""
    return torch.arange(1, num_rows * width + 1, dtype=torch.int32).view(num_rows, width)


OUTSIDE = -7


@SENDS
@PLACES
@pytest.mark.parametrize(
    ("compact", "cap"), [(True, False), (True, True), (False, False)], ids=["compact", "compact-cap", "rank_major"]
)
def test_the_first_unit_is_the_first_of_the_order(world_size, counts, compact, in_place, cap):
    """It is asked for before the counts are known to hold, so it must stay inside of the rows; others ask for nothing.

    Args:
        cap: rows_in has as many rows as were received (max_total_recv_tokens).
    """
    num_rows = max(1, sum(counts)) if cap else world_size * STRIDE
    memory = torch.full((num_rows + world_size * STRIDE, HIDDEN), OUTSIDE, dtype=torch.int32)
    memory[:num_rows] = numbered_rows(num_rows)
    table = table_of(world_size, combine_memory(world_size))
    num_senders = max(1, max(counts) * world_size * NUM_BLOCKS)
    for rank in {0, world_size - 1}:
        out, values = untouched(num_senders + 2, 3), untouched(num_senders + 2, GROUP)
        form = {"SHAPE": shape_of(world_size, compact=compact), "OWN_IN_PLACE": in_place}
        given = torch.tensor(counts, dtype=torch.int32)
        ask_first.interpret((num_senders + 2,), memory, table, given, out, values, rank, num_senders, **form)
        assert not (values == OUTSIDE).any(), "reads behind the rows"
        assert (values[[0, -1]] == 0).all()
        units = units_of(counts, rank, num_senders, NUM_BLOCKS, **form)
        assert out[1:-1].tolist() == units
        for sender, (source, index, row) in enumerate(units):
            if index < counts[source]:
                first = sender % NUM_BLOCKS * GROUP
                expected = memory[row, first : first + GROUP]
                assert values[1 + sender, : len(expected)].tolist() == expected.tolist()
                assert not values[1 + sender, len(expected) :].any()


@portable
def send_back(given, table, counts, rank, SHAPE: tl.constexpr, OWN_IN_PLACE: tl.constexpr, HAS_WEIGHTS: tl.constexpr):
    step, share = step_of(table, counts, rank, True, SHAPE), Share(tl.program_id(0), tl.num_programs(0))
    first = first_unit(given.rows, step, share, SHAPE, BLOCK, OWN_IN_PLACE)
    push_results(first, given, step, share, SHAPE, BLOCK, HAS_WEIGHTS, OWN_IN_PLACE)


@SENDS
@LAYOUTS
@PLACES
@pytest.mark.parametrize("num_senders", [1, 5])
def test_senders_send_every_row_to_its_slot_and_nothing_else(world_size, counts, compact, in_place, num_senders):
    rows, weights = numbered_rows(world_size * STRIDE), numbered_rows(world_size * STRIDE, TOPK)
    # what must not travel, a NaN, does as another one
    rows[0, 0] = EMPTY
    for rank in {0, world_size - 1}:
        for has_weights in (False, True):
            memory = combine_memory(world_size)
            table = table_of(world_size, memory)
            given = Operands(rows, weights, None, None, None, None)
            shape, numbers = shape_of(world_size, TOPK, compact=compact), torch.tensor(counts, dtype=torch.int32)
            form = {"SHAPE": shape, "OWN_IN_PLACE": in_place, "HAS_WEIGHTS": has_weights}
            send_back.interpret((num_senders,), given, table, numbers, rank, **form)
            expected = combine_memory(world_size)
            for row, (source, index) in row_numbers(counts, compact=compact).items():
                if not (in_place and source == rank):
                    slot = rank * SLOTS + index
                    expected[Region.COMBINE_ROWS, source][slot] = rows[row].masked_fill(rows[row] == EMPTY, 2**31 - 1)
                    if has_weights:
                        expected[Region.COMBINE_WEIGHTS, source][slot] = weights[row]
            assert all(torch.equal(memory[at], expected[at]) for at in expected)


# --- scales of rows that come back as fp8 ---


@portable
def look_scaled(places, slots_in, missing_out, total_out, BLOCK: tl.constexpr):
    slots = ()
    for peer in tl.static_range(3):
        slots = slots + (tl.load(slots_in + peer),)  # noqa: RUF005
    shape = Shape(3, 3, 1, 1, False)
    seen = read_block(places, slots, places.rows, 0, 0, shape, BLOCK, False)
    missing, total = judge_block(seen, slots, 0, 0, shape, BLOCK, False)
    tl.store(missing_out, missing)
    where = tl.arange(0, BLOCK.GROUPS_LANES)[:, None] * BLOCK.GROUP + tl.arange(0, BLOCK.GROUP)[None, :]
    tl.store(total_out + where, total)


@pytest.mark.parametrize("num_groups", [1, 3, 4])
def test_a_row_with_scales_has_arrived_with_the_last_of_them(num_groups):
    """A scale is read once for the verdict and for the product; a token's rows come from some ranks only."""
    group, world_size = 8, 3
    width = num_groups * group
    block = Block(width, padded(num_groups), group, tl.uint8, tl.float8e4nv, True, True)
    codes = torch.randint(0, 0x7F, (world_size, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scales = torch.rand(world_size, num_groups, generator=torch.Generator().manual_seed(2)) + 0.5
    slots = torch.tensor([2, -1, 0], dtype=torch.int32)

    def seen(rows: torch.Tensor, scale_bits: torch.Tensor) -> tuple[int, torch.Tensor]:
        missing, total = untouched(1), torch.zeros(padded(num_groups), group)
        places = ReturnPlaces(rows, scale_bits, rows)
        look_scaled.interpret((1,), places, slots, missing, total, BLOCK=block)
        return int(missing), total.flatten()[:width]

    bits = scales.view(torch.int32)
    # slot 1 belongs to a rank that sends nothing, so what lies there does not count
    codes[1], bits[1] = 0xFF, EMPTY
    missing, total = seen(codes, bits)
    assert missing == world_size
    wide = codes.view(FP8_DTYPE).to(torch.float32) * scales.repeat_interleave(group, 1)
    assert torch.equal(total, torch.zeros(width) + wide[2] + wide[0])
    for slot, peer in ((2, 0), (0, 2)):
        for at in range(num_groups):
            late = bits.clone()
            late[slot, at] = EMPTY
            assert seen(codes, late)[0] == peer
        for at in (0, width - 1):
            late = codes.clone()
            late[slot, at] = 0xFF
            assert seen(late, bits)[0] == peer
    assert seen(torch.full_like(codes, 0xFF), bits)[0] == 0


# --- adding what comes back ---

RANK, RANKS, TOKENS = 1, 3, 5
# rows of other ranks' tokens lie before this rank's own
FIRST_OWN_ROW = 2
# which token goes where: to all, to one, to nobody, to this rank alone
GOES = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0]], dtype=torch.bool)


@portable
def add(given, step, poison_out, HAS_WEIGHTS: tl.constexpr, COMBINE: tl.constexpr):
    receiver, num_receivers = tl.program_id(0), tl.num_programs(0)
    shape, weights = Shape(RANKS, RANKS, TOPK, TOPK, False), Block(TOPK, 1, TOPK, tl.int32, tl.float32, False, False)
    share = Share(receiver, num_receivers)
    poison = add_results(given, step, share, FIRST_OWN_ROW, shape, BLOCK, weights, COMBINE, HAS_WEIGHTS)
    tl.store(poison_out + receiver, poison)


@PLACES
@pytest.mark.parametrize("ahead", [False, True], ids=["", "read ahead"])
@pytest.mark.parametrize("has_weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("num_receivers", [1, 4, 20])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_rows_are_added_when_they_have_come_and_left_empty(
    monkeypatch, seed, num_receivers, has_weights, ahead, in_place
):
    """Parts of rows come one by one while they are waited for; seed 0: all are there before."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.where(GOES, GOES.cumsum(0) - 1, -1).to(torch.int32)
    sent, sent_weights = torch.randn(2, RANKS, TOKENS, HIDDEN, generator=generator)
    sent_weights = sent_weights[..., :TOPK].contiguous()
    memory = {
        Region.ROUTES: indices,
        Region.COMBINE_ROWS: torch.full((RANKS * SLOTS, HIDDEN), EMPTY, dtype=torch.int32),
        Region.COMBINE_WEIGHTS: torch.full((RANKS * SLOTS, TOPK), EMPTY, dtype=torch.int32),
        Region.RESULT_WEIGHTS: torch.full((TOKENS, TOPK), 77.0),
        Region.POISON: torch.zeros(1, dtype=torch.int32),
        Region.LIMITS: torch.tensor([10**15] * 2),
    }
    rows_in = torch.full((FIRST_OWN_ROW + TOKENS, HIDDEN), 77.0)
    weights_in = torch.full((FIRST_OWN_ROW + TOKENS, TOPK), 77.0)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for token, peer in GOES.nonzero().tolist():
        index = int(indices[token, peer])
        if in_place and peer == RANK:
            rows_in[FIRST_OWN_ROW + index] = sent[peer, token]
            weights_in[FIRST_OWN_ROW + index] = sent_weights[peer, token]
            continue
        slot, bits = peer * SLOTS + index, sent[peer, token].view(torch.int32)
        row, weights = memory[Region.COMBINE_ROWS][slot], memory[Region.COMBINE_WEIGHTS][slot]
        parts += [(row[::2], bits[::2]), (row[1::2], bits[1::2])]
        if has_weights:
            parts.append((weights, sent_weights[peer, token].view(torch.int32)))
    random.Random(seed).shuffle(parts)

    idle = 0

    def next_part(_: object = None) -> None:
        nonlocal idle
        if parts:
            where, what = parts.pop()
            where.copy_(what)
            return
        # what was read ahead may be older than the last part: one more look for each block
        idle += 1
        assert ahead
        assert idle <= TOKENS * NUM_BLOCKS, "waits for more than there is"

    while parts and seed == 0:
        next_part()
    monkeypatch.setitem(pause.__dict__, "python", next_part)
    result, poison = torch.full((TOKENS, HIDDEN), 77.0), untouched(num_receivers)
    given = rows_in.clone()
    table = table_of(RANKS, {(region, RANK): each for region, each in memory.items()})
    operands = Operands(rows_in.view(torch.int32), weights_in.view(torch.int32), result, rows_in, None, None)
    step = CombineStep(table, RANK, 1, TOKENS, 0, SLOTS, 0, False, False, 0)
    kind = Combine(tl.float32, False, in_place, ahead)
    add.interpret((num_receivers,), operands, step, poison, HAS_WEIGHTS=has_weights, COMBINE=kind)
    assert parts == []
    assert not poison.any()
    for got, values in ((result, sent), (memory[Region.RESULT_WEIGHTS], sent_weights)):
        expected = torch.zeros_like(got)
        for peer in range(RANKS):
            expected += torch.where(GOES[:, peer, None], values[peer], 0.0)
        if got is not result and not has_weights:
            expected = torch.full_like(got, 77.0)
        assert torch.equal(got, expected)
    assert (memory[Region.COMBINE_ROWS] == EMPTY).all()
    assert (memory[Region.COMBINE_WEIGHTS] == EMPTY).all()
    assert torch.equal(rows_in, given)
