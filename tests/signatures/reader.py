"""Facts of other projects' sources that ours stand on, read by a parser: names, parameters, defaults, keys.

    python -m tests.signatures.reader mori FOLDER VERSION     an unpacked amd-mori wheel
    python -m tests.signatures.reader aiter FOLDER COMMIT     a checkout of ROCm/aiter
    python -m tests.signatures.reader atom FOLDER COMMIT      a checkout of ROCm/ATOM

renew tests/signatures/<name>.json: of mori all public names, of the others the names that the table has. To read one
more, add it with any text: "name", "function:what in its body", or "text what"; see `describe`. Nothing of these
projects is imported or kept but such facts. "later" in a table names what was read in another commit.
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

from ep_a2a.integrations import contract

FOLDER = Path(__file__).parent
MISSING = "missing"

KERNEL_TYPES = "mori/_jit-sources/include/mori/ops/dispatch_combine/dispatch_combine.hpp"
MORI_MODULES = ("ops/dispatch_combine", "ops/local_expert_count", "shmem/api", "shmem/tensor_utils")
"""Of these all public names are read."""


def describe(path: Path, symbol: str) -> str:
    """A symbol of a file in words that differ when what we use of it does; MISSING where it is not there.

    A function is its parameters with their defaults, a property "property" or "property with setter", a field its
    default, another attribute "attribute".
    """
    name, _, detail = symbol.partition(":")
    if detail:
        function = contract.find(path, name)
        return MISSING if function is None else _in_body(function, detail)
    if symbol.endswith(" choices"):
        return _choices(ast.parse(path.read_text()), symbol.removesuffix(" choices"))
    if symbol.endswith(" variable"):
        return _keyed(ast.parse(path.read_text()), symbol.removesuffix(" variable"))
    return _describe(contract.find(path, name))


def _describe(node: ast.AST | None) -> str:
    if isinstance(node, ast.FunctionDef):
        kinds = [ast.unparse(each) for each in node.decorator_list]
        if any(kind.endswith(".setter") for kind in kinds):
            return "property with setter"
        return "property" if "property" in kinds else parameters(node.args)
    if isinstance(node, ast.ClassDef):
        return "class"
    if not isinstance(node, ast.AnnAssign | ast.Assign):
        return MISSING
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    if isinstance(target, ast.Attribute):
        return "attribute"
    return f"field = {ast.unparse(node.value)}" if node.value is not None else "field"


def parameters(arguments: ast.arguments) -> str:
    """Names, order, kinds and defaults; not annotations."""
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.unparse(arguments)


def _in_body(function: ast.AST, detail: str) -> str:
    subject, _, kind = detail.rpartition(" ")
    if kind == "calls":
        calls = [
            f"{len(each.args)} positional; {', '.join(str(one.arg or '**') for one in each.keywords)}".rstrip("; ")
            for each in ast.walk(function)
            if isinstance(each, ast.Call) and ast.unparse(each.func).rpartition(".")[2] == subject
        ]
        return " | ".join(calls) or MISSING
    keys: list[str] = []
    for each in ast.walk(function):
        if subject == "returned" and isinstance(each, ast.Return) and isinstance(each.value, ast.Dict):
            keys += [ast.literal_eval(key) for key in each.value.keys if key is not None]
        elif isinstance(each, ast.Assign) and ast.unparse(each.targets[0]).startswith(subject):
            if isinstance(each.value, ast.Dict):
                keys += [ast.literal_eval(key) for key in each.value.keys if key is not None]
            elif isinstance(each.targets[0], ast.Subscript):
                keys.append(ast.literal_eval(each.targets[0].slice))
    return ", ".join(keys) or MISSING


def _choices(tree: ast.Module, option: str) -> str:
    for each in ast.walk(tree):
        if isinstance(each, ast.Call) and each.args and ast.unparse(each.args[0]) == repr(option):
            wanted = [one for one in each.keywords if one.arg in ("choices", "const", "default")]
            return ", ".join(f"{one.arg}={ast.unparse(one.value)}" for one in wanted)
    return MISSING


def _keyed(tree: ast.Module, key: str) -> str:
    """The default text of an environment variable in a table of functions that read them."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Dict):
            for name, value in zip(each.keys, each.values):
                if name is not None and ast.unparse(name) == repr(key):
                    call = next(one for one in ast.walk(value) if isinstance(one, ast.Call))
                    return f"default {ast.unparse(call.args[1])}"
    return MISSING


def read_symbols(project: str, folder: Path) -> dict[str, dict[str, str]]:
    """What the symbols that a project's table names look like in a checkout."""
    return {
        path: {name: describe(folder / path, name) for name in names} for path, names in load(project)["files"].items()
    }


def read_mori(folder: Path) -> dict[str, Any]:
    """Public names of MORI_MODULES, and the enumerations, of an unpacked wheel."""
    modules = {name: _public(folder / "mori" / f"{name}.py") for name in MORI_MODULES}
    return {"modules": modules, "enums": _enums((folder / KERNEL_TYPES).read_text())}


def _public(path: Path) -> dict[str, str]:
    names = [name for name in contract._definitions(path) if not re.search(r"\b_(?!_init__)", name)]
    found = {name: describe(path, name) for name in [*names, "EpDispatchCombineOp.local_expert_count"]}
    return {name: text for name, text in found.items() if text != MISSING and name != "logger"}


def _enums(header: str) -> dict[str, dict[str, int]]:
    found = re.findall(r"enum (?:class )?(KernelType|QuantType) \{(.*?)\}", header, re.DOTALL)
    return {name: {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", body)} for name, body in found}


def load(project: str) -> dict[str, Any]:
    """The pinned facts."""
    table: dict[str, Any] = json.loads((FOLDER / f"{project}.json").read_text())
    return table


def main(project: str, folder: str, version: str) -> None:
    """Writes a table."""
    facts = read_mori(Path(folder)) if project == "mori" else {"files": read_symbols(project, Path(folder))}
    source = {"mori": "amd-mori on PyPI", "aiter": "ROCm/aiter on GitHub", "atom": "ROCm/ATOM on GitHub"}[project]
    table = {"source": source, "version": version, **facts}
    (FOLDER / f"{project}.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
