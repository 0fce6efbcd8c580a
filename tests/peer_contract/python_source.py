"""Signatures and attributes of a library, read from its Python source without importing it."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Signature:
    """What a call must fit: its parameters, and the members of the tuple that it returns, None for unknown."""

    parameters: inspect.Signature
    num_returned: int | None = None

    @property
    def positional(self) -> tuple[str, ...]:
        """Names that can be passed by position."""
        return tuple(each.name for each in self.parameters.parameters.values() if each.kind < each.KEYWORD_ONLY)

    def problem(self, num_positional: int, keywords: tuple[str, ...]) -> str:
        """Why a call with that many positional arguments and these keywords does not fit; "" where it does."""
        try:
            self.parameters.bind(*range(num_positional), **dict.fromkeys(keywords))
        except TypeError as error:
            return str(error)
        return ""


def parsed(parameters: str) -> inspect.Signature:
    """Of parameters as Python writes them, without annotations."""
    return inspect.signature(eval(f"lambda {parameters}: None"))


def signature_of(path: Path, name: str) -> Signature:
    """The signature of `function`, `Class.method` or `Class` (its constructor, or its fields if a dataclass)."""
    found = find(path, name)
    is_method = "." in name
    if isinstance(found, ast.ClassDef):
        inits = [each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        if not inits:
            fields = field_defaults(path, name).items()
            return Signature(parsed(", ".join(each if default is None else f"{each}=0" for each, default in fields)))
        found, is_method = inits[0], True
    args = found.args
    for node in ast.walk(args):
        if isinstance(node, ast.arg):
            node.annotation = None
    args.defaults = [ast.Constant(0) for _ in args.defaults]
    args.kw_defaults = [default and ast.Constant(0) for default in args.kw_defaults]
    if is_method and "staticmethod" not in map(ast.unparse, found.decorator_list):
        del args.args[0]
    return Signature(parsed(ast.unparse(args)), _num_returned(found))


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
