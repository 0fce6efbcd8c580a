"""The places in the kernels' source that order accesses to memory, found by reading the source."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

from ep_a2a.kernels import primitives

KERNELS = Path(primitives.__file__).parent
KINDS = ("sem", "scope", "barrier", "volatile", "wt", "wait")
"""sem: a release or acquire. scope: that of the system. barrier: of a program. volatile: of a load. wt: a store past
all caches. wait: for the launch before."""


@dataclass(frozen=True, order=True)
class Site:
    """A place that orders accesses.

    Attributes:
        file, line: where it is. function: around it. kind: one of KINDS.
        number: of its kind in the function, from 0.
    """

    file: str
    line: int
    function: str
    kind: str
    number: int = 0

    @property
    def key(self) -> str:
        """A name that stays when lines move."""
        return f"{self.file.removesuffix('.py')}.{self.function} {self.kind} {self.number}"

    @property
    def place(self) -> str:
        """The place as the simulator's machine names it."""
        return f"{self.file}:{self.line} {self.kind}"


@functools.cache
def ordering_sites() -> tuple[Site, ...]:
    """All sites, in the order of the source."""
    found: list[Site] = []
    for path in sorted(KERNELS.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                kinds = sorted((node.lineno, kind) for node in ast.walk(function) for kind in _kinds_of(node))
                counts = dict.fromkeys(KINDS, 0)
                for line, kind in kinds:
                    found.append(Site(path.name, line, function.name, kind, counts[kind]))
                    counts[kind] += 1
    return tuple(found)


def _kinds_of(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.Call):
        return []
    name = ast.unparse(node.func)
    given = {each.arg: ast.unparse(each.value) for each in node.keywords}
    kinds = []
    if name.startswith("tl.atomic_"):
        kinds += ["sem"] * (given["sem"] != "'relaxed'") + ["scope"] * (given["scope"] == "'sys'")
    kinds += ["barrier"] * (name == "barrier") + ["wait"] * (name.endswith("after_previous_launch"))
    kinds += ["volatile"] * (name == "volatile_load")
    return kinds + ["wt"] * (name == "tl.store" and "cache_modifier" in given)
