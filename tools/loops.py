"""Finds the loops of a compiled kernel in nvdisasm's listing, and counts the instructions of a turn.

A turn is a graph of blocks, in which each inner loop is one node with one turn of its own. A wait is an innermost loop
that reads the clock.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tools import order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

LINE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
JUMP = re.compile(r"`\((\.L_\w+)\)")
CLOCK = "SR_GLOBALTIMER"
MAJORITY = 0.8
"""Share of a loop's instructions that belong to the function whose loop it is, or to what that function calls."""


class Work(NamedTuple):
    """What a warp does on a way: numbers of instructions, barriers, and loads of addresses from the table."""

    instructions: int = 0
    barriers: int = 0
    table_loads: int = 0

    def plus(self, other: Work) -> Work:
        """The work of one way behind the other."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Instruction(NamedTuple):
    """One line of a listing.

    Attributes:
        opcode, operands: as they are printed. is_predicated: whether some threads may leave it out.
        functions: the device functions that it is part of, the kernel first.
        loads_address: whether it loads an address from the op's table.
    """

    opcode: str
    operands: str
    is_predicated: bool
    functions: tuple[str, ...]
    loads_address: bool

    @property
    def ends_way(self) -> bool:
        """Whether nothing but its target follows, for threads that it is not left out for."""
        return self.opcode.split(".")[0] in ("BRA", "EXIT", "RET") and not self.opcode.startswith("BRA.DIV")

    @property
    def target(self) -> str:
        """The label that may follow; "" for none. A reconvergence point or a function is none.

        Nor is the target of BRA.DIV: only warps whose threads are apart go there.
        """
        found = JUMP.search(self.operands)
        goes_on = self.opcode.split(".")[0] in ("BSSY", "CALL") or self.opcode.startswith("BRA.DIV")
        return found[1] if found and not goes_on else ""


@functools.cache
def lines_that_load_addresses(path: Path) -> frozenset[int]:
    """Lines of a kernel module on which addresses are loaded from the op's table."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "tl.load"]
    return frozenset(call.lineno for call in loads if ast.unparse(call.args[0]).startswith("op.table"))


def parse(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of nvdisasm's listing with lines, and by label the number of the one behind it."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    # lines stand before the instructions that come from them, innermost first
    places: list[tuple[str, int]] = []
    follows_instruction = True
    for line in listing.splitlines():
        if place := LINE.match(line):
            places = [*([] if follows_instruction else places), (place[1], int(place[2]))]
            follows_instruction = False
        elif label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.match(line):
            predicate, opcode, operands = found.groups()
            functions = tuple(order.function_at(file, number) for file, number in reversed(places))
            is_load = opcode.startswith("LDG.E") and "STRONG" not in opcode and _loads_address(places)
            instructions.append(Instruction(opcode, operands, predicate is not None, functions, is_load))
            follows_instruction = True
    return instructions, labels


def _loads_address(places: list[tuple[str, int]]) -> bool:
    path, line = Path(places[0][0]), places[0][1]
    # Triton notes a load on its line or on the next one
    return path.parent == order.KERNELS and not lines_that_load_addresses(path).isdisjoint((line - 1, line))


@dataclass
class Block:
    """Instructions that are run one after the other; successors: numbers of the blocks that may follow."""

    instructions: list[Instruction]
    successors: list[int]

    @functools.cached_property
    def work(self) -> Work:
        """Its instructions, counted."""
        barriers = sum(each.opcode.startswith("BAR.") for each in self.instructions)
        return Work(len(self.instructions), barriers, sum(each.loads_address for each in self.instructions))


def blocks_of(instructions: list[Instruction], labels: dict[str, int]) -> dict[int, Block]:
    """The blocks that can be reached from the first instruction, by the number of their first one."""
    ends = {number + 1 for number, each in enumerate(instructions) if each.target or each.ends_way}
    starts = sorted({0, *labels.values(), *ends} - {len(instructions)})
    blocks = {}
    for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
        last = instructions[end - 1]
        falls = end < len(instructions) and (last.is_predicated or not last.ends_way)
        targets = [labels[last.target]] if last.target else []
        blocks[start] = Block(instructions[start:end], [*([end] if falls else []), *targets])
    reached, left = {0}, [0]
    while left:
        for successor in blocks[left.pop()].successors:
            if successor not in reached:
                reached.add(successor)
                left.append(successor)
    return {number: blocks[number] for number in sorted(reached)}


@dataclass
class Loop:
    """A loop of the compiled code.

    Attributes:
        header: the block that every turn begins with. blocks: those of the loop and of loops inside it.
        inner: the loops directly inside it. depth: how many loops lie around it.
        function: the device function whose loop it is.
        is_wait: whether it waits for other programs or ranks.
    """

    header: int
    blocks: frozenset[int]
    inner: list[Loop] = field(default_factory=list)
    depth: int = 0
    function: str = ""
    is_wait: bool = False


def loops_of(blocks: dict[int, Block]) -> list[Loop]:
    """The loops, each behind the one around it."""
    parents, before = _nearest_dominators(blocks), _before(blocks)
    found = []
    for header in blocks:
        ends = [number for number in before[header] if _dominates(parents, header, number)]
        if ends:
            members, left = {header}, [number for number in ends if number != header]
            while left:
                number = left.pop()
                if number not in members:
                    members.add(number)
                    left += before[number]
            found.append(Loop(header, frozenset(members)))
    found.sort(key=lambda loop: -len(loop.blocks))
    for number, loop in enumerate(found):
        around = [outer for outer in found[:number] if loop.header in outer.blocks]
        if around:
            around[-1].inner.append(loop)
        loop.depth = len(around)
    for loop in found:
        inside = [each for number in loop.blocks for each in blocks[number].instructions]
        loop.is_wait = not loop.inner and any(CLOCK in each.operands for each in inside)
        loop.function = _function_of([each.functions for each in inside])
    found.sort(key=lambda loop: (loop.header, loop.depth))
    return found


def _dominates(parents: dict[int, int], block: int, other: int) -> bool:
    """Whether every way to `other` leads through `block`; parents: from _nearest_dominators."""
    while other != block and other != 0:
        other = parents[other]
    return other == block


def _nearest_dominators(blocks: dict[int, Block]) -> dict[int, int]:
    """By block the last one before it that lies on every way to it."""
    order_of = {number: place for place, number in enumerate(_in_order(blocks))}
    parents = {0: 0}

    def meet(one: int, other: int) -> int:
        while one != other:
            if order_of[one] < order_of[other]:
                one, other = other, one
            one = parents[one]
        return one

    before = _before(blocks)
    changed = True
    while changed:
        changed = False
        for number in list(order_of)[1:]:
            known = [each for each in before[number] if each in parents]
            parent = functools.reduce(meet, known)
            changed |= parents.get(number) != parent
            parents[number] = parent
    return parents


def _in_order(blocks: dict[int, Block]) -> list[int]:
    """The blocks, each before those that follow it, but for turns of loops."""
    found: list[int] = []
    seen, left = {0}, [(0, iter(blocks[0].successors))]
    while left:
        number, successors = left[-1]
        following = next((each for each in successors if each not in seen), None)
        if following is None:
            found.append(number)
            left.pop()
        else:
            seen.add(following)
            left.append((following, iter(blocks[following].successors)))
    return found[::-1]


def _before(blocks: dict[int, Block]) -> dict[int, list[int]]:
    """By block those that it may follow."""
    found: dict[int, list[int]] = {number: [] for number in blocks}
    for number, block in blocks.items():
        for successor in block.successors:
            found[successor].append(number)
    return found


def _function_of(functions: list[tuple[str, ...]]) -> str:
    """The innermost function that most of the instructions are part of."""
    name, depth = "", 0
    while True:
        most = Counter(each[: depth + 1] for each in functions if len(each) > depth).most_common(1)
        if not most or most[0][1] < MAJORITY * len(functions):
            return name
        name, depth = most[0][0][-1], depth + 1


class Turn:
    """A turn of a loop as a graph without cycles, in which each inner loop is one node with one turn of its own."""

    def __init__(self, loop: Loop, blocks: dict[int, Block]) -> None:
        node_of = {number: number for number in loop.blocks}
        node_of |= {number: inner.header for inner in loop.inner for number in inner.blocks}
        self._header, self._blocks = loop.header, blocks
        self._inner = {inner.header: inner for inner in loop.inner}
        self._following: dict[int, set[int]] = {node: set() for node in node_of.values()}
        self.lasts, self.exits = set[int](), set[int]()
        for number, node in node_of.items():
            for successor in blocks[number].successors:
                if successor == loop.header:
                    self.lasts.add(node)
                elif successor not in node_of:
                    self.exits.add(node)
                elif node_of[successor] != node:
                    self._following[node].add(node_of[successor])
        self._from_last = list(graphlib.TopologicalSorter(self._following).static_order())

    def arrived(self) -> Work:
        """The longest way that enters no wait, nor what is only run before one, where there is such a way."""
        waits = {header for header, inner in self._inner.items() if inner.is_wait}
        left_out = waits if self._way(max, self.lasts, without=waits) else set()
        for node, following in self._following.items():
            if following & waits and self._way(max, self.lasts, without=left_out | {node}):
                left_out = left_out | {node}
        found = self._way(max, self.lasts, without=left_out)
        assert found, "a loop has a turn"
        return found

    def polled(self) -> Work:
        """The longest way, on which each wait takes the fewest instructions from its begin to its end."""
        found = self._way(max, self.lasts, polls=True)
        assert found, "a loop has a turn"
        return found

    def shortest(self, ends: set[int]) -> Work:
        """The shortest way to one of `lasts` or `exits`."""
        found = self._way(min, ends)
        assert found, "a loop has a turn and an end"
        return found

    def _way(
        self, choose: Callable[..., Work], ends: set[int], *, without: Collection[int] = (), polls: bool = False
    ) -> Work | None:
        best: dict[int, Work] = {}
        for node in self._from_last:
            ways = [best[each] for each in self._following[node] if each in best]
            ways += [Work()] if node in ends else []
            if ways and node not in without:
                best[node] = self._work_of(node, polls).plus(choose(ways))
        return best.get(self._header)

    def _work_of(self, node: int, polls: bool) -> Work:
        inner = self._inner.get(node)
        if inner is None:
            return self._blocks[node].work
        turn = Turn(inner, self._blocks)
        if inner.is_wait:
            return turn.shortest(turn.exits)
        return turn.polled() if polls else turn.arrived()


def works_of(loop: Loop, blocks: dict[int, Block]) -> tuple[Work, Work]:
    """The work of a turn when all has arrived, and when waits look once more; of a wait twice its shortest turn."""
    turn = Turn(loop, blocks)
    if loop.is_wait:
        return (turn.shortest(turn.lasts),) * 2
    return turn.arrived(), turn.polled()
