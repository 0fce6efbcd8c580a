"""Calls of other projects' libraries in this package's managers, read from the managers' source.

By convention a library's modules are held in variables of their names, what a manager got from it in `native...` or
`self._native...`, and single functions are imported where they are used: whatever is called on these is a call of the
library.
"""

import ast
import functools
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

MANAGERS = Path(__file__).parent.parent.parent / "ep_a2a" / "managers" / "external"
PINNED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("pinned.toml").read_text(encoding="utf-8"))
MODULES = ("mori", "deep_ep", "nvshmem", "pplx_kernels")
CALLED_FIELDS = "got"
"""The variable of what a call has returned as an object with fields."""


class Call(NamedTuple):
    """One call of a library.

    Attributes:
        num_positional, keywords: its arguments; those of a `**dictionary` count as keywords.
        num_taken: names that its result is unpacked into; None where it is not.
    """

    num_positional: int
    keywords: tuple[str, ...]
    num_taken: int | None


@functools.cache
def nodes_of(module: str) -> list[ast.AST]:
    """All nodes of `managers/external/<module>.py`."""
    return list(ast.walk(ast.parse((MANAGERS / f"{module}.py").read_text(encoding="utf-8"))))


def calls_of(module: str) -> dict[str, list[Call]]:
    """All calls of libraries in a manager's module, by what is called, as the source spells it."""
    imported = {name for _, name in imports_of(module)}
    unpacked = {
        id(node.value): len(node.targets[0].elts)
        for node in nodes_of(module)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    }
    found: dict[str, list[Call]] = {}
    for node in nodes_of(module):
        if isinstance(node, ast.Call) and _is_native(node.func, imported):
            keywords = tuple(name for each in node.keywords for name in _names(each, module))
            call = Call(len(node.args), keywords, unpacked.get(id(node)))
            found.setdefault(ast.unparse(node.func), []).append(call)
    return found


def attributes_of(module: str, roots: tuple[str, ...] = ("native", "handle")) -> dict[str, set[str]]:
    """Attributes that are read, not called, of objects of a library, by the object as the source spells it."""
    called = {id(node.func) for node in nodes_of(module) if isinstance(node, ast.Call)}
    found: dict[str, set[str]] = {}
    for node in nodes_of(module):
        if isinstance(node, ast.Attribute) and id(node) not in called and isinstance(node.ctx, ast.Load):
            root = ast.unparse(node.value)
            if root.removeprefix("self._").startswith(roots):
                found.setdefault(root, set()).add(node.attr)
    return found


def _is_native(function: ast.expr, imported: set[str]) -> bool:
    if isinstance(function, ast.Name):
        return function.id in imported
    if not isinstance(function, ast.Attribute):
        return False
    root, *rest = ast.unparse(function).split(".")
    if root == "self":
        return len(rest) > 1 and rest[0].startswith("_native")
    return root in (*MODULES, *imported) or root.startswith("native")


def imports_of(module: str) -> list[tuple[str, str]]:
    """Names that a manager's module imports from a library, as (module, name)."""
    return [
        (node.module, alias.name)
        for node in nodes_of(module)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "flashinfer"
        for alias in node.names
    ]


def _names(keyword: ast.keyword, module: str) -> tuple[str, ...]:
    """The keyword's name; for `**dictionary` its keys, spelled if they are variables; "**" for `**function()`."""
    if keyword.arg is not None:
        return (keyword.arg,)
    if isinstance(keyword.value, ast.Call):
        return ("**",)
    if isinstance(keyword.value, ast.Dict):
        return tuple(ast.unparse(key) for key in keyword.value.keys if key is not None)
    wanted = ast.unparse(keyword.value)
    for node in nodes_of(module):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target  # type: ignore[attr-defined]
            if wanted == ast.unparse(target):
                return tuple(ast.literal_eval(key) for key in value.keys if key is not None)
    raise AssertionError(f"no dictionary for line {keyword.value.lineno}")
