"""ep_a2a.integrations.atom against the pinned facts of ATOM and AITER, and the shape of both that tests run on."""

import ast
import contextlib
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_a2a.compat.mori import uninstall
from ep_a2a.compat.mori.ops import EpDispatchCombineConfig, EpDispatchCombineOp
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations import atom as integration
from ep_a2a.integrations import contract
from ep_a2a.integrations.atom.patches import CONTRACT, check_options, handle_kwargs, make_prepare_finalize, patch_layers
from ep_a2a.integrations.atom.prepare_finalize import AtomPrepareAndFinalize
from ep_a2a.managers import base
from tests.cases.atom_cases import SHAPE
from tests.signatures.reader import MISSING, describe, load

ATOM, AITER = load("atom"), load("aiter")
PACKAGE = Path(integration.__file__).parent
FUSED = "atom/model_ops/fused_moe"
CALLS = {"prepare": "_prepare", "finalize": "_finalize", "prepare_async": "_prepare", "finalize_async": "_finalize"}


def pinned(file: str, name: str) -> str:
    text: str = (ATOM if file.startswith("atom/") else AITER)["files"][file][name]
    return text


def names_of(text: str) -> list[str]:
    return [each.partition("=")[0].strip() for each in text.split(",")]


def bind(function: Any, calls: str, *first: None) -> None:
    """Whether a function takes each of the calls that were read, "N positional; keyword, ...", behind its first."""
    for call in calls.split(" | "):
        number, _, keywords = call.partition(" positional")
        named = [each for each in keywords.removeprefix("; ").split(", ") if each and each != "**"]
        inspect.signature(function).bind(*first, *range(int(number)), **dict.fromkeys(named))


def test_what_was_read_is_named_and_found():
    for table, repository in ((ATOM, "ROCm/ATOM"), (AITER, "ROCm/aiter")):
        assert repository in table["source"]
        assert re.fullmatch("[0-9a-f]{40}", table["version"])
        assert MISSING not in [text for names in table["files"].values() for text in names.values()]
        page = (PACKAGE.parents[2] / "docs" / "atom.md").read_text()
        assert [commit for commit in (table["version"], *table["later"]) if commit[:8] not in page] == []
        names = {name for names in table["files"].values() for name in names}
        assert names.issuperset(name for read in table["later"].values() for name in read)


# --- the switch, on the shape of ATOM ---


@pytest.mark.parametrize("first_call", ["before the import", "after the import"])
def test_layers_are_changed_once_however_often_it_is_activated(monkeypatch, first_call):
    monkeypatch.syspath_prepend(str(SHAPE))
    monkeypatch.setenv("EP_A2A_BACKEND", "ep_a2a")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    try:
        if first_call == "before the import":
            assert integration.activate()
            assert integration.activate()
        base = importlib.import_module("atom.model_ops.moe").FusedMoEMethodBase
        assert integration.activate()
        changed = base.maybe_make_prepare_finalize
        assert integration.activate()
        assert base.maybe_make_prepare_finalize is changed
        assert changed.__wrapped__.__module__ == "atom.model_ops.moe"
        assert not hasattr(changed.__wrapped__, "__wrapped__")
        assert base._maybe_make_prepare_finalize is make_prepare_finalize
    finally:
        uninstall()
        for name in [name for name in set(sys.modules) - before if name.partition(".")[0] in ("atom", "aiter")]:
            del sys.modules[name]


def test_an_atom_whose_layers_take_other_arguments_is_refused(tmp_path):
    file = tmp_path / "atom" / "model_ops" / "moe.py"
    file.parent.mkdir(parents=True)
    text = (SHAPE / "atom/model_ops/moe.py").read_text()
    file.write_text(text.replace("def _maybe_make_prepare_finalize(moe", "def _maybe_make_prepare_finalize(layer, moe"))
    module = SimpleNamespace(__file__=str(file), FusedMoEMethodBase=type("FusedMoEMethodBase", (), {}))
    with pytest.raises(UnsupportedError, match=r"_maybe_make_prepare_finalize of .* takes \(layer, moe"):
        patch_layers(module)


# --- ATOM's prepare/finalize ---


@pytest.mark.parametrize("method", CALLS)
def test_prepare_and_finalize_take_what_atoms_do(method):
    text = pinned(f"{FUSED}/mori_prepare_finalize.py", f"MoriPrepareAndFinalize.{method}")
    ours = getattr(AtomPrepareAndFinalize, method)
    assert list(inspect.signature(ours).parameters) == names_of(text)
    bind(ours, pinned(f"{FUSED}/modular_kernel.py", f"FusedMoEModularKernel.{CALLS[method]}:{method} calls"), None)


def test_it_has_every_method_of_atoms_base_class():
    prefix = "FusedMoEPrepareAndFinalize."
    names = [name.removeprefix(prefix) for name in ATOM["files"][f"{FUSED}/modular_kernel.py"] if prefix in name]
    assert len(names) >= 9
    assert [name for name in names if not hasattr(AtomPrepareAndFinalize, name)] == []


@pytest.mark.parametrize(
    "call", ["dispatch", "combine", "dispatch_send", "dispatch_recv", "combine_send", "combine_recv"]
)
def test_our_op_takes_the_calls_that_atoms_own_prepare_finalize_makes(call):
    symbols = ATOM["files"][f"{FUSED}/mori_prepare_finalize.py"]
    (calls,) = (text for name, text in symbols.items() if name.endswith(f":{call} calls"))
    bind(getattr(EpDispatchCombineOp, call), calls, None)


def test_our_configuration_takes_what_atom_and_aiter_set():
    bind(
        EpDispatchCombineConfig,
        pinned(f"{FUSED}/mori_prepare_finalize.py", "init_mori_op:EpDispatchCombineConfig calls"),
    )
    communicators = "aiter/dist/device_communicators"
    set_by_aiter = pinned(f"{communicators}/all2all.py", "MoriAll2AllManager._make_all2all_kwargs:kwargs keys")
    inspect.signature(EpDispatchCombineConfig).bind(**dict.fromkeys(names_of(set_by_aiter)))


# --- handle kwargs ---


def moe_config(**changes: Any) -> SimpleNamespace:
    values = {
        "num_experts": 8,
        "experts_per_token": 2,
        "hidden_dim": 64,
        "num_local_experts": 4,
        "in_dtype": torch.bfloat16,
        "max_num_tokens": 16,
        "moe_parallel_config": SimpleNamespace(local_ep_size=1),
    }
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize("combine_quant", ["none", "fp8_blockwise", "fp8_direct_cast"])
def test_handle_kwargs_are_those_of_atom_and_aiter(combine_quant):
    kwargs = handle_kwargs(moe_config(hidden_dim=128), SimpleNamespace(rank=0, world_size=2), combine_quant)
    by_atom = pinned("atom/model_ops/moe.py", "FusedMoEMethodBase._maybe_make_prepare_finalize:all_to_all_args keys")
    assert set(kwargs) == set(names_of(by_atom))
    by_aiter = pinned("aiter/dist/device_communicators/all2all.py", "MoriAll2AllManager._make_all2all_kwargs")
    assert set(kwargs) == set(names_of(by_aiter)) - {"self", "low_latency"}
    config = config_from_handle_kwargs(kwargs, topology_internode=False)
    assert (config.quant_type, config.data_type, config.combined_dtype) == (combine_quant, *[torch.bfloat16] * 2)


# --- every name that is used is pinned ---


def attributes_of(name: str, variable: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    found = {
        each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute) and ast.unparse(each.value) == variable
    }
    asked = {
        ast.literal_eval(each.args[1])
        for each in ast.walk(tree)
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "getattr" and ast.unparse(each.args[0]) == variable
    }
    return found | asked


@pytest.mark.parametrize(
    ("module", "variable", "file", "owner"),
    [
        ("patches", "moe", f"{FUSED}/config.py", "FusedMoEConfig."),
        ("patches", "moe.moe_parallel_config", "atom/model_ops/moe.py", "FusedMoEParallelConfig."),
        ("patches", "config", "atom/config.py", "Config."),
        ("prepare_finalize", "self._kernels", f"{FUSED}/modular_kernel.py", ""),
        ("prepare_finalize", "self._ubatching", "atom/utils/tbo/ubatching.py", ""),
        ("patches", "ubatching", "atom/utils/tbo/ubatching.py", ""),
        (
            "manager",
            "communicator",
            "aiter/dist/device_communicators/base_device_communicator.py",
            "DeviceCommunicatorBase.",
        ),
    ],
)
def test_attributes_that_are_used_were_read(module, variable, file, owner):
    used = attributes_of(module, variable)
    assert used
    table = ATOM if file.startswith("atom/") else AITER
    known = {name.partition(":")[0] for name in table["files"][file]}
    known |= {name.partition(".")[0] for name in known} if not owner else set()
    known |= {"DeviceCommunicatorBase.all2all_manager"}  # the property of its subclass, below
    assert {f"{owner}{name}" for name in used} <= known


def test_environment_variables_that_are_used_were_read():
    used = attributes_of("patches", "envs")
    assert {f"{name} variable" for name in used} <= set(ATOM["files"]["atom/utils/envs.py"])


def test_the_setter_and_the_patched_methods_are_there():
    communicator = "aiter/dist/device_communicators/communicator_cuda.py"
    assert pinned(communicator, "CudaCommunicator.all2all_manager") == "property with setter"
    for symbol, expected in CONTRACT["overridden"].items():
        assert pinned("atom/model_ops/moe.py", symbol.partition(":")[2]) == expected


def test_our_managers_have_what_aiters_have():
    prefix = "All2AllManagerBase."
    for name, text in AITER["files"]["aiter/dist/device_communicators/base_device_communicator.py"].items():
        if name.startswith(prefix):
            ours = describe(Path(base.__file__), name)
            assert ours != MISSING, name
            if text not in ("field", "attribute"):
                positional = names_of(text)[1:]
                method = getattr(base.All2AllManagerBase, name.removeprefix(prefix))
                inspect.signature(method).bind(None, *positional)


# --- the shape that tests run on ---


@pytest.mark.parametrize("path", [p.relative_to(SHAPE).as_posix() for p in SHAPE.rglob("*.py") if p.stem != "__init__"])
def test_the_shape_is_as_pinned(path):
    if path == "atom/utils/envs.py":
        names = {name.removesuffix(" variable") for name in ATOM["files"][path]}
        assert names == {name for name in contract._definitions(SHAPE / path) if name.isupper()}
        return
    symbols = (ATOM if path.startswith("atom/") else AITER)["files"][path]
    for name, text in symbols.items():
        if not name.endswith(("keys", " choices")) or ":returned" in name:
            assert describe(SHAPE / path, name) in (text, MISSING), name
    assert any(describe(SHAPE / path, name) == text for name, text in symbols.items())


# --- ATOM's settings ---

ENVS = {"ATOM_MORI_V2": False, "ATOM_MORI_FP4_DISPATCH": False, "ATOM_MORI_COMBINE_QUANT": "none"}


def choices(option: str) -> list[str]:
    text = pinned("atom/model_engine/arg_utils.py", f"{option} choices")
    values: list[str] = ast.literal_eval(re.search(r"choices=(\[.*\])", text)[1])  # type: ignore[index]
    return values


def test_the_choices_of_atoms_options_are_those_that_were_read():
    assert set(choices("--all2all-backend")) == {"high-throughput", "low-latency", "rccl", "none"}
    assert choices("--moe-backend") == ["standard", "mega"]


@pytest.mark.parametrize(
    ("config", "envs", "refused"),
    [
        # no configuration is taken for defaults
        (None, {}, ""),
        # MORI's two modes are the same kernels here; with "none" ATOM asks for no prepare/finalize
        *(({"moe_all2all_backend": each}, {}, "") for each in ("auto", "mori", "none")),
        ({"moe_all2all_backend": "rccl"}, {}, "--all2all-backend rccl"),
        ({"moe_backend": "standard"}, {}, ""),
        ({"moe_backend": "mega"}, {}, "--moe-backend mega"),
        *(({}, {"ATOM_MORI_COMBINE_QUANT": each}, "") for each in ("none", "fp8_direct_cast", "fp8_blockwise")),
        ({}, {"ATOM_MORI_COMBINE_QUANT": "fp4_blockwise"}, "ATOM_MORI_COMBINE_QUANT=fp4_blockwise"),
        ({}, {"ATOM_MORI_V2": True}, "ATOM_MORI_V2=1"),
        ({}, {"ATOM_MORI_FP4_DISPATCH": True}, "ATOM_MORI_FP4_DISPATCH=1"),
    ],
)
def test_settings_that_need_moris_kernels_or_rccl_are_refused(config, envs, refused):
    with pytest.raises(UnsupportedError, match=refused) if refused else contextlib.nullcontext() as caught:
        check_options(None if config is None else SimpleNamespace(**config), SimpleNamespace(**ENVS | envs))
    if refused:
        assert caught.value.remedy == f"Leave {refused} out."
