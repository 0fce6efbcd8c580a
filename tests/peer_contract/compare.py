"""Compares the managers' calls with libraries' sources: a line for each name that does not fit.

Standard library only, for tools/release.py. Nothing of the libraries is imported.
"""

import ast
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.peer_contract.calls import CALLED_FIELDS, PINNED, Call, attributes_of, calls_of, imports_of
from tests.peer_contract.python_source import Signature, parsed, signature_of
from tests.signatures.reader import MISSING, describe
from tests.wheels import Release, Unavailable, newest


def wheel_of(library: str, version: str = "") -> Release:
    """The wheel that has a library's sources; of no version: its newest."""
    entry = PINNED[library]
    return Release(entry["package"], version, tuple(entry["below"]), tuple(entry["suffixes"]))


def pinned(library: str, name: str) -> Signature:
    """The signature that was read at the pinned commit."""
    entry = next(each for each in PINNED[library]["function"] if each["name"] == name)
    return Signature(parsed(", ".join(each.replace("=", "=0") for each in entry["parameters"])), entry.get("returned"))


def _expected(library: str, name: str) -> tuple[str, tuple[str, ...]]:
    """The file of a function, and the names that may be passed by position."""
    entry: dict[str, Any] = PINNED[library]
    if "functions" in entry:
        file, *positional = entry["functions"][name]
        return file, tuple(positional)
    found = next(each for each in entry["function"] if each["name"] == name)
    return found["file"], pinned(library, name).positional


def problems(library: str, folder: Path) -> Iterator[str]:
    """What in a library's sources does not fit what its manager calls, a line each."""
    calls, targets = calls_of(library), PINNED[library]["calls"]
    for spelled in sorted(set(calls) ^ set(targets)):
        yield f"{spelled}: not both in managers/external/{library}.py and in pinned.toml"
    for module, name in imports_of(library):
        if not has(folder, module, name):
            yield f"{module}.{name}: is not there"
    for name, made in _calls_by_function(calls, targets).items():
        file, positional = _expected(library, name)
        if file.endswith(".hpp"):
            if not _defines(folder / file, name.rpartition(".")[2]):
                yield f"{name}: is not in {file}"
            continue
        try:
            signature = signature_of(folder / file, name)
        except (FileNotFoundError, KeyError):
            yield f"{name}: is not in {file}"
            continue
        either = PINNED[library].get("either", {})
        misfits = [each for call in made for each in _misfits(call, signature, positional, either)]
        yield from dict.fromkeys(f"{name}: {each}" for each in misfits)
    for name, (file, *fields) in PINNED[library].get("fields", {}).items():
        if sorted(fields) != sorted(attributes_of(library, (CALLED_FIELDS,)).get(CALLED_FIELDS, ())):
            yield f"{name}: pinned.toml has other fields than managers/external/{library}.py reads"
        path = folder / file
        tree = ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")
        yield from (
            f"{name}.{each}: is not in {file}" for each in fields if describe(tree, f"{name}.{each}") == MISSING
        )


def _calls_by_function(calls: dict[str, list[Call]], targets: dict[str, list[str]]) -> dict[str, list[Call]]:
    by_function: dict[str, list[Call]] = {}
    for spelled in set(calls) & set(targets):
        for name in targets[spelled]:
            by_function.setdefault(name, []).extend(calls[spelled])
    return dict(sorted(by_function.items()))


def _misfits(
    call: Call, signature: Signature, positional: tuple[str, ...], either: dict[str, list[str]]
) -> Iterator[str]:
    got = signature.positional[: call.num_positional]
    if got != positional[: call.num_positional]:
        yield f"takes {', '.join(got) or 'nothing'} by position, not {', '.join(positional[: call.num_positional])}"
    known = signature.parameters.parameters
    choices = [either.get(each, [each]) for each in call.keywords]
    keywords = tuple(next((name for name in names if name in known), names[0]) for names in choices)
    if problem := signature.problem(call.num_positional, keywords):
        yield problem
    if None not in (signature.num_returned, call.num_taken) and signature.num_returned != call.num_taken:
        yield f"returns {signature.num_returned} members, not {call.num_taken}"


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
