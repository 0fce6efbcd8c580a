"""tools/order.py: the compiled kernels order memory as the file of the installed Triton says."""

import functools

import pytest

from ep_a2a.kernels.compiled_kernel import CompiledKernel
from tools import order

QUICK = {
    "ep2-rank_major-cast-0-dispatch",
    "ep2-rank_major-cast-2-dispatch",
    "ep2-compact-bf16-0-dispatch",
    "ep2-compact-cast-3-dispatch",
    "ep2-rank_major-bf16-4-combine",
    "ep2-rank_major-combine-fp8-4-combine",
    "ep2-weights-11-combine",
    "ep2-weights-exchange-spans",
    "ep2-expert_major-cast-1-local",
    "ep2x2-rings-bf16-0-local",
    "ep2-rings-cast-1-local",
    "ep2-rings-bf16-3-local",
    "ep2-rings-bf16-4-local",
    "ep2x2-rings-bf16-2-dispatch",
    "ep2x2-puts-bf16-2-local",
    "ep2x2-puts-bf16-7-local",
    "ep2x2-staged-bf16-1-local",
    "ep2x2-staged-bf16-2-local",
    "ep2x2-staged-bf16-3-local",
    "ep2x2-staged-bf16-6-local",
    "ep2x2-staged-bf16-7-local",
    "ep2x2-staged-bf16-8-local",
    "ep2x2-staged-bf16-9-local",
}
"""The variants that `make test` compiles: they have all kinds of accesses of each function."""

FILES = {version: order.path_of(version).read_text(encoding="utf-8") for version in order.PINNED}
NAMES = list(order.sections_of(FILES[order.PINNED[-1]]))


@functools.cache
def variants() -> dict[str, CompiledKernel]:
    return dict(order.variants())


@functools.cache
def sections() -> dict[str, tuple[str, str]]:
    """The file of the installed Triton."""
    if order.INSTALLED not in FILES:
        pytest.skip(f"order of Triton {', '.join(FILES)} is on file, and Triton {order.INSTALLED} is installed")
    return order.sections_of(FILES[order.INSTALLED])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=f"triton-{order.INSTALLED}-{name}", marks=[] if name in QUICK else pytest.mark.full)
        for name in NAMES
    ],
)
def test_the_order_is_as_on_file(name: str) -> None:
    kernel, lines = sections()[name]
    variant = variants()[name]
    assert variant.kernel.__name__ == kernel
    remedy = "`python tools/order.py --write` writes what is meant into"
    assert order.order_of(order.ptx_of(variant)) == lines, f"{remedy} {order.path_of(order.INSTALLED)}"


@pytest.mark.parametrize("version", order.PINNED)
def test_files_are_complete_and_as_they_are_written(version: str) -> None:
    found = order.sections_of(FILES[version])
    assert found.keys() == variants().keys()
    assert order.document_of({name: found[name] for name in variants()}) == FILES[version]


@pytest.mark.parametrize("version", order.PINNED)
def test_quick_variants_have_all_kinds_of_accesses(version: str) -> None:
    found = order.sections_of(FILES[version])
    quick = "".join(found[name][1] for name in QUICK)
    every = "".join(lines for _, lines in found.values())
    assert order.accesses_by_function(quick) == order.accesses_by_function(every)


def test_the_table_has_the_functions_that_order_accesses() -> None:
    rows = order.table_of(FILES[order.PINNED[-1]]).splitlines()
    assert any(row.startswith("| `post_all` (`primitives.py`) | `atom.global.sys.relaxed.exch.b32`") for row in rows)


def test_repeated_lines_are_folded() -> None:
    ptx = "ld.global.b32 %r1;\n@%p1 atom.global.sys.acquire.add.u32 %r2;\nst.shared.b32 [%r1];\n" * 3 + "bar.sync 0;\n"
    assert order.order_of(ptx) == "-: ld, " + "atom.global.sys.acquire.add.u32, ld, " * 2 + (
        "atom.global.sys.acquire.add.u32, bar.sync\n"
    )
