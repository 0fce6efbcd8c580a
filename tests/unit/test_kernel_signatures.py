"""Device code takes few parameters, and reads compile-time tuples by the names of their fields."""

import ast
from collections.abc import Iterator
from pathlib import Path

import ep_a2a

KERNELS = Path(ep_a2a.__file__).parent / "kernels"
MAX_PARAMETERS = 20


def functions_of_kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """(where it is, function) of every function in ep_a2a/kernels."""
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.name}: {node.name}", node


def parameters_of(function: ast.FunctionDef) -> list[ast.arg]:
    """All parameters that have names."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def numbered_constants(function: ast.FunctionDef) -> list[str]:
    """Where a function indexes a parameter that is a `tl.constexpr` by a number."""
    constants = {
        one.arg for one in parameters_of(function) if one.annotation and ast.unparse(one.annotation) == "tl.constexpr"
    }
    return [
        ast.unparse(node)
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in constants
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, int)
    ]


def test_no_function_has_many_parameters() -> None:
    counts = {where: len(parameters_of(function)) for where, function in functions_of_kernels()}
    assert len(counts) > 100
    assert {where: count for where, count in counts.items() if count > MAX_PARAMETERS} == {}


def test_no_compile_time_tuple_is_indexed_by_number() -> None:
    found = {where: numbered_constants(function) for where, function in functions_of_kernels()}
    assert {where: places for where, places in found.items() if places} == {}


def test_an_index_is_found() -> None:
    (function,) = ast.parse("def f(row, ROW: tl.constexpr):\n    return row[0] + ROW.WIDTH + ROW[1]").body
    assert numbered_constants(function) == ["ROW[1]"]
