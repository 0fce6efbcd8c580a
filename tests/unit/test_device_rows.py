"""Device helpers that number a dispatch's rows and wait for flagged ones, in Triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton.language as tl

from ep_a2a.kernels import constants
from ep_a2a.kernels.constants import ExpertPlacement, LowLatencyDispatch, Shape
from ep_a2a.kernels.layout import Region, Stage
from ep_a2a.kernels.ll_receive_kernels import ArrivingRow, judge_beside, judge_row, read_beside, take_row_block
from ep_a2a.kernels.portable import portable
from ep_a2a.kernels.primitives import STEP_SHIFT, pause
from ep_a2a.kernels.receive_kernels import DispatchStep
from ep_a2a.kernels.routing_kernels import (
    count_rows,
    field_of,
    fields_before,
    fields_of_token,
    fields_of_tokens,
    packed,
    plus,
    rows_of_programs_before,
)
from ep_a2a.kernels.send_kernels import rows_of
from ep_a2a.routing import ROUTINGS, destination_mask
from tests.markers import first_is_quick
from tests.unit.device import EMPTY, as_int32, shape_of, table_of, untouched

WRITTEN_IN_FULL = -(2**31)
EPOCHS = [1, 2, 2**31 - 1, 2**31, 2**32 - 1]


def word(payload: int, epoch: int) -> int:
    """A flagged word as int64."""
    bits = (epoch % 2**32) << 32 | payload % 2**32
    return bits - 2**64 if bits >= 2**63 else bits


def before(epoch: int) -> int:
    """The epoch of the step before; 0 is skipped."""
    return 2**32 - 1 if epoch == 1 else epoch - 1


# --- words beside a flagged row ---

SCALE_WORDS, TOPK = 3, 2
SIDE_WORDS = SCALE_WORDS + 2 * TOPK + 1
SIDE_LANES = 16
POSITION = SIDE_WORDS - 1
ALL_SENT = list(range(SIDE_WORDS))
# without scales and weights ids and the position are left
FEW_SENT = [*range(SCALE_WORDS, SCALE_WORDS + TOPK), POSITION]
ROW_WORDS, WORD_LANES = 6, 8


@portable
def look(rows, sides, count_word, epoch_word, sent_lanes, out, side_out, index, ALWAYS_FLAGGED: tl.constexpr):
    sides_at, words_at = tl.arange(0, SIDE_LANES), tl.arange(0, WORD_LANES)
    sent = tl.load(sent_lanes + sides_at) != 0
    side = read_beside(sides, count_word, sides_at, sent, SIDE_WORDS)
    words = tl.load(rows + words_at, mask=words_at < ROW_WORDS, other=0, volatile=True)
    num_late_sides, no_row = judge_beside(side, tl.load(epoch_word), index, sides_at, sent, SIDE_WORDS)
    tl.store(out, num_late_sides)
    tl.store(out + 1, (no_row != 0).to(tl.int32))
    tl.store(out + 2, judge_row(words, side, sides_at, num_late_sides, SIDE_WORDS, ALWAYS_FLAGGED))
    tl.store(side_out + sides_at, side)


class Row:
    """A flagged row of one epoch that has arrived, and what is beside it: words to be spoilt one by one."""

    def __init__(self, epoch: int, sent: list[int], *, cast: bool, count: int | None = None) -> None:
        self.epoch, self.sent, self.cast = epoch, sent, cast
        # no byte of a cast row is 0xFF; of other rows no word is EMPTY
        self.words = [0x7E7E7E7E, 0, as_int32(0xFEFEFEFE), 0x00010203, as_int32(0x80808080), 0x7F7F7F00]
        self.sides = [word(10 + at if at in sent else -1, epoch if at in sent else 0) for at in range(SIDE_WORDS)]
        # which is not of this row: were it taken for the count, there would be no row
        self.behind = word(0, epoch)
        self.count = 0 if count is None else word(count, epoch)

    def look(self, index: int = 3) -> tuple[int, bool, int]:
        """(words late beside the row, whether there is no such row, words of the row that are late)."""
        sent = torch.tensor([at in self.sent for at in range(SIDE_LANES)], dtype=torch.int32)
        sides = torch.tensor([*self.sides, *[self.behind] * (SIDE_LANES - SIDE_WORDS)], dtype=torch.int64)
        # behind the row lies EMPTY, which no longer counts
        rows = torch.tensor([*self.words, *[EMPTY] * (WORD_LANES - ROW_WORDS)], dtype=torch.int32)
        count = torch.tensor([self.count], dtype=torch.int64)
        out, seen = untouched(3), torch.full((SIDE_LANES,), 77, dtype=torch.int64)
        epoch = torch.tensor([as_int32(self.epoch)], dtype=torch.int32)
        look.interpret((1,), rows, sides, count, epoch, sent, out, seen, index, ALWAYS_FLAGGED=self.cast)
        # what is not sent is not looked at, but for the count, which has the lane behind the words
        expected = [self.sides[at] if at in self.sent else 0 for at in range(SIDE_WORDS)] + [self.count]
        assert seen.tolist() == expected + [0] * (SIDE_LANES - SIDE_WORDS - 1)
        num_late_sides, no_row, num_late = out.tolist()
        return num_late_sides, bool(no_row), num_late


CASES = pytest.mark.parametrize(
    ("epoch", "sent", "cast"),
    [(epoch, sent, cast) for epoch in EPOCHS for sent in (ALL_SENT, FEW_SENT) for cast in (False, True)],
)


@CASES
def test_a_row_is_complete_when_nothing_of_it_is_missing(epoch, sent, cast):
    """Whether the source's count is there or not."""
    assert Row(epoch, sent, cast=cast).look() == (0, False, 0)
    assert Row(epoch, sent, cast=cast, count=4).look() == (0, False, 0)


@CASES
def test_every_word_beside_a_row_counts_if_it_is_sent(epoch, sent, cast):
    for at in range(SIDE_WORDS):
        for old in (0, before(epoch), 2**31 ^ epoch):
            row = Row(epoch, sent, cast=cast)
            row.sides[at] = word(5, old)
            assert row.look() == (int(at in sent), False, 0)
    row = Row(epoch, sent, cast=cast)
    row.sides = [word(5, before(epoch))] * SIDE_WORDS
    assert row.look() == (len(sent), False, 0)


@CASES
def test_every_word_of_a_row_counts(epoch, sent, cast):
    for at in range(ROW_WORDS):
        row = Row(epoch, sent, cast=cast, count=7)
        row.words[at] = EMPTY
        assert row.look() == (0, False, 1)
    row = Row(epoch, sent, cast=cast)
    row.words = [EMPTY] * ROW_WORDS
    assert row.look() == (0, False, ROW_WORDS)


def test_a_word_of_a_cast_row_waits_for_each_of_its_bytes():
    """By definition: a byte is missing when it is 0xFF. Words of other rows are missing as a whole."""
    rng = random.Random(3)
    edge = [0x00, 0x01, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF]
    for _ in range(60):
        words = [[rng.choice(edge) for _ in range(4)] for _ in range(ROW_WORDS)]
        for cast in (False, True):
            row = Row(9, ALL_SENT, cast=cast)
            row.words = [as_int32(int.from_bytes(bytes(each), "little")) for each in words]
            missing = [any(byte == 0xFF for byte in each) if cast else each == [0xFF] * 4 for each in words]
            assert row.look() == (0, False, sum(missing))


@CASES
def test_there_is_no_such_row_when_the_count_of_this_epoch_says_so(epoch, sent, cast):
    for count, index in ((0, 0), (3, 3), (3, 4), (1, 2**20), (4, 3), (1, 0), (2**20, 2**20 - 1)):
        row = Row(epoch, sent, cast=cast, count=count)
        row.sides = [word(5, before(epoch))] * SIDE_WORDS
        row.words = [EMPTY] * ROW_WORDS
        assert row.look(index) == (len(sent), index >= count, ROW_WORDS)


@CASES
def test_the_count_of_another_epoch_says_nothing(epoch, sent, cast):
    """It may be larger or smaller than this epoch's; fresh memory holds 0."""
    for old in (0, before(epoch), 2**31 ^ epoch):
        for count in (0, 3, 4):
            row = Row(epoch, sent, cast=cast)
            row.count = word(count, old)
            assert row.look(3) == (0, False, 0)
            row.sides[POSITION] = word(5, before(epoch))
            assert row.look(3) == (1, False, 0)


@pytest.mark.parametrize("epoch", EPOCHS)
@pytest.mark.parametrize("sent", [ALL_SENT, FEW_SENT])
def test_a_position_with_the_highest_bit_announces_a_row_that_contains_empty(epoch, sent):
    row = Row(epoch, sent, cast=False)
    row.words = [EMPTY, 1, EMPTY, 2, 3, EMPTY]
    assert row.look() == (0, False, 3)
    row.sides[POSITION] = word(WRITTEN_IN_FULL | 17, epoch)
    assert row.look() == (0, False, 0)
    # as long as anything else beside the row is missing, it is not complete
    for at in sent[:-1]:
        late = Row(epoch, sent, cast=False)
        late.words, late.sides[POSITION] = row.words, row.sides[POSITION]
        late.sides[at] = word(5, before(epoch))
        assert late.look() == (1, False, 3)
    # the bit of a step that is over says nothing
    row.sides[POSITION] = word(WRITTEN_IN_FULL | 17, before(epoch))
    assert row.look() == (1, False, 3)


# --- waiting for a row ---

RANK, SOURCE, WORLD = 1, 2, 3
POISON_WORD = 4 << 16 | 2


@portable
def take(step, row, sent_lanes, words_out, side_out, out, ROW: tl.constexpr, SPARSE_POLLS: tl.constexpr):
    sides_at, words_at = tl.arange(0, SIDE_LANES), tl.arange(0, WORD_LANES)
    sent = tl.load(sent_lanes + sides_at) != 0
    low_latency = LowLatencyDispatch(1, 1, 8, SIDE_WORDS - 1, True, 1, SIDE_LANES, SPARSE_POLLS)
    shape = Shape(WORLD, WORLD, 0, 1, False)
    words, side, exists, poison = take_row_block(step, row, words_at, sides_at, sent, shape, ROW, low_latency)
    tl.store(words_out + words_at, words)
    tl.store(side_out + sides_at, side)
    tl.store(out, exists.to(tl.int32))
    tl.store(out + 1, poison)


class Arrival:
    """A row that arrives while it is waited for: one word at each pause between two looks."""

    def __init__(self, final: Row, *, late_row: bool = True) -> None:
        old = before(final.epoch)
        self.final = final
        self.rows = torch.full((WORD_LANES,), EMPTY, dtype=torch.int32)
        self.sides = torch.tensor([word(5, old)] * SIDE_WORDS + [final.behind], dtype=torch.int64)
        self.count = torch.tensor([word(0, old)], dtype=torch.int64)
        if not late_row:
            self.rows[:ROW_WORDS] = torch.tensor(final.words)
        self.poison, self.limit = torch.zeros(1, dtype=torch.int32), torch.tensor([10**15] * 2)
        self.num_ended = 0
        self.pending: list[tuple[str, int]] = []

    def arrive(self, kind: str, at: int) -> None:
        memory, values = {
            "row": (self.rows, self.final.words),
            "side": (self.sides, self.final.sides),
            "count": (self.count, [self.final.count]),
            "poison": (self.poison, [POISON_WORD]),
            "byte": (self.rows.view(torch.uint8), torch.tensor(self.final.words, dtype=torch.int32).view(torch.uint8)),
            "nothing": (torch.empty(1), [0]),
        }[kind]
        memory[at] = values[at]

    def wait(self, monkeypatch: pytest.MonkeyPatch, order: list[tuple[str, int]], index: int = 3, *, sparse: bool):
        """(row or None when there is none, words beside it, poison word); `pending` is what has not arrived then."""
        self.pending = list(order)

        def next_word(_: object) -> None:
            assert self.pending, "waits for more than there is"
            self.arrive(*self.pending.pop(0))

        monkeypatch.setitem(pause.__dict__, "python", next_word)
        row = self.final
        sent = torch.tensor([at in row.sent for at in range(SIDE_LANES)], dtype=torch.int32)
        words, sides = torch.zeros(WORD_LANES, dtype=torch.int32), torch.zeros(SIDE_LANES, dtype=torch.int64)
        out = untouched(2)
        table = table_of(WORLD, {(Region.POISON, RANK): self.poison, (Region.LIMITS, RANK): self.limit})
        table[len(Region) * WORLD + Stage.COMBINE_RECEIVE] = self.num_ended << STEP_SHIFT.value
        step = DispatchStep(table, RANK, as_int32(row.epoch), *[0] * 8, 1)
        arriving = ArrivingRow(self.rows, self.sides, self.count, SOURCE, index, 0)
        row_block = constants.Row(ROW_WORDS, WORD_LANES, row.cast, 1, 1, False, False)
        take.interpret((1,), step, arriving, sent, words, sides, out, ROW=row_block, SPARSE_POLLS=sparse)
        exists, poison = out.tolist()
        return words[:ROW_WORDS].tolist() if exists else None, sides[:SIDE_WORDS].tolist(), poison


def check_taken(arrival: Arrival, taken: Any) -> None:
    """All of the row was there when it was taken, and what was taken is the row."""
    words, sides, poison = taken
    final = arrival.final
    assert poison == 0
    assert words == final.words
    assert [sides[at] for at in final.sent] == [final.sides[at] for at in final.sent]
    # nothing was taken before it came
    assert {kind for kind, _ in arrival.pending} <= {"count"}


SPARSE = pytest.mark.parametrize("sparse", [False, True], ids=["all at once", "sparse"])
CAST = pytest.mark.parametrize("cast", [False, True], ids=["words", "bytes"])
ORDERS = {
    "row first": lambda row, side, count: [*row, *side, *count],
    "beside first": lambda row, side, count: [*side, *row, *count],
    "count first": lambda row, side, count: [*count, *side, *row],
    "in turn": lambda row, side, count: (
        [each for pair in zip(row, side) for each in pair] + row[len(side) :] + side[len(row) :] + count
    ),
}


def shuffled(seed: int) -> Any:
    def order(row: list[Any], side: list[Any], count: list[Any]) -> list[Any]:
        words = [*row, *side, *count]
        random.Random(seed).shuffle(words)
        return words

    return order


@SPARSE
@CAST
@pytest.mark.parametrize("order", [*ORDERS, *range(12)])
def test_a_row_is_taken_when_its_last_word_has_come(monkeypatch, order, cast, sparse):
    sent = FEW_SENT if order in (1, 3, 5) else ALL_SENT
    arrival = Arrival(Row(2**31, sent, cast=cast, count=4))
    row = [("byte", at) for at in range(ROW_WORDS * 4)] if cast else [("row", at) for at in range(ROW_WORDS)]
    # the side that is not sent, and whatever lies behind, never comes
    words = (ORDERS.get(order) or shuffled(order))(row, [("side", at) for at in sent], [("count", 0)])
    check_taken(arrival, arrival.wait(monkeypatch, words, sparse=sparse))


@SPARSE
@CAST
def test_a_row_that_is_there_is_taken_at_the_first_look(monkeypatch, cast, sparse):
    arrival = Arrival(Row(7, ALL_SENT, cast=cast), late_row=False)
    for at in ALL_SENT:
        arrival.arrive("side", at)
    check_taken(arrival, arrival.wait(monkeypatch, [], sparse=sparse))


@SPARSE
@pytest.mark.parametrize("seed", range(8))
def test_a_row_written_in_full_is_taken_with_its_empty_words(monkeypatch, seed, sparse):
    """The sender releases its position behind the row; other words beside it come at any time."""
    final = Row(2**32 - 1, ALL_SENT, cast=False, count=9)
    final.words = [EMPTY, 5, EMPTY, EMPTY, -2, 0]
    final.sides[POSITION] = word(WRITTEN_IN_FULL | 17, final.epoch)
    arrival = Arrival(final)
    row = [("row", at) for at in range(ROW_WORDS)]
    others = [("side", at) for at in ALL_SENT if at != POSITION]
    words = shuffled(seed)(row, others, [("count", 0)])
    last = max(place for place, (kind, _) in enumerate(words) if kind == "row")
    words.insert(random.Random(seed).randint(last + 1, len(words)), ("side", POSITION))
    check_taken(arrival, arrival.wait(monkeypatch, words, sparse=sparse))


@SPARSE
@CAST
@pytest.mark.parametrize(("count", "index"), [(0, 0), (3, 3), (3, 100)])
@pytest.mark.parametrize("pauses", [0, 1, 5])
def test_a_row_that_does_not_exist_is_given_up_with_the_count(monkeypatch, pauses, count, index, cast, sparse):
    arrival = Arrival(Row(5, ALL_SENT, cast=cast, count=count))
    if pauses == 0:
        arrival.arrive("count", 0)
    order = [("nothing", 0)] * (pauses - 1) + [("count", 0)] * (pauses > 0)
    words, _, poison = arrival.wait(monkeypatch, order, index, sparse=sparse)
    assert (words, poison, arrival.pending) == (None, 0, [])


@SPARSE
@pytest.mark.parametrize("index", [0, 3])
def test_a_wait_ends_with_the_poison_of_another_rank(monkeypatch, index, sparse):
    """It looks at the poison word once in POLLS_PER_CLOCK polls, and then keeps what it finds."""
    arrival = Arrival(Row(5, ALL_SENT, cast=True, count=4))
    order = [("count", 0), ("poison", 0), *[("nothing", 0)] * 30]
    _, _, poison = arrival.wait(monkeypatch, order, index, sparse=sparse)
    assert (poison, arrival.pending) == (POISON_WORD, [])
    assert arrival.poison.tolist() == [POISON_WORD]


@pytest.mark.parametrize("num_ended", [0, 1, 2**32], ids=["first step", "second step", "later"])
@SPARSE
def test_a_wait_that_takes_too_long_accuses_the_rows_source(monkeypatch, sparse, num_ended):
    arrival = Arrival(Row(5, ALL_SENT, cast=False, count=4))
    arrival.num_ended = num_ended
    # the bound of the first step, or that of all others
    arrival.limit[int(num_ended == 0)] = -1
    # the first look at the clock finds that time is up and says so; the next one finds what has been said
    _, _, poison = arrival.wait(monkeypatch, [("nothing", 0)] * 64, sparse=sparse)
    assert poison == 1 << 16 | SOURCE
    assert arrival.poison.tolist() == [poison]


# --- row numbers ---

NUM_PROGRAMS = 3
ROW_STRIDE = 100


@portable
def find_rows(
    ids,
    table,
    first_rows,
    row_limit,
    rank,
    num_tokens,
    out,
    SHAPE: tl.constexpr,
    OWNERS: tl.constexpr,
    BITS: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    world_size: tl.constexpr = SHAPE.WORLD_SIZE
    ranks, at = tl.arange(0, SHAPE.WORLD_LANES), tl.arange(0, SHAPE.TOPK_LANES)
    chunk = (num_tokens + num_programs - 1) // num_programs
    first = tl.minimum(program * chunk, num_tokens)
    last = tl.minimum(first + chunk, num_tokens)
    starts = ()
    for step in tl.static_range(world_size):
        starts = starts + (tl.load(first_rows + (rank + step) % world_size),)  # noqa: RUF005
    alone = count_rows(ids, 0, first, SHAPE, OWNERS, 8, BITS)
    own_counts = field_of(count_rows(ids, first, last, SHAPE, OWNERS, 8, BITS), ranks, world_size, BITS)
    before_it = rows_of_programs_before(table, 9, own_counts, program, rank, world_size, SHAPE.WORLD_LANES, 1)
    told = packed(before_it, world_size, SHAPE.WORLD_LANES, BITS)
    going = fields_of_tokens(ids, num_tokens, SHAPE, OWNERS, 64, BITS)
    for token in range(first, last):
        token_ids = tl.load(ids + token * SHAPE.TOPK + at, mask=at < SHAPE.TOPK, other=-1)
        own = fields_of_token(token_ids, OWNERS, world_size, BITS)
        few = fields_before(going, token, world_size, 64, BITS)
        for way, counted in enumerate((alone, told, few)):
            rows = rows_of(counted, own, starts, row_limit, rank, world_size, BITS)
            for step in tl.static_range(world_size):
                tl.store(out + (way * num_tokens + token) * world_size + step, rows[step])
        alone = plus(alone, own, world_size, BITS)
        told = plus(told, own, world_size, BITS)


def found_rows(
    ids: torch.Tensor, first_rows: torch.Tensor, row_limit: int, rank: int, num_tokens: int, num_experts: int, bits: int
) -> torch.Tensor:
    """[way, token, rank]: of counts over all ids, of counts told by programs before, and of a flagged dispatch."""
    topk, world_size = ids.shape[1], len(first_rows)
    chunk_counts = torch.zeros(NUM_PROGRAMS, world_size, dtype=torch.int64)
    table = table_of(world_size, {(Region.CHUNK_COUNTS, rank): chunk_counts})
    out, owners = untouched(3, num_tokens, world_size), ExpertPlacement(num_experts, world_size)
    form = {"SHAPE": shape_of(world_size, topk), "OWNERS": owners, "BITS": bits}
    find_rows.interpret((NUM_PROGRAMS,), ids, table, first_rows, row_limit, rank, num_tokens, out, **form)
    return out


@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "world_size", "bits"),
    [
        (0, 2, 8, 4, 8),
        (1, 1, 1, 1, 8),
        (37, 8, 13, 3, 8),
        (37, 8, 13, 3, 16),
        (13, 5, 40, 8, 8),
        (7, 5, 40, 8, 16),
        (7, 2, 40, 8, 32),
        (9, 5, 40, 9, 8),
        (5, 3, 100, 17, 16),
        (1, 3, 100, 72, 8),
    ],
)
@pytest.mark.parametrize("routing", first_is_quick((name, name) for name in ("repeated", "uniform", "out_of_range")))
def test_rows_do_not_depend_on_how_they_are_counted(num_tokens, topk, num_experts, world_size, bits, routing):
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
        for found in found_rows(ids, first_rows, row_limit, rank, num_tokens, num_experts, bits):
            assert found.tolist() == expected.tolist()


def test_the_row_limit_is_the_first_row_that_does_not_exist():
    """All tokens to one rank: the limit's place among them, whichever program has it."""
    ids, first_rows = torch.ones(10, 1, dtype=torch.int32), torch.tensor([0, 7], dtype=torch.int32)
    for row_limit in range(6, 19):
        expected = [[7 + token if 7 + token < row_limit else -1, -1] for token in range(10)]
        for found in found_rows(ids, first_rows, row_limit, 1, 10, 2, 8):
            assert found.tolist() == expected
