"""Device helpers in Triton's interpreter against plain torch, and that interpreting leaves Triton as it was."""

import os
import random
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from ep_a2a.commands.bench.layer_kernels import quantize_tile
from ep_a2a.config import FP8_DTYPE, LOW_LATENCY_MAX_TOKENS
from ep_a2a.kernels.cast_kernels import e4m3_bits, e4m3_bits_by_integers, round_to
from ep_a2a.kernels.constants import GIVEN_SCALE, MX_SCALES, ExpertPlacement, Shape
from ep_a2a.kernels.layout import Region, padded
from ep_a2a.kernels.ll_receive_kernels import judge_row
from ep_a2a.kernels.op_context import OpContext
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import MANY_POLLS, POLLS_PER_CLOCK, begin_stage, late_lanes, next_poll
from ep_a2a.kernels.routing_kernels import count_by_rank
from ep_a2a.kernels.target import INTERPRETED_POLLS
from ep_a2a.policy import MAX_COUNTED_ALONE
from ep_a2a.quantization import fp32_to_e4m3_bits, quantize_groups, quantize_mxfp8, quantize_static

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BLOCK = 1024


def floats_of(bits: torch.Tensor) -> torch.Tensor:
    """float32 of bit patterns given as any integers."""
    return bits.to(torch.int64).bitwise_and(0xFFFFFFFF).to(torch.uint32).view(torch.float32)


def padded_to_block(values: torch.Tensor) -> torch.Tensor:
    missing = -values.numel() % BLOCK
    return torch.cat([values, values.new_zeros(missing)])


ALL_BF16 = floats_of(torch.arange(1 << 16) << 16)


def shape_of(world_size: int) -> Shape:
    return Shape(world_size, padded(world_size), 1, 1, False, 0, False)


def untouched(size: int) -> torch.Tensor:
    """int32 for a kernel's results; no helper gives 77 everywhere."""
    return torch.full((size,), 77, dtype=torch.int32)


# --- fp8 ---


@portable
def cast(values, out, BY_INTEGERS: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + where)
    tl.store(out + where, e4m3_bits_by_integers(value) if BY_INTEGERS else e4m3_bits(value))


def e4m3_of(values: torch.Tensor, *, by_integers: bool = True) -> torch.Tensor:
    padded = padded_to_block(values)
    out = torch.zeros(padded.shape, dtype=torch.uint8)
    cast.interpret((padded.numel() // BLOCK,), padded, out, BY_INTEGERS=by_integers)
    return out[: values.numel()]


NANS = floats_of(torch.tensor([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF]))


def test_e4m3_is_the_oracles():
    """Of all bfloat16, random float32, NaNs, and float32 midpoints of e4m3 values with their neighbours."""
    e4m3_values = torch.arange(0x7F, dtype=torch.uint8).view(FP8_DTYPE).to(torch.float32)
    midpoints = (e4m3_values[1:] + e4m3_values[:-1]) / 2
    infinity = torch.full_like(midpoints, float("inf"))
    near = torch.cat([midpoints, midpoints.nextafter(infinity), midpoints.nextafter(-infinity)])
    random_ones = floats_of(torch.randint(0, 1 << 32, (1 << 15,), dtype=torch.int64))
    values = torch.cat([ALL_BF16, near, -near, random_ones, NANS])
    expected = fp32_to_e4m3_bits(values)
    assert torch.equal(e4m3_of(values), expected)
    assert torch.equal(e4m3_of(values, by_integers=False), expected)


@portable
def quantize_rows(values, given, bits_out, scales_out, ELEMENTS: tl.constexpr, SCALING: tl.constexpr):
    groups = tl.arange(0, 32)
    where = groups[:, None] * ELEMENTS + tl.arange(0, ELEMENTS)[None, :]
    bits, scale_bits = quantize_tile(tl.load(values + where), given, SCALING)
    tl.store(bits_out + where, bits)
    tl.store(scales_out + groups, scale_bits)


def unusual_rows(num_elements: int) -> torch.Tensor:
    """Rows [32, num_elements] of all kinds that a cast must define."""
    rows = torch.randn(32, num_elements)
    for number, factor in enumerate((1e-40, 1e-30, 1e-12, 1e-10, 1e-3, 1e3, 1e20, 1e35), start=16):
        rows[number] *= factor
    rows[0] = 0.0
    rows[1] = -0.0
    rows[2] = float("nan")
    rows[3] = float("inf")
    rows[4, ::3] = float("nan")
    rows[5, 1] = -float("inf")
    rows[6] = torch.finfo(torch.float32).max
    rows[7] = torch.finfo(torch.float32).tiny
    rows[8] = 1e-45
    rows[9] = 448.0
    rows[10] = 448.0 * 2.0**-20
    rows[11] = rows[11].to(torch.bfloat16).to(torch.float32)
    rows[12] = -1e-10
    rows[13, :] = 0.0
    rows[13, 0] = float("nan")
    return rows


@pytest.mark.parametrize("num_elements", [1, 16, 128, 512])
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_quantised_tiles_equal_the_reference(num_elements, scale_format):
    rows = unusual_rows(num_elements) if num_elements > 1 else torch.randn(32, 1)
    bits = torch.zeros(rows.shape, dtype=torch.uint8)
    scales = torch.zeros(32, dtype=torch.int32)
    quantize_rows.interpret((1,), rows, None, bits, scales, ELEMENTS=num_elements, SCALING=scale_format == "ue8m0")
    expected, expected_scales = quantize_groups(rows, scale_format)
    assert torch.equal(bits, expected.view(torch.uint8))
    if scale_format == "ue8m0":
        assert torch.equal((scales >> 23).to(torch.uint8), expected_scales)
        assert (scales & 0x7FFFFF == 0).all()
    else:
        assert torch.equal(scales, expected_scales.view(torch.int32))


def test_mx_and_given_scales_equal_the_reference():
    rows, given = unusual_rows(32), torch.tensor([3.71])
    bits, scales = torch.zeros(rows.shape, dtype=torch.uint8), torch.zeros(32, dtype=torch.int32)
    quantize_rows.interpret((1,), rows, None, bits, scales, ELEMENTS=32, SCALING=MX_SCALES.value)
    expected, expected_scales = quantize_mxfp8(rows)
    assert torch.equal(bits, expected.view(torch.uint8))
    assert torch.equal((scales >> 23).to(torch.uint8), expected_scales.flatten())
    word = given.view(torch.int32)
    quantize_rows.interpret((1,), rows, word, bits, scales, ELEMENTS=32, SCALING=GIVEN_SCALE.value)
    assert torch.equal(bits, quantize_static(rows, given).view(torch.uint8))


# --- bf16 ---


@portable
def round_values(values, out, DTYPE: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + where, round_to(tl.load(values + where), DTYPE))


@pytest.mark.parametrize("lower_half", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_rounding_around_every_value(lower_half):
    """Every upper half with a lower half below, on and above the tie; carries go up to infinity; both signs."""
    values = floats_of((torch.arange(1 << 16) << 16) | lower_half)
    got, expected = torch.zeros(values.shape, dtype=torch.bfloat16), values.to(torch.bfloat16)
    round_values.interpret((values.numel() // BLOCK,), values, got, DTYPE=tl.bfloat16)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit()[~expected.isnan()], expected.signbit()[~expected.isnan()])


# --- routing ---


@portable
def count(ids, first, last, out, SHAPE: tl.constexpr, OWNERS: tl.constexpr, TOKENS: tl.constexpr):
    counts = count_by_rank(ids, first, last, SHAPE, OWNERS, TOKENS)
    tl.store(out + tl.arange(0, SHAPE.WORLD_LANES), counts)


@pytest.mark.parametrize(
    ("num_tokens", "tokens"),
    [(LOW_LATENCY_MAX_TOKENS, 128), (255, 256), (256, 256), (MAX_COUNTED_ALONE, 256), (65535, 8192)],
)
@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (4, 3), (8, 7), (9, 8)])
def test_all_tokens_may_go_to_one_rank(num_tokens, tokens, world_size, rank):
    ids, shape = torch.full((num_tokens, 1), rank, dtype=torch.int32), shape_of(world_size)
    form = {"SHAPE": shape, "OWNERS": ExpertPlacement(world_size, world_size), "TOKENS": tokens}
    out = untouched(shape.WORLD_LANES)
    count.interpret((1,), ids, 0, num_tokens, out, **form)
    assert out.tolist() == [num_tokens * (lane == rank) for lane in range(shape.WORLD_LANES)]


# --- epochs and flags ---


def as_int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


@portable
def begin(table, out, STAGE: tl.constexpr, SHAPE: tl.constexpr):
    epoch, out_of_order = begin_stage(OpContext(table, 0, SHAPE), STAGE)
    tl.store(out, epoch)
    tl.store(out + 1, (out_of_order != 0).to(tl.int32))


def begun(steps: list[int], stage: int) -> list[int]:
    # a table of one rank, without addresses, and its step counters behind it
    table, out = torch.tensor([0] * len(Region) + steps, dtype=torch.int64), untouched(2)
    before = table.clone()
    begin.interpret((1,), table, out, STAGE=stage, SHAPE=shape_of(1))
    assert torch.equal(table, before)
    return out.tolist()


@pytest.mark.parametrize(
    ("done", "epoch"),
    [
        (0, 1),
        (1, 2),
        (2**31 - 2, 2**31 - 1),
        (2**31 - 1, 2**31),
        (2**31, 2**31 + 1),
        (2**32 - 2, 2**32 - 1),
        (2**32 - 1, 1),
        (2**32, 2),
        (2 * (2**32 - 1) - 1, 2**32 - 1),
        (2 * (2**32 - 1), 1),
        (2**47 - 1, 2**15),
    ],
)
def test_epochs_wrap_and_skip_zero(done, epoch):
    """By definition: steps are counted from 1 to 2**32 - 1 and again; arrivals in the lower bits do not matter."""
    assert epoch == done % (2**32 - 1) + 1
    for arrivals in (0, 1, 2**16 - 1):
        assert begun([done << 16 | arrivals] * 4, 0) == [as_int32(epoch), 0]


@portable
def lateness(flags, epoch_word, out, PRESENT: tl.constexpr, ORDERS: tl.constexpr):
    lanes = tl.arange(0, 8)
    tl.store(out + lanes, late_lanes(flags + lanes, tl.load(epoch_word), lanes < PRESENT, ORDERS))


ORDERS = pytest.mark.parametrize("orders", [True, False], ids=["acquire", "relaxed"])


@ORDERS
@pytest.mark.parametrize("epoch", [1, 2, 1000, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1])
def test_flags_are_compared_by_wrapping_difference(epoch, orders):
    """A fast peer is one ahead, a slow one behind, on either side of both wraps; a reset flag is 0."""
    before = 2**32 - 1 if epoch == 1 else epoch - 1
    after = 1 if epoch == 2**32 - 1 else epoch + 1
    seen = [before, epoch, after, epoch - 2**30, epoch + 2**30, epoch - 2**31 + 1]
    flags = torch.tensor([as_int32(value) for value in (*seen, before, before)], dtype=torch.int32)
    out = untouched(8)
    word = torch.tensor([as_int32(epoch)], dtype=torch.int32)
    given = flags.clone()
    # lanes 6 and 7 are not there: whatever lies behind the flags does not count
    lateness.interpret((1,), flags, word, out, PRESENT=6, ORDERS=orders)
    assert out.tolist() == [1, 0, 0, 1, 0, 1, 0, 0]
    assert torch.equal(flags, given)


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
    sides, out = torch.zeros(NUM_WORDS, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    sides[POSITION] = position
    judge.interpret((1,), torch.tensor(words, dtype=torch.int32), sides, num_late_sides, out, IS_CAST=cast)
    return int(out)


def test_a_word_is_missing_while_all_its_bits_are_set():
    """Of a row with a cast its position says nothing: it never has the highest bit."""
    rng = random.Random(3)
    for _ in range(60):
        words = [[rng.choice([0xFE, *[0xFF] * 6]) for _ in range(4)] for _ in range(NUM_WORDS)]
        values = [int.from_bytes(bytes(each), "little", signed=True) for each in words]
        missing = sum(each == [0xFF] * 4 for each in words)
        assert num_late(values, cast=False) == missing
        assert num_late(values, cast=True, position=WRITTEN_IN_FULL | 17) == missing


def test_a_position_with_the_highest_bit_announces_a_row_that_contains_empty():
    """Once all words beside the row have come."""
    words = [-1, 1, -1, 2, 3, -1, 0, 5]
    assert num_late(words, cast=False) == 3
    assert num_late(words, cast=False, position=WRITTEN_IN_FULL | 17) == 0
    assert num_late(words, cast=False, position=WRITTEN_IN_FULL | 17, num_late_sides=1) == 3


# --- what interpreting leaves behind ---


@portable
def double(values):
    where = values + tl.arange(0, 16)
    tl.store(where, tl.load(where) * 2)


@portable
def fails(values):
    where = values + tl.arange(0, 16)
    tl.store(where, tl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [tl.load(where)], tl.int32, True, 1))


@triton.jit
def an_engines_kernel(values):
    tl.store(values, tl.load(values) + 1)


@pytest.fixture
def _triton_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    before = [dict(vars(place)) for place in places]
    load = tl.load
    yield
    assert tl.load is load
    for place, attributes in zip(places, before):
        now = dict(vars(place))
        assert set(now) == set(attributes), place
        assert [name for name, value in now.items() if value is not attributes[name]] == [], place
    assert "TRITON_INTERPRET" not in os.environ
    assert not triton.knobs.runtime.interpret


@pytest.mark.usefixtures("_triton_stays_as_it_is")
def test_interpreting_leaves_triton_as_it_was():
    """Also where a kernel raises; kernels of others stay compiled ones."""
    values = torch.arange(16, dtype=torch.int32)
    double.interpret((2,), values)
    # programs run one after another, on the caller's own memory
    assert torch.equal(values, torch.arange(16, dtype=torch.int32) * 4)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="NotImplementedError"):
        fails.interpret((1,), values)
    with pytest.raises(TypeError):
        double.interpret((1,))
    double.interpret((1,), values)
    assert values.tolist() == [8 * value for value in range(16)]
    assert type(an_engines_kernel) is JITFunction
    assert type(triton.jit(an_engines_kernel.fn)) is JITFunction
    assert isinstance(double, JITFunction)


@portable
def count_poll(polls):
    tl.store(polls, next_poll(tl.load(polls)))


def test_the_number_of_polls_never_comes_back_to_where_time_begins():
    """After 2^32 polls a sum would, and a wait of an hour would begin anew."""
    polls = torch.tensor([MANY_POLLS.value - INTERPRETED_POLLS], dtype=torch.int32)
    seen = []
    for _ in range(3):
        count_poll.interpret((1,), polls)
        seen.append(int(polls))
    assert seen == [MANY_POLLS.value, MANY_POLLS.value // 2, MANY_POLLS.value // 2 + INTERPRETED_POLLS]
    assert all(number % POLLS_PER_CLOCK.value == 0 and number > POLLS_PER_CLOCK.value for number in seen[:2])
