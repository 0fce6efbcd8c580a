"""Device code reads by volatile loads what other programs write while it runs.

A plain load may hit in L1, and the compiler may repeat it or move it out of a loop (docs/memory-model.md).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ep_a2a

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

KERNELS = Path(ep_a2a.__file__).parent / "kernels"
PARSERS = ("payload_of", "epoch_of")
"""They take flagged words apart, which are valid only once their writer has stored them."""
POLLED_REGIONS = ("POISON", "COUNTS", "WEIGHT_EPOCHS", "CHUNK_COUNTS", "LOW_LATENCY_ROWS", "LOW_LATENCY_SIDES")
"""Regions that others write during a launch, and whose readers need no acquire."""
POLLING_FUNCTIONS = ("read_block", "before_reading")
"""They load, at addresses that this test does not trace, what others write during a launch."""
SAME_POINTER = ("tl.multiple_of", "tl.cast", "tl.max_contiguous")
"""Builtins that return their first argument in another form."""


class DeviceCode:
    """Functions of device code, and where the values in them come from."""

    def __init__(self, sources: Iterable[str]) -> None:
        self.functions: dict[str, list[ast.FunctionDef]] = defaultdict(list)
        self.calls: dict[str, list[tuple[ast.FunctionDef, ast.Call]]] = defaultdict(list)
        self.tuples: dict[str, list[str]] = {}
        """Fields of named tuples, by class."""
        for source in sources:
            for function in ast.walk(ast.parse(source)):
                if isinstance(function, ast.ClassDef) and [*map(ast.unparse, function.bases)] == ["NamedTuple"]:
                    fields = [each.target for each in function.body if isinstance(each, ast.AnnAssign)]
                    self.tuples[function.name] = list(map(ast.unparse, fields))
                if isinstance(function, ast.FunctionDef):
                    self.functions[function.name].append(function)
                    for node in ast.walk(function):
                        if isinstance(node, ast.Call):
                            self.calls[ast.unparse(node.func)].append((function, node))

    def origins(self, value: ast.expr, function: ast.FunctionDef) -> set[ast.Call]:
        """The loads, and the calls of `address`, that a value or a pointer comes from."""
        return {call for call, _ in self._calls_behind(value, function, ("tl.load", "address"))}

    def _calls_behind(
        self, value: ast.expr, function: ast.FunctionDef, names: Iterable[str]
    ) -> set[tuple[ast.Call, ast.FunctionDef]]:
        """The calls of these functions, each with the function around it, that a value comes from."""
        found: set[tuple[ast.Call, ast.FunctionDef]] = set()
        seen: set[tuple[str, ast.expr]] = set()
        left = [(value, function)]
        while left:
            node, where = left.pop()
            if (where.name, node) not in seen:
                seen.add((where.name, node))
                if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                    found.add((node, where))
                else:
                    left.extend(self._one_step_back(node, where))
        return found

    def _one_step_back(self, node: ast.expr, where: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.FunctionDef]]:
        """The expressions that an expression takes its value from; a pointer stands left of its offset."""
        if isinstance(node, ast.BinOp):
            yield node.left, where
        elif isinstance(node, ast.IfExp):
            yield from ((node.body, where), (node.orelse, where))
        elif isinstance(node, ast.Name):
            yield from ((each, where) for each in assigned_to(node.id, where))
            yield from self._given_for(node.id, where)
        elif isinstance(node, ast.Call):
            yield from self._returned_by(node, where)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            place = node.slice.value
            for each, other in self._one_step_back(node.value, where):
                yield (each.elts[place] if isinstance(each, ast.Tuple) else each), other
        elif isinstance(node, ast.Attribute):
            makers = [name for name, fields in self.tuples.items() if node.attr in fields]
            for call, other in self._calls_behind(node.value, where, makers):
                yield call.args[self.tuples[ast.unparse(call.func)].index(node.attr)], other

    def _returned_by(self, call: ast.Call, where: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.FunctionDef]]:
        name = ast.unparse(call.func)
        if name == "tl.where":
            yield from ((each, where) for each in call.args[1:])
        elif name in SAME_POINTER:
            yield call.args[0], where
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "to":
            yield call.func.value, where
        for function in self.functions.get(name, ()):
            yield from (
                (node.value, function)
                for node in ast.walk(function)
                if isinstance(node, ast.Return) and node.value is not None
            )

    def _given_for(self, parameter: str, function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.FunctionDef]]:
        names = [each.arg for each in function.args.args]
        if parameter in names:
            for caller, call in self.calls[function.name]:
                yield from ((word.value, caller) for word in call.keywords if word.arg == parameter)
                yield from ((each, caller) for name, each in zip(names, call.args) if name == parameter)

    def parsed_loads(self) -> dict[str, set[ast.Call]]:
        """By where words are taken apart: the loads that have brought them."""
        parses = [each for parser in PARSERS for each in self.calls[parser]]
        return {
            f"{function.name}: {ast.unparse(call)}": loads_of(self.origins(call.args[0], function))
            for function, call in parses
        }

    @cached_property
    def _regions(self) -> dict[ast.Call, set[str]]:
        """By load: the regions that its pointer comes from."""
        return {
            load: {
                ast.unparse(each.args[1])
                for each in self.origins(load.args[0], function)
                if ast.unparse(each.func) == "address"
            }
            for function, load in self.calls["tl.load"]
        }

    def loads_of_region(self, region: str) -> set[ast.Call]:
        """Loads from a region."""
        return {load for load, regions in self._regions.items() if region in regions}

    def loads_in(self, name: str) -> set[ast.Call]:
        """Loads in a function itself."""
        return {load for function, load in self.calls["tl.load"] if function.name == name}


def assigned_to(name: str, function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a function assigns to a name; an element of a tuple as a subscript."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    yield node.value
                for place, each in enumerate(target.elts if isinstance(target, ast.Tuple) else ()):
                    if isinstance(each, ast.Name) and each.id == name:
                        yield ast.Subscript(node.value, ast.Constant(place))


def loads_of(calls: Iterable[ast.Call]) -> set[ast.Call]:
    """Those of the calls that are loads."""
    return {call for call in calls if ast.unparse(call.func) == "tl.load"}


def is_volatile(load: ast.Call) -> bool:
    """Whether a load says so itself."""
    return any(word.arg == "volatile" and ast.unparse(word.value) == "True" for word in load.keywords)


def plain_ones(loads: Iterable[ast.Call]) -> list[str]:
    """Those of the loads that are not volatile."""
    return sorted(ast.unparse(load) for load in loads if not is_volatile(load))


@pytest.fixture(scope="module")
def kernels() -> DeviceCode:
    return DeviceCode(path.read_text() for path in sorted(KERNELS.glob("*.py")))


def test_flagged_words_come_from_volatile_loads(kernels: DeviceCode) -> None:
    found = kernels.parsed_loads()
    assert len(found) > 10
    assert [where for where, loads in found.items() if not loads] == [], "words whose load this test does not find"
    assert {where: plain for where, loads in found.items() if (plain := plain_ones(loads))} == {}


@pytest.mark.parametrize("region", POLLED_REGIONS)
def test_a_region_that_others_write_is_read_by_volatile_loads(kernels: DeviceCode, region: str) -> None:
    found = kernels.loads_of_region(region)
    assert found, "no load of the region is found"
    assert plain_ones(found) == []


@pytest.mark.parametrize("name", POLLING_FUNCTIONS)
def test_a_function_that_polls_loads_volatile(kernels: DeviceCode, name: str) -> None:
    assert kernels.loads_in(name)
    assert plain_ones(kernels.loads_in(name)) == []


def test_no_volatile_load_is_beyond_these_rules(kernels: DeviceCode) -> None:
    guarded = set().union(
        *kernels.parsed_loads().values(),
        *map(kernels.loads_of_region, POLLED_REGIONS),
        *map(kernels.loads_in, POLLING_FUNCTIONS),
    )
    others = [
        f"{function.name}: {ast.unparse(load)}"
        for function, load in kernels.calls["tl.load"]
        if is_volatile(load) and load not in guarded
    ]
    assert others == [], "these could lose volatile=True unseen: name their region or their function above"


def test_plain_loads_are_found_behind_names_parameters_and_results() -> None:
    code = DeviceCode(
        [
            """
def inner(words):
    return payload_of(words)
def read(at):
    return at, tl.load(at + 1)
class Place(NamedTuple):
    rank: tl.tensor
    lines: tl.tensor
def outer(table, rank):
    place = Place(rank, tl.multiple_of(address(table, COUNTS, rank, 2, tl.int64).to(tl.int64) + rank, 8))
    _, words = read(place.lines)
    return inner(words)
"""
        ]
    )
    assert [list(map(ast.unparse, loads)) for loads in code.parsed_loads().values()] == [["tl.load(at + 1)"]]
    assert plain_ones(code.loads_of_region("COUNTS")) == ["tl.load(at + 1)"]
    assert code.loads_of_region("POISON") == set()
