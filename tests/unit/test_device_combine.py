"""Parts of combine in Triton's interpreter: first loads of senders, and casts in words."""

import pytest
import torch
import triton.language as tl

from ep_a2a.kernels.combine_send_kernels import CombineStep, Share, first_unit
from ep_a2a.kernels.constants import Block, Shape
from ep_a2a.kernels.layout import Region, Stage, padded
from ep_a2a.kernels.line_cast_kernels import quantize_lines
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.quantization import quantize_groups
from tests.unit.test_device_functions import unusual_rows

COUNTS = {1: [[5], [0]], 2: [[3, 5], [0, 4], [4, 0], [0, 0]], 3: [[2, 4, 3], [0, 0, 4], [4, 0, 1]]}
STRIDE, HIDDEN, GROUP = 5, 40, 16
NUM_BLOCKS = -(-HIDDEN // GROUP)
OUTSIDE = -7


def untouched(*size: int) -> torch.Tensor:
    """int32 for a kernel's results; no helper gives 77 everywhere."""
    return torch.full(size, 77, dtype=torch.int32)


@portable
def ask_first(
    rows_in,
    table,
    counts,
    out,
    values_out,
    rank,
    num_senders,
    step_tokens,
    SHAPE: tl.constexpr,
    B: tl.constexpr,
    OWN_IN_PLACE: tl.constexpr,
):
    # one program that is none before the senders, and one behind them
    at, sender = tl.program_id(0), tl.program_id(0) - 1
    lanes = tl.arange(0, SHAPE.WORLD_LANES)
    received = tl.load(counts + lanes, mask=lanes < SHAPE.WORLD_SIZE, other=0)
    is_sender = (sender >= 0) & (sender < num_senders)
    step = CombineStep(OpContext(table, rank, SHAPE), 1, 0, step_tokens, STRIDE, counts, received, False, is_sender, 0)
    aim, _, values = first_unit(rows_in, step, Share(sender, num_senders), B, OWN_IN_PLACE)
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
    ("compact", "packed", "cap"),
    [(True, False, False), (True, False, True), (False, False, False), (False, True, True)],
    ids=["compact", "compact-cap", "rank_major", "packed"],
)
@pytest.mark.parametrize("num_rows_at_once", [1, 4])
def test_the_first_block_lies_inside_of_the_rows(world_size, counts, compact, packed, in_place, cap, num_rows_at_once):
    """It is asked for before the counts are known to hold; programs that send nothing ask for nothing.

    Args:
        cap: rows_in has as many rows as were received (max_total_recv_tokens, or bounds of each rank).
    """
    num_rows = max(1, sum(counts)) if cap else world_size * STRIDE
    memory = torch.full((num_rows + world_size * STRIDE, HIDDEN), OUTSIDE, dtype=torch.int32)
    memory[:num_rows] = torch.arange(1, num_rows * HIDDEN + 1).view(num_rows, HIDDEN)
    num_senders = max(1, max(counts) * world_size * NUM_BLOCKS)
    block = Block(HIDDEN, 1, GROUP, tl.int32, tl.float32, False, False, num_rows_at_once)
    form = Shape(world_size, padded(world_size), 1, 1, compact, 0, False)
    table = torch.zeros(len(Region) * world_size + len(Stage), dtype=torch.int64)
    starts = [sum(counts[:source]) for source in range(world_size)]
    step_tokens, unread = -1 if packed else STRIDE, [1 << 20] * world_size
    given = torch.tensor([counts, starts if compact or packed else unread], dtype=torch.int32)
    for rank in {0, world_size - 1}:
        out, values = untouched(num_senders + 2, 3), untouched(num_senders + 2, num_rows_at_once, GROUP)
        arguments = (memory, table, given, out, values, rank, num_senders, step_tokens)
        ask_first.interpret((num_senders + 2,), *arguments, SHAPE=form, B=block, OWN_IN_PLACE=in_place)
        assert not (values == OUTSIDE).any(), "reads behind the rows"
        assert (values[[0, -1]] == 0).all()
        for (row, num_left, first), found in zip(out[1:-1].tolist(), values[1:-1].tolist()):
            for place in range(min(num_left, num_rows_at_once)):
                expected = memory[row + place, first : first + GROUP].tolist()
                assert found[place] == expected + [0] * (GROUP - len(expected))


@portable
def quantize_words(words_in, words_out, scales_out, PART: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    per_word: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    lines = tl.arange(0, 32 * 128 // (PART * PARTS))
    parts = ()
    for part in tl.static_range(PARTS):
        where = (lines * PARTS + part)[:, None] * (PART // per_word) + tl.arange(0, PART // per_word)[None, :]
        parts = parts + (tl.load(words_in + where),)  # noqa: RUF005 - device code
    words, scale_bits = quantize_lines(parts, 128 // (PART * PARTS), DTYPE)
    tl.store(words_out + lines[:, None] * (PART * PARTS // 4) + tl.arange(0, PART * PARTS // 4)[None, :], words)
    tl.store(scales_out + lines, scale_bits)


@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float16, tl.float32], ids=str)
@pytest.mark.parametrize(("part", "num_parts"), [(4, 1), (8, 1), (8, 2)])
def test_words_of_fp8_equal_the_reference(part, num_parts, dtype):
    rows = unusual_rows(128).to(getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[str(dtype)]))
    words, scales = untouched(32, 32), untouched(32, 128 // (part * num_parts))
    quantize_words.interpret((1,), rows.view(torch.int32), words, scales, PART=part, PARTS=num_parts, DTYPE=dtype)
    expected, expected_scales = quantize_groups(rows, "float32")
    assert torch.equal(words.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales.view(torch.int32).view(-1, 1).expand_as(scales))
