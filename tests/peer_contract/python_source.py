"""Signatures and attributes of a library, read from its Python source without importing it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Signature:
    """What a call must fit.

    Attributes:
        parameters: names that can be passed by position or keyword, without self, in order.
        keyword_only: names that can be passed by keyword only.
        required: those of both without a default.
        num_returned: members of the tuple that it returns; None where the source does not say.
    """

    parameters: tuple[str, ...]
    keyword_only: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    num_returned: int | None = None

    def problems(self, num_positional: int, keywords: tuple[str, ...]) -> list[str]:
        """Why a call with that many positional arguments and these keywords does not fit; [] where it does."""
        found = []
        if num_positional > len(self.parameters):
            found.append(f"{num_positional} positional arguments for {self.parameters}")
        given = (*self.parameters[:num_positional], *keywords)
        found += [f"{name} twice" for name in keywords if name in self.parameters[:num_positional]]
        found += [f"no parameter {name}" for name in keywords if name not in (*self.parameters, *self.keyword_only)]
        return found + [f"{name} missing" for name in sorted(self.required - set(given))]


def signature_of(path: Path, name: str) -> Signature:
    """The signature of `function`, `Class.method` or `Class` (its constructor, or its fields if a dataclass)."""
    found = find(path, name)
    if isinstance(found, ast.ClassDef):
        init = next(
            (each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None
        )
        return _of_fields(found) if init is None else _of_function(init, is_method=True)
    is_static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in found.decorator_list)
    return _of_function(found, is_method="." in name and not is_static)


def find(path: Path, name: str) -> ast.FunctionDef | ast.ClassDef:
    """The definition of a function, a class, or a method `Class.method`."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    found: ast.FunctionDef | ast.ClassDef | None = None
    for part in name.split("."):
        found = next(
            (each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == part), None
        )
        assert found is not None, f"no {name} in {path}"
        body = found.body
    assert found is not None
    return found


def field_defaults(path: Path, name: str) -> dict[str, str | None]:
    """Fields of a dataclass in order, with their defaults' source; None for none."""
    found = find(path, name)
    return {
        each.target.id: None if each.value is None else ast.unparse(each.value)
        for each in found.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def instance_attributes(path: Path, name: str) -> set[str]:
    """Attributes that a class's methods give `self`, and its own names."""
    found = find(path, name)
    own = {each.name for each in found.body if isinstance(each, ast.FunctionDef)}
    own |= set(field_defaults(path, name))
    return own | {
        target.attr
        for node in ast.walk(found)
        for target in _targets(node)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else (target,)
    elif isinstance(node, ast.AnnAssign):
        yield node.target


def _of_fields(found: ast.ClassDef) -> Signature:
    fields = [each for each in found.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    names = {each.target.id: each.value for each in fields if isinstance(each.target, ast.Name)}
    return Signature(tuple(names), required=frozenset(name for name, value in names.items() if value is None))


def _of_function(found: ast.FunctionDef, *, is_method: bool) -> Signature:
    args = found.args
    names = [each.arg for each in (*args.posonlyargs, *args.args)]
    required = set(names[: len(names) - len(args.defaults)])
    if is_method:
        required.discard(names.pop(0))
    keyword_only = [each.arg for each in args.kwonlyargs]
    required |= {name for name, default in zip(keyword_only, args.kw_defaults) if default is None}
    return Signature(tuple(names), tuple(keyword_only), frozenset(required), _num_returned(found))


def _num_returned(found: ast.FunctionDef) -> int | None:
    """Members of the tuple in the last return statement, or that the returned name was given."""
    tuples = {
        target.id: len(node.value.elts)
        for node in ast.walk(found)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    returns = [node.value for node in ast.walk(found) if isinstance(node, ast.Return)]
    last = returns[-1] if returns else None
    if isinstance(last, ast.Tuple):
        return len(last.elts)
    return tuples.get(last.id) if isinstance(last, ast.Name) else None
