"""Compile-time arguments of kernels, in named tuples: one tuple is one parameter of a kernel.

A kernel annotates such a parameter with `tl.constexpr`, and every field is a `tl.constexpr`, too: Triton 3.6 refuses
plain numbers in `tl.static_range`. `constants` makes such a tuple. Tuples do not nest: Triton 3.6 cannot pass an inner
one on to a helper.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import triton.language as tl

Tuple = TypeVar("Tuple", bound=tuple[Any, ...])


# How the fp8 cast of a row scales its groups: by the largest magnitude; by that, rounded up to a power of two; the
# same without a least scale, as vLLM's MXFP8 has it; by the scale that the caller of dispatch has given.
FULL_SCALES = tl.constexpr(0)
POWER_OF_TWO_SCALES = tl.constexpr(1)
MX_SCALES = tl.constexpr(2)
GIVEN_SCALE = tl.constexpr(3)


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
    """Which rank owns an expert: linear ownership. NUM_EXPERTS: of all ranks. NUM_OWNERS: ranks that own them."""

    NUM_EXPERTS: tl.constexpr
    NUM_OWNERS: tl.constexpr


class LaunchForm(NamedTuple):
    """Stages and options of a launch.

    SEND, RECEIVE: stages. HAS_WEIGHTS: weights travel. DEPENDENT_LAUNCH: the launch is set up while the one before it
    still runs. SPANS: programs note when their parts of the step begin and end.
    """

    SEND: tl.constexpr
    RECEIVE: tl.constexpr
    HAS_WEIGHTS: tl.constexpr
    DEPENDENT_LAUNCH: tl.constexpr
    SPANS: tl.constexpr


class Row(NamedTuple):
    """A token's row on the wire.

    ROW_WORDS: its 4-byte words, of which a program moves BLOCK_WORDS at once. GROUP: elements that the fp8 cast
    takes together, 0 for no cast. SCALING: how it scales them (FULL_SCALES, ...). BYTE_SCALES: scales are exponents.
    """

    ROW_WORDS: tl.constexpr
    BLOCK_WORDS: tl.constexpr
    GROUP: tl.constexpr
    GROUP_LANES: tl.constexpr
    GROUPS_LANES: tl.constexpr
    SCALING: tl.constexpr
    BYTE_SCALES: tl.constexpr


class Scales(NamedTuple):
    """Scales that are given with a row: SCALE_WIDTH elements of SCALE_DTYPE, 0 for none."""

    SCALE_WIDTH: tl.constexpr
    SCALE_LANES: tl.constexpr
    SCALE_DTYPE: tl.constexpr


class BulkDispatch(NamedTuple):
    """Constants by which a bulk dispatch counts rows and waits.

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


class Tile(NamedTuple):
    """The tile of tokens that a program of a bulk dispatch sends at once: TOKENS of them, among which its warps divide.

    0: no tiles, but rows one by one with their addresses in registers. A program moves PARTS parts of each row at once:
    with a cast GROUPS groups a part, else WORDS words. COPIES: threads that hold the scale of a group. LISTED: tokens
    whose destinations a program lists at once.
    """

    TOKENS: tl.constexpr
    GROUPS: tl.constexpr
    WORDS: tl.constexpr
    PARTS: tl.constexpr
    COPIES: tl.constexpr
    LISTED: tl.constexpr


class LowLatencyDispatch(NamedTuple):
    """Constants of rows with packed flags: their layout and the waits for them.

    SLOTS: tokens per rank at most, TOKEN_LANES the next power of two. COUNT_BITS: bits that hold such a number.
    SCALE_WORDS: words of scales beside a row; HAS_SCALES: whether they travel. COUNT_LANES, POISON_LANES, SIDE_LANES:
    lanes of a wait, at least the threads of a program. SPARSE_POLLS: see take_row_block.
    """

    SLOTS: tl.constexpr
    TOKEN_LANES: tl.constexpr
    COUNT_BITS: tl.constexpr
    SCALE_WORDS: tl.constexpr
    HAS_SCALES: tl.constexpr
    COUNT_LANES: tl.constexpr
    POISON_LANES: tl.constexpr
    SIDE_LANES: tl.constexpr
    SPARSE_POLLS: tl.constexpr


class Block(NamedTuple):
    """The block of a row that combine moves at once: GROUPS_LANES groups of GROUP words. WIDTH: words of a row.

    ELEMENT: the words on the wire, 4 bytes or bytes of fp8. DTYPE: of the elements in them. QUANTIZED: rows are cast to
    fp8; SCALED: with one scale per GROUP elements. ROWS: rows of which such blocks are sent at once.
    """

    WIDTH: tl.constexpr
    GROUPS_LANES: tl.constexpr
    GROUP: tl.constexpr
    ELEMENT: tl.constexpr
    DTYPE: tl.constexpr
    QUANTIZED: tl.constexpr
    SCALED: tl.constexpr
    ROWS: tl.constexpr


class Combine(NamedTuple):
    """Constants of a combine's sums.

    DTYPE: of the result. CHECK_INDICES: ids are compared with those of dispatch. OWN_IN_PLACE: this rank's own rows are
    added where they lie, instead of being sent. READ_AHEAD: see add_results.
    """

    DTYPE: tl.constexpr
    CHECK_INDICES: tl.constexpr
    OWN_IN_PLACE: tl.constexpr
    READ_AHEAD: tl.constexpr


class Expand(NamedTuple):
    """Constants of the copies of received rows to their experts' rows.

    ROW_WORDS: words of a row, of which a program copies BLOCK_WORDS at once. SCALE_WIDTH: elements of SCALE_DTYPE in a
    row's scales, 0 for none. ALIGNMENT: rows of zeros follow an expert's rows up to a multiple of this, or to the end
    of its block.
    """

    ROW_WORDS: tl.constexpr
    BLOCK_WORDS: tl.constexpr
    SCALE_WIDTH: tl.constexpr
    SCALE_LANES: tl.constexpr
    SCALE_DTYPE: tl.constexpr
    ALIGNMENT: tl.constexpr


class Ring(NamedTuple):
    """Rings of one direction, and the chunks in them (kernels/ring_shape.py). The same on all ranks.

    DIRECTION: TO_EXPERTS or BACK. NODES, GPUS: nodes, and ranks of each. CHANNELS: each has a ring per node. SLOTS:
    chunks that a ring holds. CHUNK_TOKENS: tokens of a chunk. NUM_CHUNKS: chunks of M tokens. LINE_WORDS, SLOT_WORDS:
    words of a line and of a chunk. STAGED_WORDS: words of the chunk that a channel puts next; 0 where stores reach all
    ranks. HEAD_WORDS: words before the chunks that go to a node; 0 where kernels move them.
    """

    DIRECTION: tl.constexpr
    NODES: tl.constexpr
    NODE_LANES: tl.constexpr
    GPUS: tl.constexpr
    GPU_LANES: tl.constexpr
    CHANNELS: tl.constexpr
    SLOTS: tl.constexpr
    CHUNK_TOKENS: tl.constexpr
    NUM_CHUNKS: tl.constexpr
    LINE_WORDS: tl.constexpr
    SLOT_WORDS: tl.constexpr
    STAGED_WORDS: tl.constexpr
    HEAD_WORDS: tl.constexpr


class Line(NamedTuple):
    """A token's line in a chunk on its way to experts.

    SCALE_WIDTH: elements of SCALE_DTYPE in the row's scales, 0 for none. IDS_AT, WEIGHTS_AT, ROWS_AT, TOKEN_AT: words
    before the ids, the weights, the row's number at each rank of the node, and the token's number; the row and its
    scales lie before them. HAS_WEIGHTS: weights travel. OWN_LINE_EACH: a token's line has the token's place in the
    chunk; else tokens that do not go to the node have none.
    """

    SCALE_WIDTH: tl.constexpr
    SCALE_LANES: tl.constexpr
    SCALE_DTYPE: tl.constexpr
    IDS_AT: tl.constexpr
    WEIGHTS_AT: tl.constexpr
    ROWS_AT: tl.constexpr
    TOKEN_AT: tl.constexpr
    HAS_WEIGHTS: tl.constexpr
    OWN_LINE_EACH: tl.constexpr


class Numbering(NamedTuple):
    """Constants by which a launch numbers rows.

    MANY_TOKENS: tokens whose ids a program looks at at once. COUNT_BITS: bits that hold any rank's number of tokens.
    POISON_LANES: lanes of a wait, at least the threads of a program. FINISHES: the sending stage ends with this launch;
    else with the one after it.
    """

    MANY_TOKENS: tl.constexpr
    COUNT_BITS: tl.constexpr
    POISON_LANES: tl.constexpr
    FINISHES: tl.constexpr


class Exchange(NamedTuple):
    """Roles and stage of a launch that exchanges chunks.

    SENDS, FORWARDS: roles of its channels. STAGE: the stage that it belongs to; FINISHES: and ends. COUNT_LANES,
    POISON_LANES: lanes of a wait, at least the threads of a program.
    """

    SENDS: tl.constexpr
    FORWARDS: tl.constexpr
    STAGE: tl.constexpr
    FINISHES: tl.constexpr
    COUNT_LANES: tl.constexpr
    POISON_LANES: tl.constexpr


class NodeSums(NamedTuple):
    """Constants of sums of results, first over the ranks of a node and then over nodes.

    HIDDEN: elements of a row, of which a program adds BLOCK at once. WEIGHTS_AT: words before the weights in a line on
    its way back. DTYPE: of results, ELEMENT: integers of its width. QUANTIZED: ranks offer rows of fp8, of which
    SCALE_GROUP elements share a scale; 0 for no scales. HAS_WEIGHTS: weights travel. CHECK_INDICES: ids are compared
    with those of dispatch. POISON_LANES: lanes of a wait, at least the threads of a program.
    """

    HIDDEN: tl.constexpr
    BLOCK: tl.constexpr
    WEIGHTS_AT: tl.constexpr
    DTYPE: tl.constexpr
    ELEMENT: tl.constexpr
    QUANTIZED: tl.constexpr
    SCALE_GROUP: tl.constexpr
    HAS_WEIGHTS: tl.constexpr
    CHECK_INDICES: tl.constexpr
    POISON_LANES: tl.constexpr


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
