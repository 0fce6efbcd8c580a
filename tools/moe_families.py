"""Writes the table with which `ep-a2a plan --vllm` sizes the MoE layers of vLLM's models, from vLLM's model files.

    python tools/moe_families.py FOLDER_OF_VLLM VERSION > ep_a2a/commands/plan/families.toml

FOLDER_OF_VLLM is the package's folder, of a wheel or a checkout; nothing of it is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ep_a2a.commands.plan.families import EXPERT_DTYPE_KEY, Family

if TYPE_CHECKING:
    from collections.abc import Iterator

REGISTRY = "vllm.model_executor.models.registry"
MODEL_PACKAGES = ("vllm.model_executor.models", "vllm.models")
PLATFORMS_LEFT_OUT = frozenset({"amd", "cpu", "tpu", "xpu"})
"""Subpackages of models for other accelerators than NVIDIA's."""
LAYERS = frozenset({"FusedMoEFactory", "FusedMoE", "SharedFusedMoE"})
"""Names that vLLM's releases call to make a MoE layer."""
LAYER_PARAMETERS = ("num_experts", "top_k", "hidden_size")
"""First parameters of those, in order."""
CONFIGS = frozenset(
    {"config", "hf_config", "hf_text_config", "text_config", "thinker_config", "llm_config", "language_config"}
)
"""Names of a model's config in vLLM's code; the last of them in a chain of attributes is the language model's."""
KEYS = ("hidden", "experts", "topk")


class ModelFiles:
    """The model files of one vLLM.

    Args:
        root: folder of the package `vllm`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, _Module | None] = {}

    @cached_property
    def architectures(self) -> dict[str, tuple[str, str]]:
        """By architecture: module and class. Empty where vLLM has no such registry."""
        found: dict[str, tuple[str, str]] = {}
        registry = self.module(REGISTRY)
        for node in ast.walk(registry.tree) if registry else ():
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    entry = [key, *value.elts] if isinstance(value, ast.Tuple) else []
                    match [_constant(each) for each in entry]:
                        case [str(name), str(module), str(class_name)]:
                            place = module if "." in module else f"{MODEL_PACKAGES[0]}.{module}"
                            found.setdefault(name, (place, class_name))
        return found

    def family(self, architecture: str) -> Family | None:
        """Returns how the MoE layers of an architecture are sized; None where it has none or these files do not say."""
        if architecture not in self.architectures:
            return None
        found = set(_Reading(self, *self.architectures[architecture]).families())
        family = found.pop() if len(found) == 1 else None
        return family if family and family.hidden and family.experts and family.topk else None

    def module(self, name: str) -> _Module | None:
        """Returns a parsed module of the package, None where there is none."""
        if name not in self._modules:
            self._modules[name] = self._parsed(name)
        return self._modules[name]

    def _parsed(self, name: str) -> _Module | None:
        path = self.root.joinpath(*name.split(".")[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                try:
                    tree = ast.parse(file.read_text(encoding="utf-8"))
                except (OSError, ValueError, SyntaxError, RecursionError):
                    return None
                return _Module(name, tree, is_package=file.name == "__init__.py")
        return None


@dataclass(eq=False)
class _Module:
    name: str
    tree: ast.Module
    is_package: bool

    @cached_property
    def definitions(self) -> dict[str, ast.AST]:
        """Classes, functions and assigned names of the module."""
        found: dict[str, ast.AST] = {}
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign):
                found |= {each.id: node for each in node.targets if isinstance(each, ast.Name)}
        return found

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """By local name: module and name there, for NVIDIA's GPUs where platforms differ."""
        found: dict[str, tuple[str, str]] = {}
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                parents = package[: len(package) + 1 - node.level] if node.level else []
                module = [*parents, *(node.module or "").split(".")]
                if not PLATFORMS_LEFT_OUT.intersection(module):
                    for each in node.names:
                        found.setdefault(each.asname or each.name, (".".join(filter(None, module)), each.name))
        return found


class _Place(NamedTuple):
    """A definition, and its module."""

    module: _Module
    node: ast.AST


class _Reading:
    """The MoE layers of one architecture: those nearest to its class, by what each class and function names."""

    def __init__(self, files: ModelFiles, module: str, name: str) -> None:
        self.files = files
        self.reached: dict[ast.AST, _Module] = {}
        start = self._definition(module, name)
        self._waiting = [start] if start else []

    def families(self) -> list[Family]:
        """Returns one for each layer of the nearest class that makes any."""
        for place in self._waiting:
            if place.node in self.reached:
                continue
            self.reached[place.node] = place.module
            if layers := [call for call in _calls(place.node) if _name_of(call.func) in LAYERS]:
                return [self._family(place, call) for call in layers]
            self._waiting += self._named(place)
        return []

    def _definition(self, module: str, name: str) -> _Place | None:
        """Follows imports among model files to a definition."""
        while module.startswith(MODEL_PACKAGES) and (parsed := self.files.module(module)):
            if name in parsed.definitions:
                return _Place(parsed, parsed.definitions[name])
            if name not in parsed.imports:
                return None
            module, name = parsed.imports[name]
        return None

    def _named(self, place: _Place) -> Iterator[_Place]:
        """Yields the definitions that a definition names; architectures as strings, too."""
        for node in _walk(place.node):
            if isinstance(node, ast.Name):
                named = (place.module.name, node.id)
            elif (text := _constant(node)) in self.files.architectures:
                named = self.files.architectures[text]
            else:
                continue
            if found := self._definition(*named):
                yield found

    def _family(self, place: _Place, call: ast.Call) -> Family:
        function = _function_around(place.node, call)
        given = dict(zip(LAYER_PARAMETERS, call.args, strict=False))
        for each in call.keywords:
            given |= {each.arg: each.value} if each.arg else _dict_by_name(each.value, function)
        experts, topk, hidden = (
            tuple(dict.fromkeys(self._keys(given.get(name), place, function))) for name in LAYER_PARAMETERS
        )
        shares = self._is_set(given.get("is_sequence_parallel"), place, function)
        return Family(hidden, experts, topk, shares, _expert_dtype(place.module))

    def _keys(
        self, value: ast.expr | None, place: _Place, function: ast.AST, seen: frozenset[Any] = frozenset()
    ) -> Iterator[str]:
        """Yields the keys of config.json that an expression takes its value from, the preferred one first."""
        if value is None or (value, place.node) in seen:
            return
        seen |= {(value, place.node)}
        chain = _chain(value)
        if key := ".".join(_behind_config(chain)):
            yield key
        elif chain[:1] == ["self"] and len(chain) == 2:
            for each, around in self._assigned(chain[1], place):
                yield from self._keys(each, place, around, seen)
        elif isinstance(value, ast.Name):
            for each, its_place, around in self._given(value.id, place, function):
                yield from self._keys(each, its_place, around, seen)
        else:
            for each in _parts(value):
                yield from self._keys(each, place, function, seen)

    def _is_set(self, value: ast.expr | None, place: _Place, function: ast.AST, depth: int = 4) -> bool:
        """Whether an option can be true for some parallel sizes."""
        if value is None or isinstance(value, ast.Constant) or depth == 0:
            return isinstance(value, ast.Constant) and value.value is True
        chain = _chain(value)
        if chain[:1] == ["self"] and len(chain) == 2:
            return any(self._is_set(each, place, around, depth - 1) for each, around in self._assigned(chain[1], place))
        if isinstance(value, ast.Name):
            given = self._given(value.id, place, function)
            return any(self._is_set(each, its_place, around, depth - 1) for each, its_place, around in given)
        return True

    def _assigned(self, attribute: str, place: _Place) -> Iterator[tuple[ast.expr, ast.AST]]:
        """Yields what a class assigns to `self.attribute`, each with the method around it."""
        for function in _walk(place.node):
            if isinstance(function, ast.FunctionDef):
                for target, value in _assignments(function):
                    if _chain(target) == ["self", attribute]:
                        yield value, function

    def _given(self, name: str, place: _Place, function: ast.AST) -> Iterator[tuple[ast.expr, _Place, ast.AST]]:
        """Yields the values of a name in a function: those assigned there, else those of callers for the parameter."""
        here = [value for target, value in _assignments(function) if isinstance(target, ast.Name) and target.id == name]
        yield from ((value, place, function) for value in here)
        parameters = _parameters(function)
        if here or name not in parameters or not isinstance(place.node, ast.ClassDef):
            return
        position = [*parameters].index(name)
        calls = [
            (_Place(module, node), call)
            for node, module in self.reached.items()
            for call in _calls(node)
            if _name_of(call.func) == place.node.name
        ]
        for its_place, call in calls:
            by_name = next((each.value for each in call.keywords if each.arg == name), None)
            by_position = call.args[position] if position < len(call.args) else None
            if (value := by_name or by_position or parameters[name]) is not None:
                yield value, its_place, _function_around(its_place.node, call)


@cache
def _walk(node: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(node))


def _expert_dtype(module: _Module) -> str | None:
    """Returns the default of `expert_dtype` where the file that makes the layer reads that key."""
    for call in _calls(module.tree):
        if _is_getattr(call) and _constant(call.args[1]) == EXPERT_DTYPE_KEY and call.args[2:]:
            return str(_constant(call.args[2]))
    return None


def _dict_by_name(value: ast.expr, function: ast.AST) -> dict[str, ast.expr]:
    """Returns the items of the `dict(...)` that a name in a function stands for."""
    for target, assigned in _assignments(function):
        if isinstance(value, ast.Name) and _chain(target) == [value.id] and isinstance(assigned, ast.Call):
            return {each.arg: each.value for each in assigned.keywords if each.arg}
    return {}


def _parts(value: ast.expr) -> list[ast.expr]:
    """Returns the expressions that one of several values comes from."""
    if isinstance(value, ast.IfExp):
        return [value.body, value.orelse]
    if isinstance(value, ast.BoolOp):
        return value.values
    if isinstance(value, ast.Subscript):
        return [value.value]
    return value.args if isinstance(value, ast.Call) else []


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in _walk(node) if isinstance(each, ast.Call))


def _constant(node: ast.AST | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _name_of(node: ast.expr) -> str:
    return (_chain(node) or [""])[-1]


def _chain(node: ast.expr) -> list[str]:
    """Returns the names of `a.b.c`, of `getattr(a.b, "c")`, too; [] for another expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        inner, name = node.value, node.attr
    elif isinstance(node, ast.Call) and _is_getattr(node):
        inner, name = node.args[0], _constant(node.args[1])
    else:
        return []
    return [*chain, name] if (chain := _chain(inner)) else []


def _is_getattr(call: ast.Call) -> bool:
    is_named = isinstance(call.func, ast.Name) and call.func.id == "getattr"
    return is_named and len(call.args) > 1 and isinstance(_constant(call.args[1]), str)


def _behind_config(chain: list[str]) -> list[str]:
    """Returns the names behind the last config in a chain of names, [] where there is no config."""
    last = max((index for index, name in enumerate(chain) if name in CONFIGS), default=len(chain))
    return chain[last + 1 :]


def _assignments(function: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in _walk(function):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value


def _parameters(function: ast.AST) -> dict[str, ast.expr | None]:
    """Returns a method's parameters behind self, each with its default; those by position first."""
    if not isinstance(function, ast.FunctionDef):
        return {}
    arguments = function.args
    names = [each.arg for each in arguments.args]
    defaults = [None] * (len(names) - len(arguments.defaults)) + list(arguments.defaults)
    by_position = dict(zip(names, defaults, strict=True))
    by_position.pop("self", None)
    return by_position | {
        each.arg: value for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }


def _function_around(node: ast.AST, inner: ast.expr) -> ast.AST:
    """Returns the innermost function of a definition around an expression, else the definition."""
    around = node
    for each in _walk(node):
        if isinstance(each, ast.FunctionDef) and each.lineno <= inner.lineno <= (each.end_lineno or 0):
            around = each
    return around


def families_of(folder: Path) -> dict[Family, list[str]]:
    """Returns the architectures of each family."""
    files = ModelFiles(folder)
    found: dict[Family, list[str]] = {}
    for architecture in sorted(files.architectures):
        if family := files.family(architecture):
            found.setdefault(family, []).append(architecture)
    return found


def text_of(families: dict[Family, list[str]], version: str, date: str) -> str:
    """Returns the table in TOML."""
    lines = ["# Written by tools/moe_families.py from vLLM's model files.", f'vllm = "{version}"', f"date = {date}"]
    lines += ["", "[usual]", "# The keys of all families, rare ones first."]
    for name in KEYS:
        counted = Counter(key for family in families for key in getattr(family, name))
        lines.append(f"{name} = {json.dumps(sorted(counted, key=counted.__getitem__))}")
    for family, architectures in families.items():
        lines += ["", "[[family]]"]
        lines += [f"{name} = {json.dumps(getattr(family, name))}" for name in KEYS]
        lines.append(f"shares_tokens = {json.dumps(family.shares_tokens)}")
        if family.expert_dtype:
            lines.append(f"expert_dtype = {json.dumps(family.expert_dtype)}")
        lines += ["architectures = [", *(f"  {json.dumps(each)}," for each in architectures), "]"]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("version")
    options = parser.parse_args()
    sys.stdout.write(text_of(families_of(options.folder), options.version, datetime.now(UTC).date().isoformat()))
