"""The symbols of vLLM that this integration uses, and a reader of their signatures that does not import vLLM.

signatures.json lists the symbols, each with its signatures by version; tools/vllm_signatures.py writes it.
"""

from __future__ import annotations

import ast
import functools
import json
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "signatures.json"
VERSIONS = "versions"
"""Key of the file's list of versions. All other keys are symbols."""

_TABLE: dict[str, object] = json.loads(resources.files(__package__).joinpath(FILE_NAME).read_text())
SYMBOLS = tuple(key for key in _TABLE if key != VERSIONS)
"""Symbols as "file:name", the file in the package vllm. A function is compared by its parameters, anything else by its
presence."""

OPTIONAL = ("v1/engine/",)
"""Beginnings of files whose symbols may differ: without them only the text of errors is poorer (engine_error)."""

MISSING = "missing"


def read_signatures(package: Path) -> dict[str, str]:
    """Returns the signature of each of SYMBOLS in an installed or unpacked vLLM.

    Args:
        package: the folder `vllm`.

    Returns:
        By "file:name": the parameter names of a function ("self, a1, ..."), "there" for other names, or MISSING.
    """
    split = ((symbol, *symbol.split(":")) for symbol in SYMBOLS)
    return {symbol: _signature(_definitions(package / path), name) for symbol, path, name in split}


def _signature(definitions: dict[str, ast.AST], name: str) -> str:
    node = definitions.get(name)
    if node is None:
        return MISSING
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or any(
        _is_property(each) for each in node.decorator_list
    ):
        return "there"
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg or arguments.kwonlyargs:
        names.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    names += [each.arg for each in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ", ".join(names)


def _is_property(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "property"


@functools.lru_cache(maxsize=64)
def _definitions(path: Path) -> dict[str, ast.AST]:
    """Returns functions, classes and assigned names of a file; members of a class as "Class.name"."""
    if not path.exists():
        return {}
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text()).body:
        found |= _named(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": each for child in node.body for name, each in _named(child).items()}
    return found


def _named(node: ast.stmt) -> dict[str, ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name: node}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id: node for target in targets if isinstance(target, ast.Name)}
