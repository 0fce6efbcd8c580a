"""Compares the managers' calls with libraries' sources: a line for each name that does not fit.

Standard library only, for tools/release.py. Nothing of the libraries is imported.
"""

import ast
import inspect
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ep_a2a.integrations import contract
from tests.peer_contract.calls import CALLED_FIELDS, PINNED, Call, attributes_of, calls_of, imports_of
from tests.wheels import Release, Unavailable, newest


class Function(NamedTuple):
    """What a call must fit: its parameters, and the members of the tuple that it returns, None for unknown."""

    parameters: inspect.Signature
    num_returned: int | None = None

    @property
    def positional(self) -> tuple[str, ...]:
        """Names that can be passed by position."""
        return tuple(each.name for each in self.parameters.parameters.values() if each.kind < each.KEYWORD_ONLY)


def wheel_of(library: str, version: str = "") -> Release:
    """The wheel that has a library's sources; of no version: its newest."""
    entry = PINNED[library]
    return Release(entry["package"], version, tuple(entry["below"]), tuple(entry["suffixes"]))


def _expected(library: str, name: str) -> tuple[str, tuple[str, ...], Function | None]:
    """The file of a function, the names that may be passed by position, and the function as it was read, if it was."""
    if "functions" in PINNED[library]:
        file, *positional = PINNED[library]["functions"][name]
        return file, tuple(positional), None
    (entry,) = (each for each in PINNED[library]["function"] if each["name"] == name)
    parameters = ", ".join(each.replace("=", "=0") for each in entry["parameters"])
    read = Function(inspect.signature(eval(f"lambda {parameters}: None")), entry.get("returned"))
    return entry["file"], read.positional, read


def function_of(path: Path, name: str) -> Function | None:
    """Reads `function`, `Class.method` or `Class` (its constructor, or its fields if a dataclass) from a source."""
    node, is_method = contract.find(path, name), "." in name
    if isinstance(node, ast.ClassDef):
        constructor = contract.find(path, f"{name}.__init__")
        if constructor is None:
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            named = [f"{ast.unparse(each.target)}{'=0' if each.value else ''}" for each in fields]
            return Function(inspect.signature(eval(f"lambda {', '.join(named)}: None")))
        node, is_method = constructor, True
    if not isinstance(node, ast.FunctionDef):
        return None
    signature = contract.signature_of(node)
    if is_method and "staticmethod" not in map(ast.unparse, node.decorator_list):
        signature = signature.replace(parameters=[*signature.parameters.values()][1:])
    return Function(signature, _num_returned(node))


def _num_returned(found: ast.FunctionDef) -> int | None:
    """Members of the tuple in the last return statement, or that the returned name was given."""
    returns = [node.value for node in ast.walk(found) if isinstance(node, ast.Return)]
    last = returns[-1] if returns else None
    for node in ast.walk(found):
        if isinstance(last, ast.Name) and isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            last = node.value if last.id in map(ast.unparse, node.targets) else last
    return len(last.elts) if isinstance(last, ast.Tuple) else None


def problems(library: str, folder: Path | None = None) -> Iterator[str]:
    """What in a library's sources, or in the pinned functions, does not fit what its manager calls, a line each."""
    calls, entry = calls_of(library), PINNED[library]
    for spelled in sorted(set(calls) ^ set(entry["calls"])):
        yield f"{spelled}: not both in managers/external/{library}.py and in pinned.toml"
    for module, name in imports_of(library):
        if folder and not has(folder, module, name):
            yield f"{module}.{name}: is not there"
    made: dict[str, list[Call]] = {}
    for spelled in set(calls) & set(entry["calls"]):
        for name in entry["calls"][spelled]:
            made.setdefault(name, []).extend(calls[spelled])
    for name in sorted(made):
        file, positional, function = _expected(library, name)
        if folder and file.endswith(".hpp"):
            function = function if _defines(folder / file, name.rpartition(".")[2]) else None
        elif folder:
            function = function_of(folder / file, name)
        if function is None:
            yield f"{name}: is not in {file}"
            continue
        misfits = [
            each for call in made[name] for each in _misfits(call, function, positional, entry.get("either", {}))
        ]
        yield from dict.fromkeys(f"{name}: {each}" for each in misfits)
    for name, (file, *fields) in entry.get("fields", {}).items():
        if sorted(fields) != sorted(attributes_of(library, (CALLED_FIELDS,)).get(CALLED_FIELDS, ())):
            yield f"{name}: pinned.toml has other fields than managers/external/{library}.py reads"
        lacking = [each for each in fields if folder and contract.find(folder / file, f"{name}.{each}") is None]
        yield from (f"{name}.{each}: is not in {file}" for each in lacking)


def _misfits(
    call: Call, function: Function, positional: tuple[str, ...], either: dict[str, list[str]]
) -> Iterator[str]:
    got, wanted = (names[: call.num_positional] for names in (function.positional, positional))
    if got != wanted:
        yield f"takes {', '.join(got) or 'nothing'} by position, not {', '.join(wanted)}"
    known = function.parameters.parameters
    choices = [either.get(each, [each]) for each in call.keywords]
    keywords = [next((name for name in names if name in known), names[0]) for names in choices]
    try:
        function.parameters.bind(*range(call.num_positional), **dict.fromkeys(keywords))
    except TypeError as error:
        yield str(error)
    if None not in (function.num_returned, call.num_taken) and function.num_returned != call.num_taken:
        yield f"returns {function.num_returned} members, not {call.num_taken}"


def has(folder: Path, module: str, name: str) -> bool:
    """Whether a module of a library's sources defines a name, or imports it by name or from its module api."""
    base = folder / module.replace(".", "/")
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if "from .api import *" in text:
        text += (base / "api.py").read_text(encoding="utf-8")
    return re.search(rf"\b{name}\b", text) is not None


def _defines(path: Path, name: str) -> bool:
    return path.exists() and re.search(rf"\b{name}\s*\(", path.read_text(encoding="utf-8")) is not None


def _newest_sources(library: str, folder: Path) -> str:
    """Puts the newest sources of a library into a folder; returns their version.

    Raises:
        Unavailable: they cannot be had.
    """
    if "package" in PINNED[library]:
        return newest(wheel_of(library), folder)
    repository = PINNED[library]["repository"]
    try:
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", repository, folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"git cannot clone {repository}: {getattr(error, 'stderr', b'').decode() or error}") from None
    head = subprocess.run(["git", "-C", folder, "rev-parse", "--short", "HEAD"], check=True, capture_output=True)
    return head.stdout.decode().strip()


def newest_problems() -> tuple[list[str], list[str]]:
    """What does not fit the newest sources of all libraries, and what could not be compared: a line each."""
    misfits, missing = [], []
    for library, entry in PINNED.items():
        what = entry.get("package", library)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "sources"
            try:
                version = _newest_sources(library, folder)
            except Unavailable as problem:
                missing.append(f"{what}: {problem}")
            else:
                misfits += [f"{what} {version}: {line}" for line in problems(library, folder)]
    return misfits, missing
