"""Device helpers in Triton's interpreter against plain torch, and that interpreting leaves Triton as it was."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from ep_a2a.config import FLAGGED_MAX_TOKENS, FP8_DTYPE
from ep_a2a.kernels.cast_kernels import e4m3_bits, e4m3_bits_by_integers, quantize_tile, round_to
from ep_a2a.kernels.combine_send_kernels import never_empty
from ep_a2a.kernels.layout import Region, padded
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import (
    begin_stage,
    epoch_of,
    finish_stage,
    flagged,
    late_lanes,
    payload_of,
    post_all,
    wait_all,
)
from ep_a2a.kernels.routing_kernels import (
    byte_counts,
    byte_of,
    count_rows,
    destination_bytes,
    owner_of,
    record_routes,
)
from ep_a2a.policy import MAX_COUNTED_IN_BYTES
from ep_a2a.quantization import fp32_to_e4m3_bits, quantize_groups
from ep_a2a.routing import ROUTINGS, destination_mask, owner_of_experts

if TYPE_CHECKING:
    from collections.abc import Iterator

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BLOCK = 1024


def floats_of(bits: torch.Tensor) -> torch.Tensor:
    """float32 of bit patterns given as any integers."""
    return bits.to(torch.int64).bitwise_and(0xFFFFFFFF).to(torch.uint32).view(torch.float32)


def padded_to_block(values: torch.Tensor) -> torch.Tensor:
    missing = -values.numel() % BLOCK
    return torch.cat([values, values.new_zeros(missing)])


ALL_BF16 = floats_of(torch.arange(1 << 16) << 16)


# --- fp8 ---


@portable
def cast_by_integers(values, out, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + where, e4m3_bits_by_integers(tl.load(values + where)))


@portable
def cast(values, out, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + where, e4m3_bits(tl.load(values + where)))


def e4m3_of(values: torch.Tensor, kernel: Any = cast_by_integers) -> torch.Tensor:
    padded = padded_to_block(values)
    out = torch.zeros(padded.shape, dtype=torch.uint8)
    kernel.interpret((padded.numel() // BLOCK,), padded, out, BLOCK=BLOCK)
    return out[: values.numel()]


# Codes 0 to 0x7E are the non-negative finite values in ascending order; torch only widens here, which is exact.
E4M3_VALUES = torch.arange(0x7F, dtype=torch.uint8).view(FP8_DTYPE).to(torch.float64)


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """By definition: the nearest of all e4m3 values, of two the even code; saturating; NaN is 0x7F."""
    wide = values.to(torch.float64)
    magnitude = wide.abs().clamp(max=448.0)
    distance = (magnitude[:, None] - E4M3_VALUES[None, :]).abs()
    # ties differ by one code: an odd code loses by less than any real difference of distances
    codes = torch.arange(0x7F)
    is_nearest = distance == distance.min(dim=1, keepdim=True).values
    ranking = torch.where(is_nearest, codes % 2, 2)
    code = ranking.argmin(dim=1)
    code |= torch.where(torch.signbit(wide), 0x80, 0)
    return torch.where(wide.isnan(), 0x7F, code).to(torch.uint8)


def test_e4m3_of_all_bf16_patterns():
    expected = nearest_e4m3(ALL_BF16)
    assert torch.equal(e4m3_of(ALL_BF16), expected)
    assert torch.equal(e4m3_of(ALL_BF16, cast), expected)
    assert torch.equal(fp32_to_e4m3_bits(ALL_BF16), expected)


def test_e4m3_values_are_fixed_points():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(FP8_DTYPE).to(torch.float32)
    expected = codes.clone()
    expected[0xFF] = 0x7F
    assert torch.equal(e4m3_of(values), expected)


def test_e4m3_midpoints_and_their_neighbours():
    midpoints = ((E4M3_VALUES[1:] + E4M3_VALUES[:-1]) / 2).to(torch.float32)
    assert torch.equal(midpoints.to(torch.float64) * 2, E4M3_VALUES[1:] + E4M3_VALUES[:-1])
    infinity = torch.full_like(midpoints, float("inf"))
    values = torch.cat([midpoints, midpoints.nextafter(infinity), midpoints.nextafter(-infinity)])
    values = torch.cat([values, -values])
    assert torch.equal(e4m3_of(values), nearest_e4m3(values))
    # ties go to the even code
    assert (e4m3_of(midpoints) % 2 == 0).all()


def test_e4m3_of_what_is_not_ordinary():
    values = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 448.0, 464.0, 464.1, 1e30, -1e30, 2**-9, 2**-10, 1e-45]
    )
    expected = [0, 0x80, 0x7E, 0xFE, 0x7F, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 1, 0, 0]
    assert e4m3_of(values).tolist() == expected
    nans = floats_of(torch.tensor([0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0x7FC00000]))
    assert e4m3_of(nans).tolist() == [0x7F] * 5


def test_e4m3_of_random_patterns():
    patterns = torch.randint(0, 1 << 32, (1 << 15,), dtype=torch.int64)
    values = floats_of(patterns)
    assert torch.equal(e4m3_of(values), nearest_e4m3(values))


@portable
def quantize_rows(
    values, bits_out, scales_out, GROUPS: tl.constexpr, ELEMENTS: tl.constexpr, POWERS_OF_TWO: tl.constexpr
):
    groups = tl.arange(0, GROUPS)
    where = groups[:, None] * ELEMENTS + tl.arange(0, ELEMENTS)[None, :]
    bits, scale_bits = quantize_tile(tl.load(values + where), POWERS_OF_TWO)
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
    constants = {"GROUPS": 32, "ELEMENTS": num_elements, "POWERS_OF_TWO": scale_format == "ue8m0"}
    quantize_rows.interpret((1,), rows, bits, scales, **constants)
    expected, expected_scales = quantize_groups(rows, scale_format)
    assert torch.equal(bits, expected.view(torch.uint8))
    if scale_format == "ue8m0":
        assert torch.equal((scales >> 23).to(torch.uint8), expected_scales)
        assert (scales & 0x7FFFFF == 0).all()
    else:
        assert torch.equal(scales, expected_scales.view(torch.int32))


# --- bf16 ---


@portable
def round_values(values, out, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + where, round_to(tl.load(values + where), DTYPE))


def rounded(values: torch.Tensor, dtype: torch.dtype, triton_dtype: Any) -> torch.Tensor:
    padded = padded_to_block(values)
    out = torch.zeros(padded.shape, dtype=dtype)
    round_values.interpret((padded.numel() // BLOCK,), padded, out, DTYPE=triton_dtype, BLOCK=BLOCK)
    return out[: values.numel()]


def same_or_both_nan(got: torch.Tensor, expected: torch.Tensor) -> bool:
    nan = expected.isnan()
    return torch.equal(got.isnan(), nan) and torch.equal(got[~nan].view(torch.int16), expected[~nan].view(torch.int16))


@pytest.mark.parametrize("lower_half", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_rounding_around_every_value(lower_half):
    """Every upper half with a lower half below, on and above the tie; carries go up to infinity; both signs."""
    values = floats_of((torch.arange(1 << 16) << 16) | lower_half)
    assert same_or_both_nan(rounded(values, torch.bfloat16, tl.bfloat16), values.to(torch.bfloat16))


def test_bf16_rounding_of_named_values():
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, float("inf"), -float("inf"), 1 + 2**-8, 1 + 3 * 2**-8, -0.0])
    expected = [float("inf"), -float("inf"), float("inf"), -float("inf"), 1.0, 1 + 2**-6, -0.0]
    got = rounded(values, torch.bfloat16, tl.bfloat16)
    assert got.tolist() == expected
    assert torch.signbit(got).tolist() == [False, True, False, True, False, False, True]
    nans = floats_of(torch.tensor([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF]))
    # rounding the last one as a number would give -0.0
    assert rounded(nans, torch.bfloat16, tl.bfloat16).isnan().all()


@pytest.mark.parametrize(("dtype", "triton_dtype"), [(torch.float16, tl.float16), (torch.float32, tl.float32)], ids=str)
def test_rounding_to_other_dtypes(dtype, triton_dtype):
    values = torch.cat([torch.randn(4096) * 10.0**power for power in (-6, -3, 0, 3)])
    assert torch.equal(rounded(values, dtype, triton_dtype), values.to(dtype))


# --- routing ---

EXPERTS_AND_WORLDS = [(60, 8), (3, 5), (1, 1), (8, 8), (256, 8), (7, 3), (100, 72), (1, 8)]


@portable
def owners_of(ids, out, NUM_EXPERTS: tl.constexpr, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(out + lanes, owner_of(tl.load(ids + lanes), NUM_EXPERTS, WORLD_SIZE))


@pytest.mark.parametrize(("num_experts", "world_size"), EXPERTS_AND_WORLDS)
def test_owners(num_experts, world_size):
    edge = [-1, -2, INT_MIN, INT_MIN + 1, INT_MAX, INT_MAX - 1, num_experts, num_experts + 1, -num_experts]
    ids = torch.tensor([*range(num_experts), *edge], dtype=torch.int32)
    ids = torch.cat([ids, torch.full((512 - len(ids),), -1, dtype=torch.int32)])
    out = torch.full((512,), 77, dtype=torch.int32)
    owners_of.interpret((1,), ids, out, NUM_EXPERTS=num_experts, WORLD_SIZE=world_size, LANES=512)
    assert torch.equal(out, owner_of_experts(ids, num_experts, world_size))
    assert (out[num_experts:] == -1).all()
    assert out[:num_experts].min() >= 0


@portable
def count(
    ids, first, last, out, TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr, WORLD_SIZE: tl.constexpr,
    WORLD_LANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    counts = count_rows(ids, first, last, TOPK, NUM_EXPERTS, WORLD_SIZE, WORLD_LANES, TOKENS)
    tl.store(out + tl.arange(0, WORLD_LANES), counts)


@portable
def record(
    routes, sent_ids, ids, first, last, start_rows, TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, WORLD_LANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    next_row = tl.load(start_rows + tl.arange(0, WORLD_LANES))
    record_routes(routes, sent_ids, ids, first, last, next_row, TOPK, NUM_EXPERTS, WORLD_SIZE, WORLD_LANES, TOKENS)


@portable
def count_in_bytes(
    ids, num_tokens, before_out, own_out, TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr, WORLD_SIZE: tl.constexpr,
    WORLD_LANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token, lanes = tl.program_id(0), tl.arange(0, WORLD_LANES)
    hits = destination_bytes(ids, num_tokens, TOPK, NUM_EXPERTS, WORLD_SIZE, TOKENS)
    before, own = byte_counts(hits, token, WORLD_SIZE, TOKENS)
    tl.store(before_out + token * WORLD_LANES + lanes, byte_of(before, lanes, WORLD_SIZE))
    tl.store(own_out + token * WORLD_LANES + lanes, byte_of(own, lanes, WORLD_SIZE))


ROUTES = [
    (*numbers, routing)
    for numbers in ((0, 2, 8, 4), (1, 1, 1, 1), (5, 3, 60, 8), (37, 8, 13, 3))
    for routing in ("uniform", "out_of_range", "repeated")
]


def shapes(topk: int, num_experts: int, world_size: int) -> dict[str, int]:
    lanes = 1 << (world_size - 1).bit_length()
    return {"TOPK": topk, "NUM_EXPERTS": num_experts, "WORLD_SIZE": world_size, "WORLD_LANES": lanes, "TOKENS": 8}


@pytest.mark.parametrize(("num_tokens", "topk", "num_experts", "world_size", "routing"), ROUTES)
def test_counts_and_routes_are_cumulative_sums_of_the_mask(num_tokens, topk, num_experts, world_size, routing):
    generator = torch.Generator().manual_seed(num_tokens)
    ids = ROUTINGS[routing](num_tokens, topk, num_experts, world_size, generator)
    mask = destination_mask(ids, num_experts, world_size)
    constants = shapes(topk, num_experts, world_size)
    lanes = constants["WORLD_LANES"]
    start_rows = torch.arange(lanes, dtype=torch.int32) * 100
    for first, last in {(0, num_tokens), (num_tokens // 3, num_tokens), (num_tokens // 3, num_tokens // 2)}:
        counts = torch.full((lanes,), 99, dtype=torch.int32)
        count.interpret((1,), ids, first, last, counts, **constants)
        assert counts.tolist() == mask[first:last].sum(0).tolist() + [0] * (lanes - world_size)
        routes = torch.full((num_tokens, world_size), 77, dtype=torch.int32)
        sent_ids = torch.full_like(ids, 77)
        record.interpret((1,), routes, sent_ids, ids, first, last, start_rows, **constants)
        rows = start_rows[:world_size] + mask[first:last].cumsum(0) - 1
        assert torch.equal(routes[first:last], torch.where(mask[first:last], rows, -1).to(torch.int32))
        assert torch.equal(sent_ids[first:last], ids[first:last])
        outside = torch.ones(num_tokens, dtype=torch.bool)
        outside[first:last] = False
        assert (routes[outside] == 77).all()
        assert (sent_ids[outside] == 77).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 37, 64])
@pytest.mark.parametrize(
    ("topk", "num_experts", "world_size"), [(2, 8, 4), (8, 13, 3), (1, 1, 1), (5, 40, 9), (3, 100, 72)]
)
def test_counts_in_bytes_are_the_same_counts(num_tokens, topk, num_experts, world_size):
    """A byte per rank, eight ranks to a word: also for worlds that fill several words, and for the token after all."""
    ids = ROUTINGS["out_of_range"](num_tokens, topk, num_experts, world_size, torch.Generator().manual_seed(5))
    mask = destination_mask(ids, num_experts, world_size).to(torch.int32)
    constants = shapes(topk, num_experts, world_size) | {"TOKENS": 64}
    lanes = constants["WORLD_LANES"]
    before, own = (torch.full((num_tokens + 1, lanes), 77, dtype=torch.int32) for _ in range(2))
    ids = ids if num_tokens else torch.zeros(1, topk, dtype=torch.int32)
    count_in_bytes.interpret((num_tokens + 1,), ids, num_tokens, before, own, **constants)
    nothing = torch.zeros(1, world_size, dtype=torch.int32)
    assert torch.equal(before[:, :world_size], torch.cat([nothing, mask.cumsum(0).to(torch.int32)]))
    assert torch.equal(own[:, :world_size], torch.cat([mask, nothing]))


@pytest.mark.parametrize("num_tokens", [FLAGGED_MAX_TOKENS, MAX_COUNTED_IN_BYTES])
@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (8, 7), (9, 8)])
def test_as_many_tokens_as_are_counted_in_bytes_fit_a_byte(num_tokens, world_size, rank):
    """All to one rank; rank 7 has the byte with the sign of its word."""
    ids = torch.full((num_tokens, 1), rank, dtype=torch.int32)
    constants = shapes(1, world_size, world_size) | {"TOKENS": padded(num_tokens)}
    before, own = (torch.zeros(num_tokens + 1, constants["WORLD_LANES"], dtype=torch.int32) for _ in range(2))
    count_in_bytes.interpret((num_tokens + 1,), ids, num_tokens, before, own, **constants)
    assert before[:, rank].tolist() == list(range(num_tokens + 1))
    assert own[:, rank].tolist() == [1] * num_tokens + [0]
    others = [lane for lane in range(world_size) if lane != rank]
    assert not before[:, others].any()
    assert not own[:, others].any()


# --- epochs and flags ---


def as_int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


@portable
def begin(table, out, STAGE: tl.constexpr):
    epoch, out_of_order = begin_stage(table, STAGE, 1)
    tl.store(out, epoch)
    tl.store(out + 1, (out_of_order != 0).to(tl.int32))


def table_of_one_rank(steps: list[int]) -> torch.Tensor:
    """An address table of one rank with its step counters behind it; no region has an address."""
    return torch.tensor([0] * len(Region) + steps, dtype=torch.int64)


def begun(steps: list[int], stage: int) -> list[int]:
    table, out = table_of_one_rank(steps), torch.full((2,), 77, dtype=torch.int32)
    before = table.clone()
    begin.interpret((1,), table, out, STAGE=stage)
    assert torch.equal(table, before)
    return out.tolist()


@pytest.mark.parametrize(
    ("done", "epoch"),
    [
        (0, 1), (1, 2), (2**31 - 2, 2**31 - 1), (2**31 - 1, 2**31), (2**31, 2**31 + 1), (2**32 - 2, 2**32 - 1),
        (2**32 - 1, 1), (2**32, 2), (2 * (2**32 - 1) - 1, 2**32 - 1), (2 * (2**32 - 1), 1), (2**47 - 1, 2**15),
    ],
)  # fmt: skip
def test_epochs_wrap_and_skip_zero(done, epoch):
    """By definition: steps are counted from 1 to 2**32 - 1 and again; arrivals in the lower bits do not matter."""
    assert epoch == done % (2**32 - 1) + 1
    for arrivals in (0, 1, 2**16 - 1):
        assert begun([done << 16 | arrivals] * 4, 0) == [as_int32(epoch), 0]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("position", range(4))
def test_a_stage_comes_after_those_before_it(stage, position):
    """`position` stages of step 6 are over: only the next one is in order, and all of a step have one epoch."""
    steps = [6 - (number >= position) << 16 for number in range(4)]
    epoch, out_of_order = begun(steps, stage)
    assert out_of_order == (stage != position)
    if stage == position:
        assert epoch == 6


@portable
def finish(table, out, STAGE: tl.constexpr):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, _ = begin_stage(table, STAGE, 1)
    tl.store(out + program, epoch)
    finish_stage(table, STAGE, program, num_programs, 1)


@pytest.mark.parametrize("num_programs", [1, 2, 3, 300])
@pytest.mark.parametrize("done", [0, 7, 2**31 - 1, 2**32 - 1])
def test_a_counter_moves_on_once_for_a_launch(num_programs, done):
    """Every program of a launch reads one epoch, however many have finished before it."""
    table, out = table_of_one_rank([done << 16] * 4), torch.zeros(num_programs, dtype=torch.int32)
    for launch in range(3):
        finish.interpret((num_programs,), table, out, STAGE=1)
        expected = as_int32((done + launch) % (2**32 - 1) + 1)
        assert out.tolist() == [expected] * num_programs
        steps = [done << 16, done + launch + 1 << 16, done << 16, done << 16]
        assert table[len(Region) :].tolist() == steps


@portable
def flag_words(payloads, epochs, words_out, payloads_out, epochs_out, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    words = flagged(tl.load(payloads + lanes), tl.load(epochs + lanes))
    tl.store(words_out + lanes, words)
    tl.store(payloads_out + lanes, payload_of(words))
    tl.store(epochs_out + lanes, epoch_of(words))


def test_flagged_words_carry_any_payload_and_any_epoch():
    values = [0, 1, 2, -1, INT_MIN, INT_MAX, 0x7FC00000, as_int32(0xFFC00000), as_int32(2**32 - 2)]
    pairs = torch.tensor([(a, b) for a in values for b in values] + [(0, 0)] * 47, dtype=torch.int32)
    payloads, epochs = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    words = torch.zeros(128, dtype=torch.int64)
    payloads_out, epochs_out = torch.full((2, 128), 77, dtype=torch.int32)
    flag_words.interpret((1,), payloads, epochs, words, payloads_out, epochs_out, LANES=128)
    assert torch.equal(payloads_out, payloads)
    assert torch.equal(epochs_out, epochs)
    assert len(set(words.tolist())) == len(set(map(tuple, pairs.tolist())))


@portable
def without_empty(values, out, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(out + lanes, never_empty(tl.load(values + lanes)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_only_the_nan_with_all_bits_set_is_replaced(dtype):
    kind = torch.int16 if dtype.itemsize == 2 else torch.int32
    patterns = torch.arange(-(2**15), 2**15).to(kind)
    patterns[0], patterns[1] = torch.iinfo(kind).min, torch.iinfo(kind).max
    out = torch.zeros_like(patterns)
    without_empty.interpret((1,), patterns, out, LANES=2**16)
    is_empty = patterns == -1
    assert torch.equal(out[~is_empty], patterns[~is_empty])
    assert (out != -1).all()
    assert out[is_empty].view(dtype).isnan().all()


@portable
def lateness(flags, epoch_word, out, PRESENT: tl.constexpr, LANES: tl.constexpr, ORDERS: tl.constexpr):
    lanes = tl.arange(0, LANES)
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
    out = torch.full((8,), 77, dtype=torch.int32)
    word = torch.tensor([as_int32(epoch)], dtype=torch.int32)
    untouched = flags.clone()
    # lanes 6 and 7 are not there: whatever lies behind the flags does not count
    lateness.interpret((1,), flags, word, out, PRESENT=6, LANES=8, ORDERS=orders)
    assert out.tolist() == [1, 0, 0, 1, 0, 1, 0, 0]
    assert torch.equal(flags, untouched)


@ORDERS
@pytest.mark.parametrize("epoch", [1, 2**30])
def test_a_flag_that_nobody_has_written_is_late(epoch, orders):
    flags, out = torch.zeros(8, dtype=torch.int32), torch.full((8,), 77, dtype=torch.int32)
    lateness.interpret((1,), flags, torch.tensor([epoch], dtype=torch.int32), out, PRESENT=3, LANES=8, ORDERS=orders)
    assert out.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


@portable
def post_and_wait(table, out, REGION: tl.constexpr, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr,
                  ORDERS: tl.constexpr):  # fmt: skip
    rank, epoch = tl.program_id(0), -5
    post_all(table, REGION, epoch, rank, WORLD_SIZE, LANES, ORDERS)
    if rank == WORLD_SIZE - 1:
        tl.store(out, wait_all(table, REGION, epoch, rank, WORLD_SIZE, LANES, ORDERS))


@ORDERS
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_a_post_reaches_every_peer_once(world_size, orders):
    """Each program is a rank that posts; the last one then finds all of them."""
    flags = torch.full((world_size, world_size + 1), -6, dtype=torch.int32)
    table = torch.zeros(len(Region) * world_size, dtype=torch.int64)
    for peer in range(world_size):
        table[Region.COMBINE_FLAGS * world_size + peer] = flags[peer].data_ptr()
    out = torch.full((1,), 77, dtype=torch.int32)
    post_and_wait.interpret(
        (world_size,), table, out, REGION=Region.COMBINE_FLAGS.value, WORLD_SIZE=world_size, LANES=padded(world_size),
        ORDERS=orders,
    )  # fmt: skip
    assert out.tolist() == [0]
    assert (flags[:, :world_size] == -5).all()
    # no word but those of the ranks
    assert (flags[:, world_size] == -6).all()


# --- what interpreting leaves behind ---


@portable
def double(values, LANES: tl.constexpr):
    where = values + tl.arange(0, LANES)
    tl.store(where, tl.load(where) * 2)


@portable
def fails(values, LANES: tl.constexpr):
    where = values + tl.arange(0, LANES)
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
    values = torch.arange(16, dtype=torch.int32)
    double.interpret((2,), values, LANES=16)
    # programs run one after another, on the caller's own memory
    assert torch.equal(values, torch.arange(16, dtype=torch.int32) * 4)


@pytest.mark.usefixtures("_triton_stays_as_it_is")
def test_a_kernel_that_raises_leaves_triton_as_it_was():
    values = torch.arange(16, dtype=torch.int32)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="NotImplementedError"):
        fails.interpret((1,), values, LANES=16)
    with pytest.raises(TypeError):
        double.interpret((1,), values)
    double.interpret((1,), values, LANES=16)
    assert values.tolist() == [2 * value for value in range(16)]


@pytest.mark.usefixtures("_triton_stays_as_it_is")
def test_kernels_of_others_stay_compiled_ones():
    double.interpret((1,), torch.zeros(16, dtype=torch.int32), LANES=16)
    assert type(an_engines_kernel) is JITFunction
    assert type(triton.jit(an_engines_kernel.fn)) is JITFunction
    assert isinstance(double, JITFunction)
