"""Does what CONTRIBUTING.md says, with its own code: a first change, a backend, a transport between nodes."""

import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

from ep_a2a import routing
from ep_a2a.config import transports
from ep_a2a.managers import registry
from ep_a2a.managers.registry import create_manager
from ep_a2a.testing import RankContext, run_ranks
from tests.cases.parity_cases import run_backend, run_manager
from tests.unit import test_routing

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
HIDDEN_DIM = 32


def code_of(heading: str) -> list[str]:
    """The Python blocks of a section of the page."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    section = rest.partition("\n## ")[0]
    return [textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```$", section, re.DOTALL | re.M)]


def file_of(heading: str) -> str:
    """The name of the module that a section writes."""
    path = re.search(rf"\n## {heading}\n.*?Write `([\w/]+)\.py`", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert path is not None
    return path[1].replace("/", ".")


def add_module(name: str, source: str) -> None:
    """As if the source were written to the module's file."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(source, vars(module))


def add_a_backend(context: RankContext, name: str, source: str, registration: str) -> None:
    add_module(name, source)
    exec(registration, vars(registry))
    for layout in ("compact", "rank_major"):
        run_backend(context, "objects", layout, HIDDEN_DIM)


def add_a_transport(context: RankContext, name: str, source: str, registration: str) -> None:
    add_module(name, source)
    exec(registration, vars(transports))
    manager = create_manager("ep_a2a", context.group)
    run_manager(context, manager, "rank_major", HIDDEN_DIM, gpu_per_node=2, internode_transport="messages")


def test_the_backend_of_the_page() -> None:
    heading = "How to add a backend"
    run_ranks(add_a_backend, 3, file_of(heading), *code_of(heading))


def test_the_transport_of_the_page() -> None:
    heading = "How to add a transport between nodes"
    run_ranks(add_a_transport, 4, file_of(heading), *code_of(heading))


def test_the_first_change_of_the_page(monkeypatch) -> None:
    test, change = code_of("A first change in 15 minutes")
    names = dict(vars(routing))
    exec(change, names)
    monkeypatch.setitem(routing.ROUTINGS, "hot_expert", names["_hot_expert"])
    scope = dict(vars(test_routing))
    exec(test, scope)
    scope["test_hot_expert"]()
