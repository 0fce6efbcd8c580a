"""Compile-time arguments of kernels, in named tuples: one tuple is one parameter of a kernel.

A kernel annotates such a parameter with `tl.constexpr`. Tuples are equal where their fields are: compiled kernels are
looked up by them. They do not nest: Triton 3.6 cannot pass an inner one on to a helper.
"""

from typing import Any, NamedTuple

import triton.language as tl

# How the fp8 cast of a row scales its groups: by the largest magnitude; by that, rounded up to a power of two; the
# same without a least scale, as vLLM's MXFP8 has it; by the scale that the caller of dispatch has given.
FULL_SCALES = tl.constexpr(0)
POWER_OF_TWO_SCALES = tl.constexpr(1)
MX_SCALES = tl.constexpr(2)
GIVEN_SCALE = tl.constexpr(3)


class Shape(NamedTuple):
    """Of an op; the same on all ranks.

    WORLD_SIZE: ranks. TOPK: experts of a token. Their LANES: the next powers of two. COMPACT: whether received rows
    follow each other; else every source has as many rows. LOCAL_IDS_OF: experts over all ranks where received ids are
    local ones, 0 where they are global. MASKS: whether ranks may be masked.
    """

    WORLD_SIZE: int
    WORLD_LANES: int
    TOPK: int
    TOPK_LANES: int
    COMPACT: bool
    LOCAL_IDS_OF: int
    MASKS: bool


class ExpertPlacement(NamedTuple):
    """Which rank owns an expert: linear ownership. NUM_EXPERTS: of all ranks. NUM_OWNERS: ranks that own them."""

    NUM_EXPERTS: int
    NUM_OWNERS: int


class LaunchForm(NamedTuple):
    """Stages and options of a launch.

    SEND, RECEIVE: stages. HAS_WEIGHTS: weights travel. DEPENDENT_LAUNCH: the launch is set up while the one before it
    still runs. SPANS: programs note when their parts of the step begin and end.
    """

    SEND: bool
    RECEIVE: bool
    HAS_WEIGHTS: bool
    DEPENDENT_LAUNCH: bool
    SPANS: bool


class Row(NamedTuple):
    """A token's row on the wire.

    ROW_WORDS: its 4-byte words, of which a program moves BLOCK_WORDS at once. GROUP: elements that the fp8 cast
    takes together, 0 for no cast. SCALING: how it scales them (FULL_SCALES, ...). BYTE_SCALES: scales are exponents.
    """

    ROW_WORDS: int
    BLOCK_WORDS: int
    GROUP: int
    GROUP_LANES: int
    GROUPS_LANES: int
    SCALING: int
    BYTE_SCALES: bool


class Scales(NamedTuple):
    """Scales that travel with a row: SCALE_WIDTH elements of SCALE_DTYPE, 0 for none."""

    SCALE_WIDTH: int
    SCALE_LANES: int
    SCALE_DTYPE: tl.dtype


class BulkDispatch(NamedTuple):
    """Constants by which a bulk dispatch counts rows and waits.

    BLOCK_TOKENS, MANY_TOKENS: tokens whose ids a program looks at at once, where it counts its own or all.
    COUNTS_ALONE: every program counts the rows before its own (redundant scan); else it learns them from the programs
    before it (decoupled look-back), PROGRAM_LANES of them at once. COUNT_LANES, POISON_LANES: lanes of a wait, at least
    the threads of a program. FORWARDED: rows and flags come through another rank of this node (only where the launch
    does not send). RECEIVES_ALONE: the last program sends no rows, unless it is the only one.
    """

    BLOCK_TOKENS: int
    MANY_TOKENS: int
    COUNTS_ALONE: bool
    COUNT_LANES: int
    POISON_LANES: int
    PROGRAM_LANES: int
    FORWARDED: bool
    RECEIVES_ALONE: bool


class Tile(NamedTuple):
    """The tile of tokens that a program of a bulk dispatch sends at once: TOKENS of them, among which its warps divide.

    1: no tiles, but tokens one by one with their addresses in registers. A program moves PARTS parts of each row at
    once: with a cast GROUPS groups a part, else WORDS words. COPIES: threads that hold the scale of a group. LISTED:
    tokens whose destinations a program lists at once.
    """

    TOKENS: int
    GROUPS: int
    WORDS: int
    PARTS: int
    COPIES: int
    LISTED: int


class LowLatencyDispatch(NamedTuple):
    """Constants of rows with packed flags: their layout and the waits for them.

    SLOTS: tokens per rank at most, TOKEN_LANES the next power of two. SCALE_WORDS: words of scales beside a row;
    HAS_SCALES: whether they travel. COUNT_LANES, POISON_LANES, SIDE_LANES: lanes of a wait, at least the threads of a
    program. SPARSE_POLLS: see take_row_block.
    """

    SLOTS: int
    TOKEN_LANES: int
    SCALE_WORDS: int
    HAS_SCALES: bool
    COUNT_LANES: int
    POISON_LANES: int
    SIDE_LANES: int
    SPARSE_POLLS: bool


class Block(NamedTuple):
    """The block of a row that combine moves at once: GROUPS_LANES groups of GROUP words. WIDTH: words of a row.

    ELEMENT: the words on the wire, 4 bytes or bytes of fp8. DTYPE: of the elements in them. QUANTIZED: rows are cast to
    fp8; SCALED: with one scale per GROUP elements. ROWS: rows of which such blocks are sent at once.
    """

    WIDTH: int
    GROUPS_LANES: int
    GROUP: int
    ELEMENT: tl.dtype
    DTYPE: tl.dtype
    QUANTIZED: bool
    SCALED: bool
    ROWS: int


class Combine(NamedTuple):
    """Constants of a combine's sums.

    DTYPE: of the result. CHECK_INDICES: ids are compared with those of dispatch. OWN_IN_PLACE: this rank's own rows are
    added where they lie, instead of being sent. READ_AHEAD: see add_results. MARKED: rows announce themselves
    (kernels/primitives.py, EMPTY); else a rank announces all of a step by its flag, and every program sends, then adds.
    """

    DTYPE: tl.dtype
    CHECK_INDICES: bool
    OWN_IN_PLACE: bool
    READ_AHEAD: bool
    MARKED: bool


class Expand(NamedTuple):
    """Constants of the copies of received rows to their experts' rows.

    ROW_WORDS: words of a row, of which a program copies BLOCK_WORDS at once. SCALE_WIDTH: elements of SCALE_DTYPE in a
    row's scales, 0 for none. ALIGNMENT: rows of zeros follow an expert's rows up to a multiple of this, or to the end
    of its block. COLUMN_MULTIPLE: scales lie by columns, whose stride is a multiple of so many rows; 0: by rows.
    """

    ROW_WORDS: int
    BLOCK_WORDS: int
    SCALE_WIDTH: int
    SCALE_LANES: int
    SCALE_DTYPE: tl.dtype
    ALIGNMENT: int
    COLUMN_MULTIPLE: int


class Ring(NamedTuple):
    """Rings of one direction, and the chunks in them (kernels/ring_shape.py). The same on all ranks.

    DIRECTION: TO_EXPERTS or BACK. NODES, GPUS: nodes, and ranks of each. CHANNELS: each has a ring per node. SLOTS:
    chunks that a ring holds. CHUNK_TOKENS: tokens of a chunk. NUM_CHUNKS: chunks of M tokens. LINE_WORDS, SLOT_WORDS:
    words of a line and of a chunk. STAGED_WORDS: words of the chunk that a channel puts next; 0 where stores reach all
    ranks. HEAD_WORDS: words before the chunks that go to a node; 0 where kernels move them.
    """

    DIRECTION: int
    NODES: int
    NODE_LANES: int
    GPUS: int
    GPU_LANES: int
    CHANNELS: int
    SLOTS: int
    CHUNK_TOKENS: int
    NUM_CHUNKS: int
    LINE_WORDS: int
    SLOT_WORDS: int
    STAGED_WORDS: int
    HEAD_WORDS: int


class Line(NamedTuple):
    """A token's line in a chunk on its way to experts.

    SCALE_WIDTH: elements of SCALE_DTYPE in the row's scales, 0 for none. IDS_AT, WEIGHTS_AT, ROWS_AT, TOKEN_AT: words
    before the ids, the weights, the row's number at each rank of the node, and the token's number; the row and its
    scales lie before them. HAS_WEIGHTS: weights travel. OWN_LINE_EACH: a token's line has the token's place in the
    chunk; else tokens that do not go to the node have none.
    """

    SCALE_WIDTH: int
    SCALE_LANES: int
    SCALE_DTYPE: tl.dtype
    IDS_AT: int
    WEIGHTS_AT: int
    ROWS_AT: int
    TOKEN_AT: int
    HAS_WEIGHTS: bool
    OWN_LINE_EACH: bool


class Exchange(NamedTuple):
    """Roles and stage of a launch that exchanges chunks.

    SENDS, FORWARDS: roles of its channels. STAGE: the stage that it belongs to, and ends if that is the sending one.
    COUNT_LANES, POISON_LANES: lanes of a wait, at least the threads of a program.
    """

    SENDS: bool
    FORWARDS: bool
    STAGE: int
    COUNT_LANES: int
    POISON_LANES: int


class NodeSums(NamedTuple):
    """Constants of sums of results, first over the ranks of a node and then over nodes.

    HIDDEN: elements of a row, of which a program adds BLOCK at once. WEIGHTS_AT: words before the weights in a line on
    its way back. DTYPE: of results, ELEMENT: integers of its width. QUANTIZED: ranks offer rows of fp8, of which
    SCALE_GROUP elements share a scale; 0 for no scales. HAS_WEIGHTS: weights travel. CHECK_INDICES: ids are compared
    with those of dispatch. POISON_LANES: lanes of a wait, at least the threads of a program.
    """

    HIDDEN: int
    BLOCK: int
    WEIGHTS_AT: int
    DTYPE: tl.dtype
    ELEMENT: tl.dtype
    QUANTIZED: bool
    SCALE_GROUP: int
    HAS_WEIGHTS: bool
    CHECK_INDICES: bool
    POISON_LANES: int


def as_constexprs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Compile-time arguments for the compiler: Triton 3.6 refuses plain numbers of tuples in `tl.static_range`."""
    return {
        param: type(value)(*map(tl.constexpr, value)) if hasattr(value, "_fields") else value
        for param, value in arguments.items()
    }


def by_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """Compile-time arguments with the fields of tuples beside the others: numbers, truth values and dtypes by name.

    Where tuples share a field, its names are "PARAMETER.FIELD".
    """
    fields = [
        (param, name, each)
        for param, value in arguments.items()
        for name, each in (zip(value._fields, value) if hasattr(value, "_fields") else [(param, value)])
    ]
    names = [name for _, name, _ in fields]
    return {name if names.count(name) == 1 else f"{param}.{name}": each for param, name, each in fields}
