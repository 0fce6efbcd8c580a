"""Prints what the kernels compile to, without a GPU: instructions of their loops, registers, stack, seconds.

    python tools/instructions.py                          # at 2, 4, 8, 16 and 64 ranks
    python tools/instructions.py --ranks 8 --match combine
    python tools/instructions.py --write --ranks 72       # measure at 8 and 72 ranks, and write the bounds of tests
    python tools/instructions.py --write --ranks 72 --match combine     # the same of some kernels, others stay

Kernels are compiled offline for compute capability 9.0, with the Triton that is installed: figures of different
versions cannot be compared. The bounds, in tests/instruction_bounds.toml, are of PINNED.

The first table has a row per kernel. Its figures are of the whole code, counted once: instructions, barriers, loads of
addresses from the op's table. Seconds are this process's CPU time of a compilation without Triton's cache, and ratio is
the same by that of a reference kernel, which is compiled before: slow and busy machines have nearly the same.

The second table has a row per loop, indented inside the loop around it. Figures are of one turn, for one warp:

arrived: the longest way through a turn on which no wait is entered, since all that is waited for is there.
polled: the longest way when each wait inside looks once more than that. Of a wait itself: its shortest turn.
barriers, table loads: on the way that `arrived` counts; of a wait on its shortest turn.

A loop inside another counts with one turn there. A wait is an innermost loop that reads the clock.
"""

from __future__ import annotations

import argparse
import functools
import math
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from ep_a2a.kernels.compiled_kernel import CompiledKernel  # noqa: E402
from ep_a2a.kernels.portable import portable  # noqa: E402
from tests.offline_compile import compile_kernel, resources  # noqa: E402
from tools import compare_ptx, order  # noqa: E402
from tools.loops import Work, blocks_of, loops_of, parse, works_of  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tools.loops import Loop

PINNED = "3.9"
COMPILE_MARGIN = 1.3
"""The bound on a kernel's compile_ratio, by what was measured."""
BOUNDS = PROJECT / "tests" / "instruction_bounds.toml"
WORLD_SIZES = (2, 4, 8, 16, 64)
BASE_RANKS = 8
"""Ranks with which more ranks are compared."""
FEW_SMS, MARKED_SMS = 16, 33
"""The bounds on multiprocessors of variants whose name has `few`, and of those of combine whose name has `marked`: with
the second, rows announce themselves. Those of `wide` have programs as wide without a bound, and those of `shared` run
beside products."""
MARKS = {"COUNTS_ALONE": "alone", "SPARSE_POLLS": "sparse"}
"""Constants that tell variants of a kernel apart, and how names have them."""
FORMS = (
    ("bf16", {}, ("dispatch", "combine")),
    ("cast", compare_ptx.FP8_DISPATCH, ("dispatch",)),
    ("back", compare_ptx.FP8_COMBINE, ("combine",)),
)
"""Name, changes of the config, and kernels: rows as they are, cast inside dispatch, cast on the way back."""


class Figures(NamedTuple):
    """Figures of a compiled kernel.

    Attributes:
        registers, stack: of a thread; bytes of stack.
        seconds, reference_seconds: of CPU time, to compile it and, before it, REFERENCE.
        work: all its code, counted once.
        loops: each with its work when all has arrived, and when waits inside look once more.
    """

    registers: int
    stack: int
    seconds: float
    reference_seconds: float
    work: Work
    loops: list[tuple[Loop, Work, Work]]


@portable
def reference_kernel(target, source, count, TURNS: tl.constexpr):  # noqa: ANN001, ANN201
    """Its compilation takes half a second. A change of it changes the compile_ratio of every kernel."""
    lanes = tl.arange(0, 1024)
    total = tl.full((1024,), 0, tl.int32)
    for turn in tl.static_range(TURNS):
        total += tl.load(source + turn * 1024 + lanes, mask=lanes < count, other=0)
        tl.store(target + turn * 1024 + lanes, total, mask=lanes < count)


REFERENCE = CompiledKernel(reference_kernel, (torch.int32, torch.int32), {"TURNS": 40}, num_warps=4)


def figures_of(variant: CompiledKernel) -> Figures:
    """Compiles a variant and counts."""
    start_compiler()
    reference_seconds, _ = compile_anew(REFERENCE)
    seconds, cubin = compile_anew(variant)
    with tempfile.TemporaryDirectory() as folder:
        used = resources(cubin, Path(folder))
    instructions, labels = parse(listing_of(cubin))
    blocks = blocks_of(instructions, labels)
    total = functools.reduce(Work.plus, (block.work for block in blocks.values()))
    work = total._replace(instructions=len(instructions))
    loops = [(loop, *works_of(loop, blocks)) for loop in loops_of(blocks)]
    return Figures(used["REG"], used["STACK"], seconds, reference_seconds, work, loops)


@functools.cache
def start_compiler() -> None:
    """Loads what the first compilation of a process takes longer for."""
    compile_anew(REFERENCE)


def compile_anew(variant: CompiledKernel) -> tuple[float, bytes]:
    """(seconds of CPU time, machine code). The assembler, a process of its own, does not count."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        start = time.process_time()
        cubin = compile_kernel(variant)["cubin"]
        return time.process_time() - start, cubin


def listing_of(cubin: bytes) -> str:
    """nvdisasm's listing of a kernel, with the places in files that instructions come from."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", "-gi", path]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def variants(world_size: int) -> Iterator[tuple[str, CompiledKernel]]:
    """(name, variant) of the kernels of an op inside a node, layout rank_major, DeepSeek-V3's shape."""
    for max_sms, shares_sm in ((0, False), (FEW_SMS, False), (MARKED_SMS, False), (0, True)):
        for form, changes, roles in FORMS:
            engine = compare_ptx.kernels_of(world_size, layout="rank_major", max_sms=max_sms, **changes)
            engine.kernels.shares_sm = shares_sm
            for variant in engine.compiled_kernels():
                kernel = variant.kernel.__name__.removesuffix("_kernel")
                if max_sms == MARKED_SMS and kernel != "combine":
                    continue
                if kernel.endswith(roles) and variant.shares_sm == shares_sm:
                    constants = variant.named_constants
                    marks = [mark for name, mark in MARKS.items() if constants.get(name)]
                    if max_sms:
                        marks = ["few" if max_sms == FEW_SMS else "marked", *marks]
                    elif shares_sm:
                        marks = ["shared", *marks]
                    elif constants.get("READ_AHEAD"):
                        marks = ["wide", *marks]
                    elif is_spread(constants):
                        marks = ["spread", *marks]
                    yield "-".join([kernel, form, *marks]), variant


def is_spread(constants: dict[str, Any]) -> bool:
    """Whether a kernel is a combine of few tokens, which sends as small blocks as it adds."""
    if "SENT.GROUP" not in constants or constants["READ_AHEAD"]:
        return False
    sent, added = (constants[f"{block}.GROUP"] * constants[f"{block}.GROUPS_LANES"] for block in ("SENT", "ADDED"))
    return bool(sent == added)


def show(found: Iterable[tuple[str, int, Figures]]) -> None:
    """Prints a row for each kernel as soon as it is compiled, then the table of loops."""
    row = "{:38} {:>5} {:>9} {:>5} {:>12} {:>8} {:>11} {:>7} {:>5}".format
    print(row("kernel", "ranks", "registers", "stack", "instructions", "barriers", "table loads", "seconds", "ratio"))
    kept = []
    for name, world_size, figures in found:
        numbers = (figures.registers, figures.stack, *figures.work)
        times = (f"{figures.seconds:.1f}", f"{figures.seconds / figures.reference_seconds:.1f}")
        print(row(name, world_size, *numbers, *times), flush=True)
        kept.append((name, world_size, figures))
    row = "{:38} {:>5}  {:38} {:>7} {:>6} {:>8} {:>11}".format
    print("\n" + row("kernel", "ranks", "loop", "arrived", "polled", "barriers", "table loads"))
    for name, world_size, figures in kept:
        for loop, arrived, polled in figures.loops:
            shown = f"{'  ' * loop.depth}{loop.function}{' (wait)' if loop.is_wait else ''}"
            counts = ("" if loop.is_wait else arrived.instructions, polled.instructions)
            print(row(name, world_size, shown, *counts, arrived.barriers, arrived.table_loads))


class Bound(NamedTuple):
    """What a kernel may take.

    Attributes:
        ranks: most ranks for which the kernel is compiled in a test.
        registers: at BASE_RANKS. stack: bytes, at BASE_RANKS and at `ranks`.
        register_growth, instruction_growth: at `ranks`, by those at BASE_RANKS.
        compile_ratio: CPU time of the slower of both compilations, by the mean of REFERENCE's.
    """

    ranks: int
    registers: int
    stack: int
    register_growth: float
    instruction_growth: float
    compile_ratio: float

    @classmethod
    def of(cls, base: Figures, most: Figures, ranks: int) -> Bound:
        """What a kernel takes: figures at BASE_RANKS and at `ranks`."""
        return cls(
            ranks,
            base.registers,
            max(base.stack, most.stack),
            most.registers / base.registers,
            most.work.instructions / base.work.instructions,
            max(base.seconds, most.seconds) * 2 / (base.reference_seconds + most.reference_seconds),
        )


TARGET = Bound(ranks=72, registers=255, stack=0, register_growth=1.15, instruction_growth=1.15, compile_ratio=4.0)
"""Where all kernels are to come. A compile_ratio of 4 is about 2.5 s."""
TEXT = """\
# What the kernels of an op inside a node may take, compiled for compute capability 9.0 by Triton {pinned}.
# tests/unit/test_instructions.py holds kernels to these bounds, and tools/instructions.py --write renews them: to lower
# them; who raises one says in the commit why. Bound and TARGET in tools/instructions.py say what they mean and where
# they are to come.
"""


def read_bounds() -> dict[str, Bound]:
    """The bounds in the file, by kernel."""
    return {name: Bound(**values) for name, values in tomllib.loads(BOUNDS.read_text(encoding="utf-8")).items()}


def write_bounds(bounds: dict[str, Bound]) -> None:
    """Writes the file."""
    lines = [TEXT.format(pinned=PINNED)]
    for name, bound in sorted(bounds.items()):
        values = ", ".join(f"{key} = {value}" for key, value in bound._asdict().items())
        lines.append(f"{name} = {{ {values} }}")
    BOUNDS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def bound_of(found: Bound) -> Bound:
    """The bound for what a kernel takes today: the target where it is met, else that figure; of times with a margin."""
    return Bound(
        ranks=found.ranks,
        registers=found.registers,
        stack=max(found.stack, TARGET.stack),
        register_growth=max(TARGET.register_growth, _rounded_up(found.register_growth)),
        instruction_growth=max(TARGET.instruction_growth, _rounded_up(found.instruction_growth)),
        compile_ratio=round(COMPILE_MARGIN * found.compile_ratio, 1),
    )


def _rounded_up(number: float) -> float:
    return math.ceil(number * 100) / 100


def measure_bounds(ranks: int, match: str) -> None:
    """Measures the kernels whose names contain `match`, and writes their bounds."""
    bounds = read_bounds() if BOUNDS.exists() else {}
    at_most = dict(variants(ranks))
    for name, variant in variants(BASE_RANKS):
        if match in name:
            found = Bound.of(figures_of(variant), figures_of(at_most[name]), ranks)
            print(name, found, flush=True)
            write_bounds(bounds | {name: bound_of(found)})
            bounds = read_bounds()


def main() -> int:
    """Compiles and prints; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="only this number of ranks; may be repeated")
    parser.add_argument("--match", default="", help="only kernels whose name contains this")
    parser.add_argument("--write", action="store_true", help="write bounds of these kernels at 8 and at --ranks")
    options = parser.parse_args()
    if options.write:
        if order.INSTALLED != PINNED:
            parser.error(f"bounds are of Triton {PINNED}; {order.INSTALLED} is installed")
        measure_bounds((options.ranks or [TARGET.ranks])[0], options.match)
        return 0
    print(f"Triton {triton.__version__}, compute capability 9.0")
    show(
        (name, world_size, figures_of(variant))
        for world_size in options.ranks or WORLD_SIZES
        for name, variant in variants(world_size)
        if options.match in name
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
