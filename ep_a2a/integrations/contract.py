"""Whether an installed engine has the names that its integration uses, read from its sources without importing it.

An integration's contract.toml lists the names by what the integration does with them:

used: must be there, defined or imported. A field may also be set in a method (`self.name = ...`).
called: must take the arguments of our call. Further parameters need a default.
wrapped: must have the parameters that our wrapper reads. The wrapper passes all arguments on.
overridden: must have exactly the known parameters, because the engine calls ours. Classes: no further abstract methods.
optional: may be missing.
"""

import ast
import functools
import inspect
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata, resources, util
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef

BY_FILE = ("used", "optional")
"""Roles whose entries are lists of names by file. Those of other roles are "file:name", with parameters."""

Table = dict[str, dict[str, Any]]


def read_table(integration: str) -> Table:
    """Returns the contract.toml of one of this package's integrations, "ep_a2a.integrations.vllm" for example."""
    return tomllib.loads(resources.files(integration).joinpath("contract.toml").read_text("utf-8"))


def symbols(table: Table, role: str) -> dict[str, str]:
    """Returns the names of a role as "file:name", the file in the engine's package, each with its parameters or ""."""
    names = table.get(role, {})
    if role not in BY_FILE:
        return names
    return {f"{path}:{name}": "" for path, each in names.items() for name in each}


def differences(package: Path, table: Table) -> list[str]:
    """Returns a sentence for each name that an installed or unpacked engine lacks or that has changed too much.

    Args:
        package: the engine's folder, named as its package.
        table: of the integration.
    """
    found = []
    for role, judge in JUDGES.items():
        for symbol, wanted in symbols(table, role).items():
            path, _, name = symbol.partition(":")
            node = find(package / path, name)
            if node is None:
                found.append(f"{package.name}/{path} has no {name}")
            elif problem := judge(node, wanted):
                found.append(f"{name} of {package.name}/{path} {problem}")
    return found


def folder_of(package: str) -> Path | None:
    """Returns the folder of an installed package, which is not imported; None where there is none."""
    spec = util.find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def version_of(*distributions: str) -> str:
    """Returns the version of the first of these that is installed, or "unknown" (a source tree has none)."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def find(path: Path, name: str) -> ast.AST | None:
    """Returns the definition of a function, a class, an assigned name or a member ("Class.name") of a file, or None."""
    names = _definitions(path)
    owner, _, field = name.rpartition(".")
    if name in names or owner not in names:
        return names.get(name)
    return next((each for each in ast.walk(names[owner]) if field in _fields_of_self(each)), None)


@functools.lru_cache(maxsize=64)
def _definitions(path: Path) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in _statements(ast.parse(path.read_bytes()).body) if path.exists() else ():
        found |= _named(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": each for child in node.body for name, each in _named(child).items()}
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements of a module, those inside `if` and `try`, too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _named(node: ast.stmt) -> dict[str, ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name: node}
    if isinstance(node, ast.ImportFrom):
        return {each.asname or each.name: node for each in node.names}
    return {target.id: node for target in _targets(node) if isinstance(target, ast.Name)}


def _fields_of_self(node: ast.AST) -> list[str]:
    targets = (each for each in _targets(node) if isinstance(each, ast.Attribute))
    return [each.attr for each in targets if isinstance(each.value, ast.Name) and each.value.id == "self"]


def _targets(node: ast.AST) -> list[Any]:
    return node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]


def signature_of(node: Function) -> inspect.Signature:
    """Returns the signature of a function's source; parameters with a default have None there."""
    arguments, kinds = node.args, inspect.Parameter
    by_place = [*arguments.posonlyargs, *arguments.args]
    num_required = len(by_place) - len(arguments.defaults)
    parameters = [
        kinds(each.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if place < num_required else None)
        for place, each in enumerate(by_place)
    ]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        parameters.append(kinds(each.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _text_of(node: ast.AST) -> str:
    """Returns the names of a function's parameters, "property", or "no plain function"."""
    if not isinstance(node, ast.FunctionDef):
        return "no plain function"
    if _has_decorator(node, "property"):
        return "property"
    names = [each.replace(default=inspect.Parameter.empty) for each in signature_of(node).parameters.values()]
    return str(inspect.Signature(names))[1:-1]


def _has_decorator(node: Function, name: str) -> bool:
    return any(name in (getattr(each, "id", None), getattr(each, "attr", None)) for each in node.decorator_list)


def _judge_call(node: ast.AST, call: str) -> str:
    if not isinstance(node, ast.FunctionDef):
        return "is no plain function"
    arguments = [each for each in call.split(", ") if each]
    keywords = {each.removesuffix("="): None for each in arguments if each.endswith("=")}
    try:
        signature_of(node).bind(*arguments[: len(arguments) - len(keywords)], **keywords)
    except TypeError as error:
        return f"cannot be called with ({call}): {error}"
    return ""


def _judge_wrapper(node: ast.AST, names: str) -> str:
    if not isinstance(node, ast.FunctionDef):
        return "is no plain function"
    lacking = set(filter(None, names.split(", "))) - set(_text_of(node).split(", "))
    return f"takes ({_text_of(node)}), without {', '.join(sorted(lacking))}" if lacking else ""


def _judge_override(node: ast.AST, wanted: str) -> str:
    if isinstance(node, ast.ClassDef):
        methods = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        abstract = {each.name for each in methods if _has_decorator(each, "abstractmethod")}
        new = sorted(abstract - set(wanted.split(", ")))
        return f"has abstract methods that ep_a2a lacks: {', '.join(new)}" if new else ""
    return "" if _text_of(node) == wanted else f"takes ({_text_of(node)}) instead of ({wanted})"


JUDGES: dict[str, Callable[[ast.AST, str], str]] = {
    "used": lambda *_: "",
    "called": _judge_call,
    "wrapped": _judge_wrapper,
    "overridden": _judge_override,
}
"""By role: returns what is wrong with a name's definition, or ""."""
