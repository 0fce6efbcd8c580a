"""What a sender of combine loads before it knows how many rows there are, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from ep_a2a.kernels.combine_send_kernels import CombineStep, Share, first_unit
from ep_a2a.kernels.constants import Block
from ep_a2a.kernels.portable import portable
from tests.unit.device import shape_of, table_of, untouched

COUNTS = {
    1: [[5], [0]],
    2: [[3, 5], [0, 4], [4, 0], [0, 0]],
    3: [[2, 4, 3], [0, 0, 4], [4, 0, 1]],
}
STRIDE, HIDDEN, GROUP = 5, 40, 16
NUM_BLOCKS = -(-HIDDEN // GROUP)
OUTSIDE = -7


@portable
def ask_first(
    rows_in,
    table,
    counts,
    out,
    values_out,
    rank,
    num_senders,
    SHAPE: tl.constexpr,
    B: tl.constexpr,
    OWN_IN_PLACE: tl.constexpr,
):
    # one program that is none before the senders, and one behind them
    at, sender = tl.program_id(0), tl.program_id(0) - 1
    lanes = tl.arange(0, SHAPE.WORLD_LANES)
    received = tl.load(counts + lanes, mask=lanes < SHAPE.WORLD_SIZE, other=0)
    is_sender = (sender >= 0) & (sender < num_senders)
    step = CombineStep(table, rank, 1, 0, STRIDE, STRIDE, received, False, is_sender, 0)
    aim, _, values = first_unit(rows_in, step, Share(sender, num_senders), SHAPE, B, OWN_IN_PLACE)
    tl.store(out + at * 3, aim.row)
    tl.store(out + at * 3 + 1, tl.load(counts + aim.destination) - aim.index)
    tl.store(out + at * 3 + 2, aim.first)
    rows = tl.arange(0, B.ROWS)[:, None]
    tl.store(values_out + (at * B.ROWS + rows) * GROUP + tl.arange(0, GROUP)[None, :], values)


@pytest.mark.parametrize(
    ("world_size", "counts"), [(world_size, counts) for world_size, each in COUNTS.items() for counts in each]
)
@pytest.mark.parametrize("in_place", [True, False], ids=["own in place", "own sent"])
@pytest.mark.parametrize(
    ("compact", "cap"), [(True, False), (True, True), (False, False)], ids=["compact", "compact-cap", "rank_major"]
)
@pytest.mark.parametrize("num_rows_at_once", [1, 4])
def test_the_first_block_lies_inside_of_the_rows(world_size, counts, compact, in_place, cap, num_rows_at_once):
    """It is asked for before the counts are known to hold; programs that send nothing ask for nothing.

    Args:
        cap: rows_in has as many rows as were received (max_total_recv_tokens).
    """
    num_rows = max(1, sum(counts)) if cap else world_size * STRIDE
    memory = torch.full((num_rows + world_size * STRIDE, HIDDEN), OUTSIDE, dtype=torch.int32)
    memory[:num_rows] = torch.arange(1, num_rows * HIDDEN + 1).view(num_rows, HIDDEN)
    num_senders = max(1, max(counts) * world_size * NUM_BLOCKS)
    block = Block(HIDDEN, 1, GROUP, tl.int32, tl.float32, False, False, num_rows_at_once)
    given, form = torch.tensor(counts, dtype=torch.int32), shape_of(world_size, compact=compact)
    for rank in {0, world_size - 1}:
        out, values = untouched(num_senders + 2, 3), untouched(num_senders + 2, num_rows_at_once, GROUP)
        arguments = (memory, table_of(world_size, {}), given, out, values, rank, num_senders)
        ask_first.interpret((num_senders + 2,), *arguments, SHAPE=form, B=block, OWN_IN_PLACE=in_place)
        assert not (values == OUTSIDE).any(), "reads behind the rows"
        assert (values[[0, -1]] == 0).all()
        for (row, num_left, first), found in zip(out[1:-1].tolist(), values[1:-1].tolist()):
            for place in range(min(num_left, num_rows_at_once)):
                expected = memory[row + place, first : first + GROUP].tolist()
                assert found[place] == expected + [0] * (GROUP - len(expected))
