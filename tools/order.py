"""Lists in which order the compiled kernels access memory: one file, tests/order/triton-X.Y.txt, per Triton of PINNED.

    python tools/order.py             # compile with the Triton that is installed, and print what differs from its file
    python tools/order.py --write     # write that file

Another Triton needs no environment of its own:

    pip download --no-deps triton==3.6.0 && unzip -q triton-3.6.0-*.whl -d /tmp/triton-3.6
    PYTHONPATH=/tmp/triton-3.6 python tools/order.py --write

Kernels are compiled to PTX offline, for compute capability 9.0. A section lists the accesses of one kernel, or of
several kernels that have the same ones, in the order of the code: barriers, fences, and loads, stores and atomics of
global memory with an order, a scope or a cache operator. "ld" and "st" stand for all others at that place. A line
starts with the device function whose code it is. "x3" means three times in succession.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import itertools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import triton

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from tests.offline_compile import compile_kernel  # noqa: E402
from tools import compare_ptx  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PINNED = ("3.6", "3.9")
KERNELS = PROJECT / "ep_a2a" / "kernels"
INSTALLED = ".".join(triton.__version__.split(".")[:2])

PLAIN = re.compile(r"(ld|st)\.global(?:\.v\d)?\.b\d+")
ACCESS = re.compile(
    r"\s*(?:@!?%p\d+\s+)?(?:call\.uni \(\w+\), (nvshmem\w+)"
    r"|((?:ld|st)(?!\.param|\.shared|\.local)\.[\w.:]+|(?:atom|red|bar|barrier|fence|membar|griddepcontrol|cp)\.[\w.:]+))"
)
FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]+)"', re.MULTILINE)
PLACE = re.compile(r"\s*\.loc\s+(\d+) (\d+) \d+(?:, function_name \S+ inlined_at (\d+) (\d+))?")
SECTION = re.compile(r"^## (.+) \((\w+)\)\n((?:(?!## ).+\n)+)", re.MULTILINE)
MAX_REPEATED_LINES = 20


def variants() -> Iterator[tuple[str, Any]]:
    """(name, variant): the headline and others at EP 2; bf16 on 2 x 2 ranks over every transport."""
    yield from compare_ptx.headline_variants((2,))
    yield from _further_variants()
    yield from (each for each in compare_ptx.node_variants((4,)) if "-bf16-" in each[0])


def _further_variants() -> Iterator[tuple[str, Any]]:
    """Combines that take router weights, the exchange of weights that only combine was given, spans."""
    from ep_a2a.compat.combine_time_weights import exchange_kernel

    engine = compare_ptx.kernels_of(2, compiled_calls="all")
    for place, variant in enumerate(engine.compiled_kernels()):
        if variant.named_constants.get("CHECK_INDICES") and variant.named_constants["HAS_WEIGHTS"]:
            yield f"ep2-weights-{place}-combine", variant
    for name, spans in (("ep2-weights-exchange", False), ("ep2-weights-exchange-spans", True)):
        yield name, exchange_kernel(engine.kernels.config, spans=spans)


def ptx_of(variant: Any) -> str:
    """The PTX of a variant; it is not assembled."""
    from triton.backends.nvidia.compiler import CUDABackend

    class Done(Exception):
        pass

    def stop(_: Any, ptx: str, *__: Any) -> None:
        raise Done(ptx)

    with mock.patch.object(CUDABackend, "make_cubin", stop), triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        try:
            compile_kernel(variant)
        except Done as done:
            return str(done)
    raise AssertionError("Triton has not assembled the kernel")


def order_of(ptx: str) -> str:
    """The lines of a kernel's section."""
    lines = [
        f"{function or '-'}: {', '.join(_counted(access for _, access in accesses))}"
        for function, accesses in itertools.groupby(_accesses(ptx), key=lambda each: each[0])
    ]
    return "".join(f"{line}\n" for line in _folded(lines))


def _accesses(ptx: str) -> list[tuple[str, str]]:
    """(device function, access) in the order of the code; those without an order belong to the one before them."""
    files = dict(FILE.findall(ptx))
    found: list[tuple[str, str]] = []
    function, plain = "", set[str]()

    def end_plain() -> None:
        if plain:
            found.append((found[-1][0] if found else "", " ".join(sorted(plain))))
            plain.clear()

    for line in ptx.splitlines():
        if place := PLACE.match(line):
            file, number, caller, caller_number = place.groups()
            inner = function_at(files[file], int(number))
            function = inner or (function_at(files[caller], int(caller_number)) if caller else "") or function
        elif access := ACCESS.match(line):
            text = access[1] or access[2]
            if kind := PLAIN.fullmatch(text):
                plain.add(kind[1])
                continue
            end_plain()
            found.append((function, text))
    end_plain()
    return found


@functools.cache
def _functions(path: Path) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of the functions of a module."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [(node.lineno, node.end_lineno or 0, node.name) for node in nodes if isinstance(node, ast.FunctionDef)]


def function_at(file: str, line: int) -> str:
    """The device function at a line; empty where the file is not one of the kernels'."""
    path = Path(file)
    if path.parent.name != KERNELS.name or not path.exists():
        return ""
    around = [(last - first, name) for first, last, name in _functions(path) if first <= line <= last]
    return min(around)[1] if around else ""


def _counted(items: Iterable[str]) -> list[str]:
    """The items, each with the number of times that it comes in succession."""
    runs = [(item, len(list(run))) for item, run in itertools.groupby(items)]
    return [item if times == 1 else f"{item} x{times}" for item, times in runs]


def _folded(lines: list[str]) -> list[str]:
    """The lines, with each group that repeats at once written once."""
    result, start = [], 0
    while start < len(lines):
        length, times = max(
            ((length, _times(lines, start, length)) for length in range(1, MAX_REPEATED_LINES + 1)),
            key=lambda each: each[0] * (each[1] - 1),
        )
        group = lines[start : start + length]
        if times == 1:
            result.append(lines[start])
            start += 1
            continue
        result += [f"{times} times:", *(f"  {line}" for line in _folded(group))]
        start += length * times
    return result


def _times(lines: list[str], start: int, length: int) -> int:
    """How often the `length` lines at `start` come in succession."""
    group = lines[start : start + length]
    ends = range(start + length, len(lines) + 1, length)
    return max(1, sum(1 for _ in itertools.takewhile(lambda end: lines[end - length : end] == group, ends)))


def path_of(version: str) -> Path:
    """The file of a Triton."""
    return PROJECT / "tests" / "order" / f"triton-{version}.txt"


def sections_of(document: str) -> dict[str, tuple[str, str]]:
    """(kernel, lines) by the name of the variant."""
    return {name: (kernel, lines) for names, kernel, lines in SECTION.findall(document) for name in names.split()}


def document_of(orders: dict[str, tuple[str, str]]) -> str:
    """The file with these sections; variants with the same lines share one."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, order in orders.items():
        names.setdefault(order, []).append(name)
    return "\n".join(f"## {' '.join(same)} ({kernel})\n{lines}" for (kernel, lines), same in names.items())


def accesses_by_function(lines: str) -> dict[str, set[str]]:
    """The ordered accesses of each device function, in the lines of sections."""
    found: dict[str, set[str]] = {}
    for function, text in re.findall(r"^ *(\w+): (.+)$", lines, re.MULTILINE):
        found.setdefault(function, set()).update(each.split(" x")[0] for each in text.split(", "))
    return {function: accesses - {"ld", "st", "ld st"} for function, accesses in found.items()}


def table_of(document: str) -> str:
    """The table of the site's protocol page: the device functions that order accesses, and the kernels they are in."""
    modules = {name: path.name for path in sorted(KERNELS.glob("*.py")) for *_, name in _functions(path)}
    accesses: dict[str, set[str]] = {}
    kernels: dict[str, set[str]] = {}
    for kernel, lines in sections_of(document).values():
        for function, found in accesses_by_function(lines).items():
            accesses.setdefault(function, set()).update(found)
            kernels.setdefault(function, set()).add(kernel.removesuffix("_kernel"))
    rows = [
        f"| `{function}` (`{modules[function]}`) | {_code(found)} | {', '.join(sorted(kernels[function]))} |"
        for function, found in sorted(accesses.items(), key=lambda each: (modules[each[0]], each[0]))
        if found - {"bar.sync"}
    ]
    return "\n".join(["| function | accesses | in kernels |", "|---|---|---|", *rows])


def _code(accesses: set[str]) -> str:
    return ", ".join(f"`{access}`" for access in sorted(accesses))


def main() -> int:
    """Compile all variants and print, or write, what is new; 1 when the file differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the file")
    options = parser.parse_args()
    path = path_of(INSTALLED)
    orders = {name: (variant.kernel.__name__, order_of(ptx_of(variant))) for name, variant in variants()}
    before, after = path.read_text(encoding="utf-8") if path.exists() else "", document_of(orders)
    sys.stdout.writelines(
        difflib.unified_diff(before.splitlines(True), after.splitlines(True), str(path), f"Triton {INSTALLED}")
    )
    if not options.write:
        return int(before != after)
    path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
