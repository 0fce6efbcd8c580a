"""Signatures of a library, read from its Python source without importing it."""

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path

from tests.signatures.reader import definitions, parameters


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
    found = definitions(ast.parse(path.read_text(encoding="utf-8")))
    made, is_method = found[name], "." in name
    if isinstance(made, ast.ClassDef):
        if f"{name}.__init__" not in found:
            fields = [each for each in made.body if isinstance(each, ast.AnnAssign)]
            return Signature(
                parsed(", ".join(f"{ast.unparse(each.target)}{'=0' if each.value else ''}" for each in fields))
            )
        made, is_method = found[f"{name}.__init__"], True
    assert isinstance(made, ast.FunctionDef), f"no function {name} in {path}"
    args = made.args
    args.defaults = [ast.Constant(0) for _ in args.defaults]
    args.kw_defaults = [default and ast.Constant(0) for default in args.kw_defaults]
    if is_method and "staticmethod" not in map(ast.unparse, made.decorator_list):
        del args.args[0]
    return Signature(parsed(parameters(args)), _num_returned(made))


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
