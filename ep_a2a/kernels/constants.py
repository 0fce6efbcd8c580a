"""Compile-time arguments of kernels, in named tuples: one tuple is one parameter of a kernel.

A kernel annotates such a parameter with `tl.constexpr`, and every field is a `tl.constexpr`, too: Triton 3.6 refuses
plain numbers in `tl.static_range`. `constants` makes such a tuple. Tuples do not nest: Triton 3.6 cannot pass an inner
one on to a helper.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import triton.language as tl

Tuple = TypeVar("Tuple", bound=tuple[Any, ...])


class Shape(NamedTuple):
    """Of an op; the same on all ranks.

    WORLD_SIZE: ranks. TOPK: experts of a token. Their LANES: the next powers of two. COMPACT: whether received rows
    follow each other; else every source has as many rows.
    """

    WORLD_SIZE: tl.constexpr
    WORLD_LANES: tl.constexpr
    TOPK: tl.constexpr
    TOPK_LANES: tl.constexpr
    COMPACT: tl.constexpr


class ExpertPlacement(NamedTuple):
    """Which rank owns an expert: linear ownership.

    NUM_EXPERTS: of all ranks. NUM_OWNERS: ranks that own them. FIRST_OWNER: the first of those ranks that is a peer;
    ids of ranks before it are dropped slots. RANKS_PER_PEER: 1, or the ranks of a node where peers are nodes.
    """

    NUM_EXPERTS: tl.constexpr
    NUM_OWNERS: tl.constexpr
    FIRST_OWNER: tl.constexpr
    RANKS_PER_PEER: tl.constexpr


class Form(NamedTuple):
    """What a launch does.

    SEND, RECEIVE: stages. HAS_WEIGHTS: weights travel. DEPENDENT_LAUNCH: the launch is set up while the one before it
    still runs. SPANS: programs note when they begin and end what they do.
    """

    SEND: tl.constexpr
    RECEIVE: tl.constexpr
    HAS_WEIGHTS: tl.constexpr
    DEPENDENT_LAUNCH: tl.constexpr
    SPANS: tl.constexpr


class Row(NamedTuple):
    """A token's row on the wire.

    ROW_WORDS: its 4-byte words, of which a program moves BLOCK_WORDS at once. GROUP: elements that share a scale of the
    fp8 cast, 0 for no cast. POWERS_OF_TWO: what scales are rounded up to. BYTE_SCALES: scales are exponents.
    """

    ROW_WORDS: tl.constexpr
    BLOCK_WORDS: tl.constexpr
    GROUP: tl.constexpr
    GROUP_LANES: tl.constexpr
    GROUPS_LANES: tl.constexpr
    POWERS_OF_TWO: tl.constexpr
    BYTE_SCALES: tl.constexpr


class Scales(NamedTuple):
    """Scales that are given with a row: SCALE_WIDTH elements of SCALE_DTYPE, 0 for none."""

    SCALE_WIDTH: tl.constexpr
    SCALE_LANES: tl.constexpr
    SCALE_DTYPE: tl.constexpr


class BulkDispatch(NamedTuple):
    """How a bulk dispatch counts rows and waits.

    BLOCK_TOKENS, MANY_TOKENS: tokens whose ids a program looks at at once, where it counts its own or all.
    COUNTS_ALONE: every program counts the rows before its own (redundant scan); else it learns them from the programs
    before it (decoupled look-back), PROGRAM_LANES of them at once. COUNT_BITS: bits that hold any rank's number of
    tokens. COUNT_LANES, POISON_LANES: lanes of a wait, at least the threads of a program. FORWARDED: rows and flags
    come through another rank of this node (only where the launch does not send).
    """

    BLOCK_TOKENS: tl.constexpr
    MANY_TOKENS: tl.constexpr
    COUNTS_ALONE: tl.constexpr
    COUNT_BITS: tl.constexpr
    COUNT_LANES: tl.constexpr
    POISON_LANES: tl.constexpr
    PROGRAM_LANES: tl.constexpr
    FORWARDED: tl.constexpr


class LowLatencyDispatch(NamedTuple):
    """How rows with packed flags lie and are waited for.

    SLOTS: tokens per rank at most, TOKEN_LANES the next power of two. COUNT_BITS: bits that hold such a number.
    SCALE_WORDS: words of scales beside a row; HAS_SCALES: whether they travel. COUNT_LANES, SIDE_LANES: lanes of a
    wait, at least the threads of a program. SPARSE_POLLS: see take_row_block.
    """

    SLOTS: tl.constexpr
    TOKEN_LANES: tl.constexpr
    COUNT_BITS: tl.constexpr
    SCALE_WORDS: tl.constexpr
    HAS_SCALES: tl.constexpr
    COUNT_LANES: tl.constexpr
    SIDE_LANES: tl.constexpr
    SPARSE_POLLS: tl.constexpr


class Block(NamedTuple):
    """What combine moves at once: GROUPS_LANES groups of GROUP elements, of rows with WIDTH elements.

    ELEMENT: integers of an element's width, DTYPE: what their bits are. QUANTIZED: rows are cast to fp8; SCALED: with
    one scale per GROUP elements.
    """

    WIDTH: tl.constexpr
    GROUPS_LANES: tl.constexpr
    GROUP: tl.constexpr
    ELEMENT: tl.constexpr
    DTYPE: tl.constexpr
    QUANTIZED: tl.constexpr
    SCALED: tl.constexpr


class Combine(NamedTuple):
    """How a combine adds.

    DTYPE: of the result. CHECK_INDICES: ids are compared with those of dispatch. OWN_IN_PLACE: this rank's own rows are
    added where they lie, instead of being sent. READ_AHEAD: see add_results.
    """

    DTYPE: tl.constexpr
    CHECK_INDICES: tl.constexpr
    OWN_IN_PLACE: tl.constexpr
    READ_AHEAD: tl.constexpr


def constants(kind: type[Tuple], values: dict[str, Any]) -> Tuple:
    """A tuple of this kind, of those of the values that are its fields."""
    return kind(*(tl.constexpr(values[name]) for name in kind._fields))  # type: ignore[attr-defined]


def plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Compile-time arguments as the interpreter takes them: Python cannot shift by a `tl.constexpr`."""
    return {
        param: type(value)(*(field.value for field in value)) if hasattr(value, "_fields") else value
        for param, value in arguments.items()
    }


def by_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """Compile-time arguments with the fields of tuples beside the others: numbers, truth values and dtypes by name.

    Where tuples share a field, its names are "PARAMETER.FIELD".
    """
    named: dict[str, Any] = {}
    fields = [(param, *field) for param, value in arguments.items() for field in _fields(param, value)]
    names = [name for _, name, _ in fields]
    for param, name, value in fields:
        named[name if names.count(name) == 1 else f"{param}.{name}"] = value
    return named


def _fields(param: str, value: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "_fields"):
        for name, field in zip(value._fields, value):
            yield name, field.value
    else:
        yield param, value
