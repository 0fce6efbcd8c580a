"""What importing costs, and the rules of the house that a parser can check on every module."""

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ep_a2a

PACKAGE = Path(ep_a2a.__file__).parent
MAX_LINES = 500
MAX_IMPORT_SECS = 0.2

# A module may import its own layer and those before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "ep_a2a",
        "ep_a2a.errors",
        "ep_a2a.env",
        "ep_a2a.clock",
        "ep_a2a.path_security",
        "ep_a2a.whole_files",
        "ep_a2a.interrupts",
        "ep_a2a.log_once",
    ),
    ("ep_a2a.config",),
    ("ep_a2a.policy", "ep_a2a.interface", "ep_a2a.reference", "ep_a2a.routing", "ep_a2a.quantization"),
    ("ep_a2a.memory", "ep_a2a.topology", "ep_a2a.shmem", "ep_a2a.graph_breaks", "ep_a2a.effects"),
    ("ep_a2a.kernels",),
    ("ep_a2a.ops", "ep_a2a.telemetry"),
    ("ep_a2a.autograd", "ep_a2a.slots", "ep_a2a.managers"),
    ("ep_a2a.parallel",),
    ("ep_a2a.integrations", "ep_a2a.compat"),
    ("ep_a2a.testing",),
    ("ep_a2a.commands",),
    ("ep_a2a.cli", "ep_a2a.__main__"),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def offenders(rule: Callable[[str], Any]) -> dict[str, Any]:
    """What breaks a rule in each module of the package, without the modules that keep it."""
    return {name: broken for name in MODULES if (broken := rule(name))}


# --- what importing costs ---

TIMED_IMPORT = """
import sys, time
start = time.process_time()
import ep_a2a
print(time.process_time() - start)
print([name for name in sys.modules if name.split(".")[0] in ("torch", "triton", "numpy", "rich", "typer")])
"""


def run_python(program: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=120, capture_output=True, text=True, cwd=PACKAGE.parent
    )
    return result.stdout.splitlines()


def test_importing_the_package_costs_nothing():
    # time of the processor, to which other work on this machine only ever adds: the best of a few attempts counts
    for _ in range(5):
        secs, modules = run_python(TIMED_IMPORT)
        assert modules == "[]"
        if float(secs) < MAX_IMPORT_SECS:
            return
    pytest.fail(f"import ep_a2a took {secs} s of the processor")


def test_importing_a_part_loads_no_more_than_it_needs():
    """Public names are loaded when they are asked for; the registry and the groups need no Triton and no CUDA."""
    lines = run_python(
        "import sys, ep_a2a\n"
        "def loaded(name): print(name, name in sys.modules)\n"
        "ep_a2a.errors.ConfigError\n"
        "loaded('torch')\n"
        "print(ep_a2a.EpDispatchCombineConfig.__module__)\n"
        "loaded('triton')\n"
        "import ep_a2a.managers.registry\n"
        "loaded('triton')\n"
        "import ep_a2a.parallel.state, ep_a2a.managers.native, ep_a2a.shmem, ep_a2a.config, ep_a2a.testing\n"
        "loaded('triton')\n"
        "import torch\n"
        "print(torch.cuda.is_initialized())\n"
        "print(ep_a2a.ops.EpDispatchCombineOp.__module__)\n"
        "loaded('triton')\n"
    )
    config, op, none = "ep_a2a.config.op_config", "ep_a2a.ops.op", "triton False"
    assert lines == ["torch False", config, none, none, none, "False", op, "triton True"]


def test_every_public_name_exists():
    for name in (*ep_a2a.__all__, *ep_a2a._SUBMODULES):
        assert getattr(ep_a2a, name) is not None
        assert name in dir(ep_a2a)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ep_a2a.nothing


# --- rules for every module ---


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, local imports included, but not the bodies of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            for other in child.orelse:
                yield other
                yield from nodes_that_run(other)
            continue
        yield child
        yield from nodes_that_run(child)


def imported_modules(name: str) -> Iterator[str]:
    """Modules that a module imports, in functions, too."""
    for node in nodes_that_run(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} has a relative import; house style is absolute ones"
            assert node.module
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def import_graph() -> dict[str, set[str]]:
    """The package's modules, and which of the others each imports."""
    return {name: {other for other in imported_modules(name) if other in MODULES} - {name} for name in MODULES}


def rooms_of(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same graph between top-level modules and packages: ep_a2a.config, ep_a2a.env, ..."""
    rooms: dict[str, set[str]] = {}
    for name, others in graph.items():
        room = ".".join(name.split(".")[:2])
        rooms.setdefault(room, set()).update(".".join(other.split(".")[:2]) for other in others)
    return {room: others - {room} for room, others in rooms.items()}


def in_circles(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows of a graph that remain when whatever imports nothing that remains has been taken away, in turn."""
    rest = graph
    while gone := {name for name, others in rest.items() if not others}:
        rest = {name: others - gone for name, others in rest.items() if name not in gone}
    return rest


def layer_of(name: str) -> int:
    found = [
        (len(prefix), number)
        for number, layer in enumerate(LAYERS)
        for prefix in layer
        if name == prefix or (prefix != "ep_a2a" and name.startswith(f"{prefix}."))
    ]
    assert found, f"{name} has no layer: name it in LAYERS"
    return max(found)[1]


def upward_imports(name: str) -> list[str]:
    own = layer_of(name)
    return [other for other in imported_modules(name) if other.split(".")[0] == "ep_a2a" and layer_of(other) > own]


def test_imports_go_one_way():
    assert offenders(upward_imports) == {}


def test_no_imports_go_in_circles():
    graph = import_graph()
    assert in_circles(graph) == {}
    assert in_circles(rooms_of(graph)) == {}


def test_triton_is_imported_by_kernels_and_for_testing_only():
    users = {name for name in MODULES if any(one.split(".")[0] == "triton" for one in imported_modules(name))}
    # benchmarks have device code of their own: a limit that shared the kernels' code would share their mistakes
    device_code = ("ep_a2a.kernels.", "ep_a2a.ops.", "ep_a2a.testing.")
    assert all(
        name.startswith(device_code) or (name.startswith("ep_a2a.commands.") and name.endswith("_kernels"))
        for name in users
    )


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in ("environ", "environb", "getenv", "putenv") for alias in node.names)
    return False


def lines_that_read_the_environment(name: str) -> list[int]:
    return [getattr(node, "lineno", 0) for node in ast.walk(tree_of(name)) if reads_environment(node)]


def test_only_env_reads_the_environment():
    assert list(offenders(lines_that_read_the_environment)) == ["ep_a2a.env"]


def test_modules_are_short():
    def lines_too_many(name: str) -> int:
        return max(0, len(MODULES[name].read_text(encoding="utf-8").splitlines()) - MAX_LINES)

    assert offenders(lines_too_many) == {}


def test_all_packages_are_listed_for_wheels() -> None:
    setup = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in PACKAGE.rglob("*.py")}
    assert set(setup["packages"]) == packages | {"ep_a2a.configs"}
    assert setup["package-dir"] == {"ep_a2a.configs": "configs"}
