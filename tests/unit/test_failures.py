"""The error record in words: every code becomes its class, and names the ranks."""

import itertools
import pickle
import re

import pytest

from ep_a2a import errors
from ep_a2a.errors import ConfigMismatchError, EpA2AError, RankTimeoutError, ShapeError, without_section
from ep_a2a.kernels import primitives
from ep_a2a.kernels.layout import RECORD_HEADER_WORDS, FailureCode
from ep_a2a.memory.verdict import Verdict
from ep_a2a.ops.failures import Failure
from ep_a2a.ops.memory import Timeouts
from ep_a2a.ops.wire_word import describe_wire_word, tag_mask, tag_of, tagged, wire_word
from tests.cases.tables import read_table

DISPATCH, COMBINE = 1, 2
TIMEOUT, ALTERNATION, MISMATCH, CAPACITY, FOREIGN, WEIGHTS = 1, 2, 3, 4, 5, 6
CODE_NAMES = ("TIMEOUT", "ALTERNATION", "STEP_TOKENS_MISMATCH", "CAPACITY", "FOREIGN_INDICES", "WEIGHTS_MISSING")
NOBODY = 0xFFFF
VERDICT = Verdict(missing=(2,))
M = 16
STRIDES = (
    wire_word(16, True, False),
    wire_word(15, True, False),
    wire_word(16, False, True),
    wire_word(16, True, True, True),
)
TAGGED = tuple(tagged(word, tag, M) for word, tag in zip(STRIDES, (0, 3, 3, 60)))


def failure(
    code: int, accused: int, phase: int, detail: int = 0, per_rank: tuple[int, ...] = (0, 0, 0, 0), epoch: int = 7
) -> Failure:
    return Failure(code, accused, phase, epoch, detail, per_rank)


def error_of(failed: Failure) -> EpA2AError:
    return failed.exception(rank=1, timeouts=Timeouts(2.5, 40.0), verdict=VERDICT, max_tokens=M)


def test_codes_are_those_of_the_kernels():
    values = [FailureCode[name] for name in CODE_NAMES]
    assert values == [TIMEOUT, ALTERNATION, MISMATCH, CAPACITY, FOREIGN, WEIGHTS]
    assert primitives.NOBODY.value == NOBODY


def test_what_another_rank_has_not_told_is_not_made_up():
    for code in (CAPACITY, FOREIGN):
        text = str(error_of(Failure(code, 3)))
        assert "a call on another rank, which reported it to rank 1" in text
        assert not any(f"{word} 0" in text or f"0 {word}" in text for word in ("token", "rows"))


def test_the_record_is_read_word_by_word():
    header = [TIMEOUT, 3, COMBINE, -5, 11, 91, 92, 93]
    assert len(header) == RECORD_HEADER_WORDS
    assert Failure.from_record([*header, 0, 1, 0, 1, 77], 4) == Failure(TIMEOUT, 3, COMBINE, -5, 11, (0, 1, 0, 1))


CODES = dict(zip(CODE_NAMES, (TIMEOUT, ALTERNATION, MISMATCH, CAPACITY, FOREIGN, WEIGHTS)))


def failure_of(code: str, per_rank: str | tuple[int, ...] = (0, 0, 0, 0), **fields: int) -> Failure:
    """A row's failure; `per_rank` may be the name of wire words, of which rank 1's is this rank's."""
    if "of_peer" in fields:
        return Failure(CODES[code], fields["of_peer"])
    if isinstance(per_rank, str):
        per_rank = {"strides": STRIDES, "tagged": TAGGED}[per_rank]
        fields["detail"] = per_rank[1]
    return failure(CODES[code], per_rank=per_rank, **fields)


CASES = {
    name: (failure_of(**fields), getattr(errors, kind), words)
    for name, (fields, kind, words) in read_table("failures").items()
}


@pytest.mark.parametrize("name", CASES)
def test_class_and_words(name):
    failed, kind, words = CASES[name]
    error = error_of(failed)
    assert type(error) is kind
    assert [word for word in words if word not in str(error)] == []
    summary = f"expected {error.expected}; got {error.got}. {error.remedy}"
    assert str(error) == f"{summary}\nSee docs/errors.md#{kind.__name__.lower()}."


def test_the_section_is_named_once():
    inner = ShapeError("[4, 8]", "[4]")
    for error in (
        ConfigMismatchError("every rank to build the op", f"rank 1 failed with {inner}", "Mend it there."),
        pickle.loads(pickle.dumps(RankTimeoutError("rank 1", str(inner), missing_ranks=(1,)))),
        type("Extended", (ShapeError,), {})("a", "b"),
    ):
        kind = next(each for each in type(error).__mro__ if each.__module__ == "ep_a2a.errors")
        assert error.section == f"docs/errors.md#{kind.__name__.lower()}"
        assert str(error).endswith(f"\nSee {error.section}.")
        assert str(error).count("errors.md#") == 1
        assert "errors.md#" not in error.remedy + error.got
        assert without_section(str(error)) == f"expected {error.expected}; got {error.got}. {error.remedy}"


def test_every_code_has_a_case():
    assert {failed.code for failed, _, _ in CASES.values()} == set(CODES.values())


@pytest.mark.parametrize("accused", [0, 1, 2, 3, NOBODY])
def test_a_timeout_names_whom_the_verdict_names(accused):
    """The kernel's accused rank is a hint: it may be waiting itself, and may even be this one."""
    error = error_of(failure(TIMEOUT, accused, COMBINE, per_rank=(1, 0, 0, 0)))
    assert (error.missing_ranks, error.late_ranks) == ((2,), ())
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (RankTimeoutError, str(error))
    assert (again.missing_ranks, again.late_ranks) == ((2,), ())


def test_a_timeout_that_names_nobody_says_what_to_do():
    error = failure(TIMEOUT, NOBODY, DISPATCH).exception(1, Timeouts.same(1.0), max_tokens=M)
    assert "no rank is gone or late" in str(error)
    assert "named ranks" not in error.remedy
    assert "EP_A2A_TIMEOUT_SECS" in error.remedy
    assert "op.reset()" in error.remedy


def test_a_kernel_lacks_the_source_of_a_row_whose_flags_have_come():
    assert failure(TIMEOUT, 2, DISPATCH).awaited(1) == (2,)
    assert failure(TIMEOUT, 1, DISPATCH, per_rank=(0, 1, 0, 1)).awaited(1) == (3,)
    assert failure(TIMEOUT, NOBODY, DISPATCH).awaited(1) == ()


def test_a_timeout_tells_where_flags_stand():
    behind, come = {"counts": (7, 7, 7, 6), "flags": (7, 6, 6, 6)}, {"flags": (7, 7, 7, 7)}
    for rank, accused, late, seen, said, begun in (
        (0, 3, (0, 1, 1, 1), behind, "7 wanted: counts at 7 from ranks [0, 1, 2] and 6 from ranks [3], flags at 6", []),
        # a rank whose flags have come owes rows
        (0, 3, (0, 0, 0, 0), come, "flags at 7 from ranks [0, 1, 2, 3]; rank 3 has begun this call by now", ["3"]),
        # a peer's poison may accuse the rank that reads
        (1, 1, (0, 0, 0, 0), come, "flags at 7", []),
    ):
        failed = failure(TIMEOUT, accused, DISPATCH, per_rank=late)
        again = pickle.loads(pickle.dumps(failed.exception(rank, Timeouts.same(1.0), seen, VERDICT, max_tokens=M)))
        assert said in str(again)
        assert re.findall(r"rank (\d) has begun", str(again)) == begun
        assert (again.wanted, again.seen, again.missing_ranks) == (7, seen, (2,))


def test_epochs_beyond_2_to_31_are_shown_unsigned():
    failed = Failure.from_record([TIMEOUT, 0, DISPATCH, -(2**31) + 1, 0, 0, 0, 0, 1], 1)
    assert f"dispatch {2**31 + 1} on rank 0" in str(failed.exception(0, Timeouts.same(1.0), max_tokens=M))


@pytest.mark.parametrize("step_tokens", [1, 15, 4096, (1 << 24) - 1])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_wire_words_say_what_they_are_made_of(step_tokens, has_weights, has_scales, cast):
    weights, scales = "weights" if has_weights else "no weights", "scales" if has_scales else "no scales"
    casts = "cast inside dispatch" if cast else "not cast inside dispatch"
    untagged = wire_word(step_tokens, has_weights, has_scales, cast)
    for tag in (0, 1, 15):
        word = tagged(untagged, tag, step_tokens)
        # it is compared as an int32 and must not be the 0 of memory that nobody has written
        assert 0 < word < 2**31
        assert tag_of(word, step_tokens) == tag
        described = describe_wire_word(word, step_tokens)
        assert described == f"step_tokens {step_tokens} with {weights}, {scales}, {casts}"


def test_wire_words_differ_where_anything_does():
    flags = list(itertools.product((False, True), repeat=3))
    words = {wire_word(tokens, *each) for tokens in (1, 2, 3, 1 << 23) for each in flags}
    assert len({tagged(word, tag, 1 << 23) for word in words for tag in range(16)}) == 32 * 16


@pytest.mark.parametrize(("max_tokens", "num_bits"), [(1, 27), (4095, 16), (4096, 15), (8192, 14), ((1 << 24) - 1, 4)])
def test_as_many_tags_as_bits_are_free(max_tokens, num_bits):
    assert tag_mask(max_tokens) == 2**num_bits - 1
    word = wire_word(max_tokens, True, True, True)
    assert len({tagged(word, tag, max_tokens) for tag in range(-8, 2 ** min(num_bits, 10) - 8)}) == 2 ** min(
        num_bits, 10
    )
    assert tagged(word, 5 + 2**num_bits, max_tokens) == tagged(word, 5, max_tokens)
    assert 0 < tagged(word, -1, max_tokens) < 2**31
