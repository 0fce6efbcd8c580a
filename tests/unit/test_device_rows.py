"""Device helpers that number a dispatch's rows and judge flagged ones, in Triton's interpreter."""

import random

import pytest
import torch
import triton.language as tl

from ep_a2a.kernels.constants import ExpertPlacement
from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.ll_receive_kernels import judge_row
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.routing_kernels import (
    count_by_rank,
    destinations_of,
    ranks_in_turn,
    ranks_of_tokens,
    rows_before_token,
    rows_of_programs_before,
)
from ep_a2a.routing import ROUTINGS, destination_mask
from tests.markers import first_is_quick
from tests.unit.device import EMPTY, as_int32, shape_of, table_of, untouched

# --- what of a flagged row has not arrived ---

WRITTEN_IN_FULL = -(2**31)
NUM_WORDS = 8
POSITION = NUM_WORDS - 1


@portable
def judge(words, sides, num_late_sides, out, IS_CAST: tl.constexpr):
    at = tl.arange(0, NUM_WORDS)
    tl.store(out, judge_row(tl.load(words + at), tl.load(sides + at), at, num_late_sides, NUM_WORDS, IS_CAST))


def num_late(words: list[int], *, cast: bool, position: int = 17, num_late_sides: int = 0) -> int:
    """Words of a row that are late, where its position travels as the last of the words beside it."""
    sides, out = torch.zeros(NUM_WORDS, dtype=torch.int64), untouched(1)
    sides[POSITION] = position
    judge.interpret((1,), torch.tensor(words, dtype=torch.int32), sides, num_late_sides, out, IS_CAST=cast)
    return int(out)


def test_a_word_is_missing_while_all_its_bits_are_set():
    """Of a row with a cast its position says nothing: it never has the highest bit."""
    rng = random.Random(3)
    for _ in range(60):
        words = [[rng.choice([0xFE, *[0xFF] * 6]) for _ in range(4)] for _ in range(NUM_WORDS)]
        values = [as_int32(int.from_bytes(bytes(each), "little")) for each in words]
        missing = sum(each == [0xFF] * 4 for each in words)
        assert num_late(values, cast=False) == missing
        assert num_late(values, cast=True, position=WRITTEN_IN_FULL | 17) == missing


def test_a_position_with_the_highest_bit_announces_a_row_that_contains_empty():
    """Once all words beside the row have come."""
    words = [EMPTY, 1, EMPTY, 2, 3, EMPTY, 0, 5]
    assert num_late(words, cast=False) == 3
    assert num_late(words, cast=False, position=WRITTEN_IN_FULL | 17) == 0
    assert num_late(words, cast=False, position=WRITTEN_IN_FULL | 17, num_late_sides=1) == 3


# --- row numbers ---

NUM_PROGRAMS = 3
ROW_STRIDE = 100


@portable
def find_rows(ids, table, first_rows, row_limit, rank, num_tokens, out, SHAPE: tl.constexpr, OWNERS: tl.constexpr):
    op = OpContext(table, rank, SHAPE)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    world_size: tl.constexpr = SHAPE.WORLD_SIZE
    ranks, at = tl.arange(0, SHAPE.WORLD_LANES), tl.arange(0, SHAPE.TOPK_LANES)
    chunk = (num_tokens + num_programs - 1) // num_programs
    first = tl.minimum(program * chunk, num_tokens)
    last = tl.minimum(first + chunk, num_tokens)
    bases = tl.load(first_rows + ranks, mask=ranks < world_size, other=0)
    alone = count_by_rank(ids, 0, first, op, OWNERS, 8)
    own_counts = count_by_rank(ids, first, last, op, OWNERS, 8)
    told = rows_of_programs_before(op, 9, own_counts, program, 1)
    going = ranks_of_tokens(ids, num_tokens, op, OWNERS, 64)
    in_turn = ranks_in_turn(op)
    alone = tl.gather(alone, in_turn, 0)
    for token in range(first, last):
        token_ids = tl.load(ids + token * SHAPE.TOPK + at, mask=at < SHAPE.TOPK, other=-1)
        peers, by_all, sent = destinations_of(token_ids, tl.gather(bases, in_turn, 0) + alone, op, OWNERS, 0)
        _, by_told, _ = destinations_of(token_ids, tl.gather(bases + told, in_turn, 0), op, OWNERS, 0)
        few = tl.where(by_all >= 0, tl.load(first_rows + peers) + rows_before_token(going, token, peers, 64), -1)
        for way, rows in enumerate((by_all, by_told, few)):
            line = out + (way * num_tokens + token) * world_size
            tl.store(line + ranks, ranks * 0 - 1, mask=ranks < world_size)
            tl.store(line + (peers - rank + world_size) % world_size, rows, mask=(rows >= 0) & (rows < row_limit))
        alone += sent
        told += count_by_rank(ids, token, token + 1, op, OWNERS, 8)


def found_rows(
    ids: torch.Tensor, first_rows: torch.Tensor, row_limit: int, rank: int, num_tokens: int, num_experts: int
) -> torch.Tensor:
    """[way, token, rank]: of counts over all ids, of counts told by programs before, and of a flagged dispatch."""
    topk, world_size = ids.shape[1], len(first_rows)
    chunk_counts = torch.zeros(NUM_PROGRAMS, world_size, dtype=torch.int64)
    table = table_of(world_size, {(Region.CHUNK_COUNTS, rank): chunk_counts})
    out, owners = untouched(3, num_tokens, world_size), ExpertPlacement(num_experts, world_size)
    form = {"SHAPE": shape_of(world_size, topk), "OWNERS": owners}
    find_rows.interpret((NUM_PROGRAMS,), ids, table, first_rows, row_limit, rank, num_tokens, out, **form)
    return out


@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "world_size"),
    [
        (0, 2, 8, 4),
        (1, 1, 1, 1),
        (37, 8, 13, 3),
        (13, 5, 40, 8),
        (7, 2, 40, 8),
        (9, 5, 40, 9),
        (5, 3, 100, 17),
        pytest.param(1, 3, 100, 72, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("routing", first_is_quick((name, name) for name in ("repeated", "uniform", "out_of_range")))
def test_rows_do_not_depend_on_how_they_are_counted(num_tokens, topk, num_experts, world_size, routing):
    """Alone, with what other programs tell, or of few tokens: the sums of the mask, also at the limit."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids = ROUTINGS[routing](max(1, num_tokens), topk, num_experts, world_size, generator)
    mask = destination_mask(ids[:num_tokens], num_experts, world_size).to(torch.int64)
    first_rows = torch.arange(world_size, dtype=torch.int32) * ROW_STRIDE + 7
    rows = first_rows + mask.cumsum(0) - mask
    middle = world_size // 2
    for rank, row_limit in ((0, 2**31 - 1), (middle, 7 + ROW_STRIDE * middle + num_tokens // 4)):
        order = [(rank + step) % world_size for step in range(world_size)]
        expected = torch.where((mask > 0) & (rows < row_limit), rows, -1)[:, order]
        for found in found_rows(ids, first_rows, row_limit, rank, num_tokens, num_experts):
            assert found.tolist() == expected.tolist()
