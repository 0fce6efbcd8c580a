"""Calls of other projects' libraries in this package's managers, read from the managers' source.

By convention a library's modules are held in variables of their names, what a manager got from it in `native...` or
`self._native...`, and single functions are imported where they are used: whatever is called on these is a call of the
library.
"""

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANAGERS = Path(__file__).parent.parent.parent / "ep_a2a" / "managers" / "external"
PINNED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("pinned.toml").read_text(encoding="utf-8"))
MODULES = ("mori", "deep_ep", "nvshmem", "pplx_kernels")
CALLED_FIELDS = "got"
"""The variable of what a call has returned as an object with fields."""


@dataclass(frozen=True)
class Call:
    """One call of a library.

    Attributes:
        line: in the manager's file.
        num_positional, keywords: its arguments; those of a `**dictionary` count as keywords.
        num_taken: names that its result is unpacked into; None where it is not.
    """

    line: int
    num_positional: int
    keywords: tuple[str, ...]
    num_taken: int | None


def calls_of(module: str) -> dict[str, list[Call]]:
    """All calls of libraries in `managers/<module>.py`, by what is called, as the source spells it."""
    tree = ast.parse((MANAGERS / f"{module}.py").read_text(encoding="utf-8"))
    imported, unpacked = {name for _, name in imports_of(module)}, _unpacked(tree)
    found: dict[str, list[Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_native(node.func, imported):
            keywords = tuple(name for each in node.keywords for name in _names(each, tree))
            call = Call(node.lineno, len(node.args), keywords, unpacked.get(id(node)))
            found.setdefault(_spelled(node.func), []).append(call)
    return found


def attributes_of(module: str, roots: tuple[str, ...] = ("native", "handle")) -> dict[str, set[str]]:
    """Attributes that are read, not called, of objects of a library, by the object as the source spells it."""
    tree = ast.parse((MANAGERS / f"{module}.py").read_text(encoding="utf-8"))
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in called and isinstance(node.ctx, ast.Load):
            root = _spelled(node.value)
            if root.removeprefix("self._").startswith(roots):
                found.setdefault(root, set()).add(node.attr)
    return found


def _is_native(function: ast.expr, imported: set[str]) -> bool:
    if isinstance(function, ast.Name):
        return function.id in imported
    if not isinstance(function, ast.Attribute):
        return False
    spelled = _spelled(function)
    root = spelled.split(".")[0]
    if root == "self":
        return spelled.count(".") > 1 and spelled.split(".")[1].startswith("_native")
    return root in (*MODULES, *imported) or root.startswith("native")


def _spelled(node: ast.expr) -> str:
    return ast.unparse(node)


def imports_of(module: str) -> list[tuple[str, str]]:
    """Names that `managers/<module>.py` imports from a library, as (module, name)."""
    tree = ast.parse((MANAGERS / f"{module}.py").read_text(encoding="utf-8"))
    return [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "flashinfer"
        for alias in node.names
    ]


def _unpacked(tree: ast.Module) -> dict[int, int]:
    """Number of names by the call whose result they take."""
    return {
        id(node.value): len(node.targets[0].elts)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    }


def _names(keyword: ast.keyword, tree: ast.Module) -> tuple[str, ...]:
    """The keyword's name; for `**dictionary` its keys, spelled if they are variables; "**" for `**function()`."""
    if keyword.arg is not None:
        return (keyword.arg,)
    if isinstance(keyword.value, ast.Call):
        return ("**",)
    if isinstance(keyword.value, ast.Dict):
        return tuple(_spelled(key) for key in keyword.value.keys if key is not None)
    wanted = _spelled(keyword.value)
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target  # type: ignore[union-attr]
            if wanted == _spelled(target):
                return tuple(ast.literal_eval(key) for key in value.keys if key is not None)
    raise AssertionError(f"no dictionary for line {keyword.value.lineno}")
